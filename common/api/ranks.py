"""The interface of a rank of a training gang: what rank 0, the core, orders of the others. All
ranks get the same orders in the same sequence, and each works on its own rows of the parameters.

An order carries the generation of the group that it is for: one for another is refused.
"""

from __future__ import annotations

from dataclasses import field
from types import NoneType
from typing import Any

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.calls.role import SETTLE_S, Resting
from meshrl.common.api.weights import Tensor
from meshrl.common.base.encoding.messages import Array, message

ADOPT_S = 30.0
FORM_S = 60.0  # to meet the others
MOVE_S = 600.0  # a whole state, from or to rank 0
COMPUTE_S = 3600.0  # the group's own deadline strikes before: a rank that is lost ends a collective


def rank_name(job: str, rank: int) -> str:
    """What a rank beside the first is called in the mesh."""
    return f"rank/{job}/{rank}"


@message
class Trouble:
    """What hindered an order and can be mended, as it is raised; an empty code: nothing."""

    code: str = ""
    why: str = ""
    where: str = ""
    fix: str = ""


@message
class RankOrder:
    """An order for the ranks of a generation; a newer generation ends a rank's part in an older
    one.
    """

    generation: int


@message
class StandsBy:
    """The answer of a rank that stands by."""

    host: str
    address: str  # by which ranks on other hosts reach it; empty: it cannot tell


@message
class Meeting:
    """An order to form the process group of a generation."""

    generation: int
    where: str  # the ranks of this generation meet: see `common/weights/ways/meeting.py`
    deadline_s: float  # for each of their collectives
    # from which ranks connect to each other; empty: all are on one host
    addresses: list[str] = field(default_factory=list)


@message
class RoundPart:
    """An order to compute a rank's share of a round: the gradients of its bins, of which a rank
    that has experts alone has none.
    """

    generation: int
    index: int
    bins: list[dict[str, Array]]


@message
class RoundStats:
    """The answer to RoundPart: the statistics of each bin's gradient, see `arithmetic/stats.py`."""

    stats: list[Any]


@message
class LentGradient:
    """An order to add a hybrid's gradient of a round. What it names is there until all ranks have
    answered: all of it in a file, for ranks on the host of rank 0; for others their rows alone.
    """

    generation: int
    index: int
    size: int  # float32 numbers, of `path` or of `pieces`
    path: str = ""
    bulk: str = ""  # the port of rank 0 that serves `pieces`
    pieces: list[str] = field(default_factory=list)  # digests of chunks


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
    """An order to take rows of all weights, which rank 0 has whole, as after a warm start."""

    generation: int
    names: list[str]


@message
class StageRows:
    """An order to copy a part of a rank's rows of some weights, in the type that is published, and
    to put them into the store: see `common/weights/staging.py`. A new number ends the staging
    before.
    """

    generation: int
    number: int
    dtype: str
    chunk_bytes: int
    write: bool
    what: str
    names: list[str]
    part: int = 0
    parts: int = 1


@message
class RowsStaged:
    """An order to answer once there is room for more, or with `whole` once all that was ordered
    is in the store.
    """

    generation: int
    number: int
    whole: bool


@message
class StagedRows:
    """The answer to RowsStaged; with `whole` where the rows lie, and what they add to the
    identities of the image and of the masters, by tensor (`meshrl.common.weights.layout.identity`).
    """

    pieces: list[Tensor] = field(default_factory=list)
    image: dict[str, bytes] = field(default_factory=dict)
    masters: dict[str, bytes] = field(default_factory=dict)
    goes_on: bool = False  # it is not done, and to be asked for again


@message
class SaveRows:
    """An order to write a rank's rows of some of what a checkpoint keeps to a file of its own, in
    the scratch directory `name` of the checkpoint.
    """

    generation: int
    host: str  # rank 0's
    name: str
    masters: bool  # whether float32 weights are kept, too
    names: list[str]
    number: int  # of the file


@message
class RowsSaved:
    """An order to answer once rank 0 can have the files that were written."""

    generation: int
    host: str
    name: str


@message
class SavedFiles:
    """The answer to RowsSaved: digests by name of those that are chunks of the store, because rank
    0 is on another host.
    """

    files: dict[str, str] = field(default_factory=dict)
    trouble: Trouble = field(default_factory=Trouble)
    goes_on: bool = False  # it is not done, and to be asked for again


@message
class RestoreRows:
    """An order to go on from a checkpoint: from the rank's rows of what it keeps, and of the
    version where it keeps no float32 weights.
    """

    generation: int
    number: int  # the same: it is the one that was ordered before
    host: str  # rank 0's, which has checked the files of the checkpoint
    name: str
    files: dict[str, str]  # digests of the checkpoint's files, by their path in it
    manifest: str


@message
class RowsRestored:
    """The answer to RestoreRows."""

    trouble: Trouble = field(default_factory=Trouble)
    goes_on: bool = False  # it is not done, and to be asked for again


@message
class Rest:
    """An order to a rank about its rows and gradients: `keep` a copy at a tier, or `discard` it;
    `release` their memory; `take` memory and copy again; `move` the copy to a tier (absent:
    a checkpoint covers all ranks, accelerator: they are needed again); `resume` from one that an
    earlier group has kept; `forget` it.
    """

    generation: int
    what: str
    tier: str
    about: Any  # what rank 0 says about what is kept with it


class Ranks(Resting):
    """The methods of a rank other than 0. Who asks for what takes longer than a call may last hears
    that it goes on, and asks again.
    """

    stand_by = Call(RankOrder, StandsBy, deadline_s=30.0, idempotent=True)
    form = Call(Meeting, NoneType, deadline_s=FORM_S)
    begin = Call(RankOrder, NoneType, deadline_s=30.0)
    compute = Call(RoundPart, RoundStats, deadline_s=COMPUTE_S)
    keep = Call(LentGradient, NoneType, deadline_s=MOVE_S)
    adopt = Call(Adopt, NoneType, deadline_s=ADOPT_S)
    apply = Call(Update, float, deadline_s=COMPUTE_S)  # norm of the gradient, before clipping
    score = Call(ScorePart, Scores, deadline_s=COMPUTE_S)
    stage = Call(StageRows, NoneType, deadline_s=MOVE_S)
    staged = Call(RowsStaged, StagedRows, deadline_s=MOVE_S, idempotent=True)
    save = Call(SaveRows, Trouble, deadline_s=MOVE_S)
    saved = Call(RowsSaved, SavedFiles, deadline_s=MOVE_S, idempotent=True)
    restore = Call(RestoreRows, RowsRestored, deadline_s=MOVE_S, idempotent=True)
    take = Call(Taking, NoneType, deadline_s=MOVE_S)
    rest = Call(Rest, NoneType, deadline_s=SETTLE_S, idempotent=True)
