"""What a rank of a training gang does for the rank 0, which is the core: all ranks the same, in the
same order, each with its rows of the parameters.

An order carries the generation of the group that it is for: one for another is refused.
"""

from __future__ import annotations

from typing import Any

from common.api.role import Role
from common.runtime.interface import Call
from common.wire.frames import Array, message

FORM_S = 60.0  # to meet the others
MOVE_S = 600.0  # a whole state, from or to rank 0
COMPUTE_S = 3600.0  # the group's own deadline strikes before: a rank that is lost ends a collective


def rank_name(job: str, rank: int) -> str:
    """What a rank beside the first is called in the mesh."""
    return f"rank/{job}/{rank}"


@message
class Order:
    """Of a generation; a newer one ends the rank's part in the group of an older one."""

    generation: int


@message
class Done:
    pass


@message
class Meeting:
    generation: int
    path: str  # of a file, where the ranks of this generation meet
    deadline_s: float  # of each of their collectives


@message
class RoundPart:
    generation: int
    index: int
    bin: dict[str, Array]


@message
class RoundStats:
    stats: Any


@message
class LentGradient:
    """What a hybrid computed, of which each rank takes its rows."""

    generation: int
    index: int
    path: str  # of a file of `size` float32 numbers, which is there until all ranks have answered
    size: int


@message
class Update:
    generation: int
    rounds: int
    denominator: float
    lr_factor: float


@message
class Norm:
    norm: float  # of the whole gradient, before clipping


@message
class ScorePart:
    generation: int
    bin: dict[str, Array]
    what: str  # logprobs | values


@message
class Scores:
    scores: Array  # float32, one for each place


@message
class Taking:
    generation: int
    optimizer: bool  # its state too


class Ranks(Role):
    stand_by = Call(Order, Done, deadline_s=30.0, idempotent=True)
    form = Call(Meeting, Done, deadline_s=FORM_S)
    begin = Call(Order, Done, deadline_s=30.0)
    compute = Call(RoundPart, RoundStats, deadline_s=COMPUTE_S)
    keep = Call(LentGradient, Done, deadline_s=MOVE_S)
    apply = Call(Update, Norm, deadline_s=COMPUTE_S)
    score = Call(ScorePart, Scores, deadline_s=COMPUTE_S)
    gather = Call(Taking, Done, deadline_s=MOVE_S)
    take = Call(Taking, Done, deadline_s=MOVE_S)
