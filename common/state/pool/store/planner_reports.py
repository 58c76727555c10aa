"""What the planner says of its own predictions: of the present state of a job, and of each move
that was judged by what came of it. The leader writes both; people read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MOVE_OUTCOME_EVENT = "move_judged"  # kind of the event that a `MoveOutcome` is made of
# Rules that move workers for a faster step: by what was measured, and by what is foretold of a job
# that has made no step yet.
STAGE_TIME, OPENING = "stage_time", "opening"
SPEEDUP_RULES = frozenset({STAGE_TIME, OPENING})
PREDICTIONS_KEY = "explained"  # of the leaders' memory: by job, what an `JobPrediction` is made of


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """What is predicted of a step of a job as its workers are divided now. Seconds a step; 0: it is
    not known yet.
    """

    step_s: float = 0.0
    rollout_s: float = 0.0
    train_s: float = 0.0
    host_s: float = 0.0  # that the processors of the busiest host need for it
    binds: str = ""  # what a step waits for: rollout, training, cores
    verdict: str = ""  # why no move is made, or which one is: a sentence
    error: float | None = None  # median of |predicted / observed - 1| over judged moves
    ranks: str = ""  # how those of its core divide a mixture, and why: a sentence


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """A move, and what came of it. Seconds a step; None: it was not told."""

    ms: int  # when it was judged, by the server's time
    job: str = ""
    resident: str = ""
    policy: str = ""  # the rule that made it
    was: str = ""  # the role that the workers had
    to: str = ""  # the role that they were given
    step: int | None = None
    before_s: float | None = None
    predicted_s: float | None = None
    observed_s: float | None = None
    expected_s: float | None = None  # what a step would take now without the move
    regret_s: float | None = None  # lost in each step by having made it
    paid: bool = False
    undone: bool = False
    reason: str = ""  # why it was undone, where that was told

    @property
    def gang(self) -> str:
        """The gang whose workers changed their role."""
        return self.resident.rpartition(".")[0]


def decode_predictions(memory: Mapping[str, Any]) -> dict[str, JobPrediction]:
    """What the leaders' memory says, by job; nothing where it says nothing."""
    return {
        job: JobPrediction(**_select_fields(JobPrediction, told))
        for job, told in memory.get(PREDICTIONS_KEY, {}).items()
    }


def decode_move_outcome(ms: int, event_fields: Mapping[str, Any]) -> MoveOutcome:
    """The move that the fields of an event of kind `move_judged` tell of."""
    return MoveOutcome(
        **_select_fields(MoveOutcome, event_fields)
        | {"ms": ms, "was": event_fields.get("from", "")}
    )


def _select_fields(
    kind: type[JobPrediction | MoveOutcome], event_fields: Mapping[str, Any]
) -> dict[str, Any]:
    names = (one.name for one in fields(kind))
    return {name: event_fields[name] for name in names if event_fields.get(name) is not None}
