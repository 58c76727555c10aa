"""The interface of a rank of a training gang: what rank 0, the core, orders of the others. All
ranks get the same orders in the same sequence, and each works on its own rows of the parameters.

An order carries the generation of the group that it is for: one for another is refused.
"""

from __future__ import annotations

from dataclasses import field
from types import NoneType
from typing import Any

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.calls.role import SET_TIER_TIMEOUT_S, RoleControl
from meshrl.common.api.weights import TensorPiece
from meshrl.common.base.encoding.messages import Array, message

UPDATE_SETTINGS_TIMEOUT_S = 30.0
FORM_TIMEOUT_S = 60.0  # to meet the others
STATE_TRANSFER_TIMEOUT_S = 600.0  # a whole state, from or to rank 0
COMPUTE_TIMEOUT_S = (
    3600.0  # the group's own deadline strikes before: a rank that is lost ends a collective
)


def rank_name(job: str, rank: int) -> str:
    """What a rank beside the first is called in the mesh."""
    return f"rank/{job}/{rank}"


@message
class RankFault:
    """What hindered an order and can be mended, as it is raised; an empty code: nothing."""

    code: str = ""
    message: str = ""
    where: str = ""
    fix: str = ""


@message
class RankOrder:
    """An order for the ranks of a generation; a newer generation ends a rank's part in an older
    one.
    """

    generation: int


@message
class StandbyAnswer:
    """The answer of a rank that stands by."""

    host: str
    address: str  # by which ranks on other hosts reach it; empty: it cannot tell


@message
class Rendezvous:
    """An order to form the process group of a generation."""

    generation: int
    rendezvous_url: (
        str  # the ranks of this generation meet: see `common/weights/transports/rendezvous.py`
    )
    collective_timeout_s: float  # for each of their collectives
    # from which ranks connect to each other; empty: all are on one host
    addresses: list[str] = field(default_factory=list)


@message
class ComputeRound:
    """An order to compute a rank's share of a round: the gradients of its bins, of which a rank
    that has experts alone has none.
    """

    generation: int
    index: int
    bins: list[dict[str, Array]]


@message
class RoundStats:
    """The answer to RoundPart: the statistics of each bin's gradient, see `learner/stats.py`."""

    stats: list[Any]


@message
class AddGradient:
    """An order to add a hybrid's gradient of a round. What it names is there until all ranks have
    answered: all of it in a file, for ranks on the host of rank 0; for others their rows alone.
    """

    generation: int
    index: int
    element_count: int  # float32 numbers, of `path` or of `pieces`
    path: str = ""
    bulk_address: str = ""  # the port of rank 0 that serves `pieces`
    chunks: list[str] = field(default_factory=list)  # digests of chunks


@message
class UpdateSettings:
    """An order to compute with these settings from now on."""

    generation: int
    algorithm: Any  # the keys of `[algorithm]`, with their values
    optimizer: Any  # the same of `[optimizer]`


@message
class ApplyGradient:
    """An order to step the optimizer with the sum of the gradients of `rounds` rounds."""

    generation: int
    rounds: int
    denominator: float
    lr_factor: float


@message
class ScoreBin:
    """An order to compute the forward pass of one bin, without a gradient."""

    generation: int
    bin: dict[str, Array]
    quantity: str  # logprobs | values


@message
class BinScores:
    """The answer to ScorePart."""

    scores: Array  # float32, one for each place


@message
class LoadWeightRows:
    """An order to take rows of all weights, which rank 0 has whole, as after a warm start."""

    generation: int
    tensor_names: list[str]


@message
class StageRows:
    """An order to copy a part of a rank's rows of some weights, in the type that is published, and
    to put them into the store: see `common/weights/staging.py`. A new number ends the staging
    before.
    """

    generation: int
    staging_id: int
    dtype: str
    chunk_bytes: int
    is_written: bool
    description: str
    tensor_names: list[str]
    part: int = 0
    parts: int = 1


@message
class FinishStaging:
    """An order to answer once there is room for more, or with `whole` once all that was ordered
    is in the store.
    """

    generation: int
    staging_id: int
    wait_complete: bool


