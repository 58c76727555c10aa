"""The interface of a rank of a training gang: what rank 0, the core, orders of the others. All
ranks get the same orders in the same sequence, and each works on its own rows of the parameters.

An order carries the generation of the group that it is for: one for another is refused.
"""

from __future__ import annotations

from typing import Any

from common.api.role import Drainable
from common.runtime.interface import Call
from common.wire.frames import Array, message

ADOPT_S = 30.0
FORM_S = 60.0  # to meet the others
MOVE_S = 600.0  # a whole state, from or to rank 0
COMPUTE_S = 3600.0  # the group's own deadline strikes before: a rank that is lost ends a collective


def rank_name(job: str, rank: int) -> str:
    """What a rank beside the first is called in the mesh."""
    return f"rank/{job}/{rank}"


@message
class Order:
    """An order for the ranks of a generation; a newer generation ends a rank's part in an older
    one.
    """

    generation: int


@message
class Done:
    """The answer to an order that has no result."""


@message
class Meeting:
    """An order to form the process group of a generation."""

    generation: int
    path: str  # a file through which the ranks of this generation meet
    deadline_s: float  # for each of their collectives


@message
class RoundPart:
    """An order to compute the gradient of one bin, which is this rank's share of a round."""

    generation: int
    index: int
    bin: dict[str, Array]


@message
class RoundStats:
    """The answer to RoundPart: the statistics of the bin's gradient, see `arithmetic/stats.py`."""

    stats: Any


@message
class LentGradient:
    """An order to add a hybrid's gradient of a round; each rank takes its rows of it."""

    generation: int
    index: int
    path: str  # a file of `size` float32 numbers, there until all ranks have answered
    size: int


@message
class Adopt:
    """An order to compute with these settings from now on."""

    generation: int
    algorithm: Any  # the keys of `[algorithm]`, with their values
    optimizer: Any  # the same of `[optimizer]`


@message
class Update:
    """An order to step the optimizer with the sum of the gradients of `rounds` rounds."""

    generation: int
    rounds: int
    denominator: float
    lr_factor: float


@message
class Norm:
    """The answer to Update."""

    norm: float  # norm of the whole gradient, before clipping


@message
class ScorePart:
    """An order to compute the forward pass of one bin, without a gradient."""

    generation: int
    bin: dict[str, Array]
    what: str  # logprobs | values


@message
class Scores:
    """The answer to ScorePart."""

    scores: Array  # float32, one for each place


@message
class Taking:
    """An order to hand the state to rank 0, or to take it from there."""

    generation: int
    optimizer: bool  # whether the optimizer's state goes along


class Ranks(Drainable):
    """The methods of a rank other than 0."""

    stand_by = Call(Order, Done, deadline_s=30.0, idempotent=True)
    form = Call(Meeting, Done, deadline_s=FORM_S)
    begin = Call(Order, Done, deadline_s=30.0)
    compute = Call(RoundPart, RoundStats, deadline_s=COMPUTE_S)
    keep = Call(LentGradient, Done, deadline_s=MOVE_S)
    adopt = Call(Adopt, Done, deadline_s=ADOPT_S)
    apply = Call(Update, Norm, deadline_s=COMPUTE_S)
    score = Call(ScorePart, Scores, deadline_s=COMPUTE_S)
    gather = Call(Taking, Done, deadline_s=MOVE_S)
    take = Call(Taking, Done, deadline_s=MOVE_S)
