"""Planner's predictions of each job's steps, and outcomes of its moves.

The leader writes both for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MOVE_OUTCOME_EVENT = "move_judged"  # kind of the event with a `MoveOutcome`
# Rules that move workers for a faster step: by measurements, and by predictions for a job that has
# made no step yet.
STAGE_TIME, OPENING = "stage_time", "opening"
SPEEDUP_RULES = frozenset({STAGE_TIME, OPENING})
PREDICTIONS_KEY = "explained"  # key in the leaders' memory: fields of a `JobPrediction` by job


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """Prediction of a job's step with its current workers, in seconds a step; 0: unknown."""

    step_s: float = 0.0
    rollout_s: float = 0.0
    train_s: float = 0.0
    host_s: float = 0.0  # processor time of the busiest host
    bottleneck: str = ""  # bottleneck of a step: rollout, training, cores
    verdict: str = ""  # sentence: why no move is made, or which one is
    median_error: float | None = None  # median of |predicted / observed - 1| over judged moves
    expert_split_reason: str = ""  # sentence: how the ranks of its core divide a mixture, and why
    seeding: str = ""  # sentence: how rollout is divided between the core's workers and others
    hybrid_cost: str = ""  # sentence: the bytes and seconds of a hybrid's gradients


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """Outcome of a move, in seconds a step; None: not reported."""

    ms: int  # time of the judgement, by the server's clock
    job: str = ""
    resident: str = ""
    policy: str = ""  # rule that decided the move
    was: str = ""  # earlier role of the workers
    to: str = ""  # new role of the workers
    step: int | None = None
    before_s: float | None = None
    predicted_s: float | None = None
    observed_s: float | None = None
    expected_s: float | None = None  # of a step now without the move
    regret_s: float | None = None  # loss in each step by the move
    paid: bool = False
    undone: bool = False
    reason: str = ""  # why it was undone, if reported

    @property
    def gang(self) -> str:
        """Gang whose workers changed their role."""
        return self.resident.rpartition(".")[0]


def decode_predictions(memory: Mapping[str, Any]) -> dict[str, JobPrediction]:
    """Return the predictions in the leaders' memory, by job."""
    return {
        job: JobPrediction(**_select_fields(JobPrediction, row))
        for job, row in memory.get(PREDICTIONS_KEY, {}).items()
    }


def decode_move_outcome(ms: int, event_fields: Mapping[str, Any]) -> MoveOutcome:
    """Return the outcome that the fields of an event of kind `move_judged` describe."""
    return MoveOutcome(
        **_select_fields(MoveOutcome, event_fields)
        | {"ms": ms, "was": event_fields.get("from", "")}
    )


def _select_fields(
    kind: type[JobPrediction | MoveOutcome], event_fields: Mapping[str, Any]
) -> dict[str, Any]:
    names = (one.name for one in fields(kind))
    return {name: event_fields[name] for name in names if event_fields.get(name) is not None}