@message
class StagingResult:
    """The answer to RowsStaged; with `whole` where the rows lie, and what they add to the
    identities of the image and of the masters, by tensor (`meshrl.common.weights.layout.identity`).
    """

    pieces: list[TensorPiece] = field(default_factory=list)
    published_identity: dict[str, bytes] = field(default_factory=dict)
    masters_identity: dict[str, bytes] = field(default_factory=dict)
    in_progress: bool = False  # it is not done, and to be asked for again


@message
class SaveRows:
    """An order to write a rank's rows of some of what a checkpoint keeps to a file of its own, in
    the scratch directory `name` of the checkpoint.
    """

    generation: int
    rank0_host: str  # rank 0's
    checkpoint: str
    saves_masters: bool  # whether float32 weights are kept, too
    tensor_names: list[str]
    file_number: int  # of the file


@message
class FinishSaving:
    """An order to answer once rank 0 can have the files that were written."""

    generation: int
    rank0_host: str
    checkpoint: str


@message
class SavingResult:
    """The answer to RowsSaved: digests by name of those that are chunks of the store, because rank
    0 is on another host.
    """

    files: dict[str, str] = field(default_factory=dict)
    fault: RankFault = field(default_factory=RankFault)
    in_progress: bool = False  # it is not done, and to be asked for again


@message
class RestoreRows:
    """An order to go on from a checkpoint: from the rank's rows of what it keeps, and of the
    version where it keeps no float32 weights.
    """

    generation: int
    restore_id: int  # the same: it is the one that was ordered before
    rank0_host: str  # rank 0's, which has checked the files of the checkpoint
    checkpoint: str
    files: dict[str, str]  # digests of the checkpoint's files, by their path in it
    manifest: str


@message
class RestoreResult:
    """The answer to RestoreRows."""

    fault: RankFault = field(default_factory=RankFault)
    in_progress: bool = False  # it is not done, and to be asked for again


@message
class SleepOrder:
    """An order to a rank about its rows and gradients: `keep` a copy at a tier, or `discard` it;
    `release` their memory; `take` memory and copy again; `move` the copy to a tier (absent:
    a checkpoint covers all ranks, accelerator: they are needed again); `resume` from one that an
    earlier group has kept; `forget` it.
    """

    generation: int
    action: str
    tier: str
    metadata: Any  # what rank 0 says about what is kept with it


class Ranks(RoleControl):
    """The methods of a rank other than 0. Who asks for what takes longer than a call may last hears
    that it goes on, and asks again.
    """

    stand_by = Call(RankOrder, StandbyAnswer, deadline_s=30.0, idempotent=True)
    form_group = Call(Rendezvous, NoneType, deadline_s=FORM_TIMEOUT_S)
    begin_step = Call(RankOrder, NoneType, deadline_s=30.0)
    compute_round = Call(ComputeRound, RoundStats, deadline_s=COMPUTE_TIMEOUT_S)
    add_gradient = Call(AddGradient, NoneType, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    update_settings = Call(UpdateSettings, NoneType, deadline_s=UPDATE_SETTINGS_TIMEOUT_S)
    apply_gradient = Call(
        ApplyGradient, float, deadline_s=COMPUTE_TIMEOUT_S
    )  # norm of the gradient, before clipping
    score_bin = Call(ScoreBin, BinScores, deadline_s=COMPUTE_TIMEOUT_S)
    stage_rows = Call(StageRows, NoneType, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    finish_staging = Call(
        FinishStaging, StagingResult, deadline_s=STATE_TRANSFER_TIMEOUT_S, idempotent=True
    )
    save_rows = Call(SaveRows, RankFault, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    finish_saving = Call(
        FinishSaving, SavingResult, deadline_s=STATE_TRANSFER_TIMEOUT_S, idempotent=True
    )
    restore_rows = Call(
        RestoreRows, RestoreResult, deadline_s=STATE_TRANSFER_TIMEOUT_S, idempotent=True
    )
    load_weights = Call(LoadWeightRows, NoneType, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    execute_sleep_order = Call(SleepOrder, NoneType, deadline_s=SET_TIER_TIMEOUT_S, idempotent=True)
