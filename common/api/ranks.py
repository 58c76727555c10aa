"""Interface of a rank of a training gang: orders of rank 0, the core, to the other ranks.

All ranks get the same orders in the same sequence, and each works on its own rows of the
parameters. An order contains the generation of its group: an order for another generation is
rejected.
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
FORM_TIMEOUT_S = 60.0  # for the rendezvous, and NCCL's connections
FORM_MARGIN_S = 15.0  # until the error of a rendezvous that has failed arrives
STATE_TRANSFER_TIMEOUT_S = 600.0  # a complete state, from or to rank 0
MIN_STATE_BYTES_PER_S = 50e6  # of one rank: a loaded disk, or random numbers of one core
COMPUTE_TIMEOUT_S = 3600.0  # the group's own timeout is shorter: a lost rank ends a collective


def compute_state_timeout_s(size_bytes: float) -> float:
    """Return the deadline for ranks to read or create a state of this size."""
    return STATE_TRANSFER_TIMEOUT_S + size_bytes / MIN_STATE_BYTES_PER_S


def rank_name(job: str, rank: int) -> str:
    """Return the registry name of a rank other than 0."""
    return f"rank/{job}/{rank}"


@message
class RankFault:
    """Recoverable error of an order, as it is raised; an empty code: none."""

    code: str = ""
    message: str = ""
    where: str = ""
    fix: str = ""


@message
class RankOrder:
    """Order for the ranks of a generation.

    A newer generation ends a rank's part in an older one.
    """

    generation: int


@message
class StandbyAnswer:
    """Answer of a rank that stands by."""

    host: str
    address: str  # for ranks on other hosts; empty: unknown


@message
class Rendezvous:
    """Order to form the process group of a generation."""

    generation: int
    rendezvous_url: str  # of this generation's ranks: see `common/weights/transports/rendezvous.py`
    collective_timeout_s: float  # of each collective
    # of the ranks, for connections between them; empty: all are on one host
    addresses: list[str] = field(default_factory=list)
    form_timeout_s: float = FORM_TIMEOUT_S


@message
class CreateModel:
    """Order to create the model of a formed group, with the initial values of the rank's rows."""

    generation: int
    timeout_s: float


@message
class ComputeRound:
    """Order to compute a rank's share of a round: the gradients of its bins.

    An expert rank has no bins.
    """

    generation: int
    index: int
    bins: list[dict[str, Array]]


@message
class RoundStats:
    """Answer to ComputeRound: the statistics of each bin's gradient, see `learner/stats.py`."""

    stats: list[Any]


@message
class BeginStep:
    """Order to begin a step without any gradient."""

    generation: int
    block_rounds: int  # rounds whose gradients are summed before they are added to the step's
    gradient_dtype: str  # to which such a sum is rounded


@message
class FetchGradient:
    """Order to fetch this rank's rows of a hybrid's gradient; `AddGradient` then uses them."""

    generation: int
    transfer_id: int
    hybrid: str  # registry name of the process whose bulk port has `chunks`
    element_count: int
    chunks: list[str]  # digests


@message
class AddGradient:
    """Order to add fetched rows as the sum of a block of rounds; block -1: to discard them."""

    generation: int
    transfer_id: int
    block: int


@message
class UpdateSettings:
    """Order to use these settings from now on."""

    generation: int
    algorithm: Any  # values of `[algorithm]` by key
    optimizer: Any  # values of `[optimizer]` by key


@message
class ApplyGradient:
    """Order to step the optimizer with the sum of the gradients of `rounds` rounds."""

    generation: int
    rounds: int
    denominator: float
    lr_factor: float


@message
class ScoreBin:
    """Order to compute the forward pass of one bin, without a gradient."""

    generation: int
    bin: dict[str, Array]
    quantity: str  # logprobs | values


@message
class BinScores:
    """Answer to ScoreBin."""

    scores: Array  # float32, one for each position


@message
class LoadWeightRows:
    """Order to load rows of all weights from rank 0, which has all of them, as after a warm
    start.
    """

    generation: int
    tensor_names: list[str]


@message
class StageRows:
    """Order to stage a part of a rank's rows of some weights in the published type.

    See `common/weights/staging.py`. A new `staging_id` ends the staging before.
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
    """Order to answer once there is room for more rows.

    With `wait_complete`: once all staged rows are in the store.
    """

    generation: int
    staging_id: int
    wait_complete: bool


@message
class StagingResult:
    """Answer to FinishStaging.

    With `wait_complete` it has the locations of the rows, and their contributions to the identities
    of the image and of the masters, by tensor (`meshrl.common.weights.layout.identity`).
    """

    pieces: list[TensorPiece] = field(default_factory=list)
    published_identity: dict[str, bytes] = field(default_factory=dict)
    masters_identity: dict[str, bytes] = field(default_factory=dict)
    in_progress: bool = False  # not done yet: repeat the request


@message
class SaveRows:
    """Order to save a rank's rows of some checkpoint tensors to a file of its own.

    The file is in the scratch directory `checkpoint`.
    """

    generation: int
    rank0_host: str  # rank 0's
    checkpoint: str
    saves_masters: bool  # True: float32 weights are saved too
    tensor_names: list[str]
    file_number: int  # number of the file


@message
class FinishSaving:
    """Order to answer once rank 0 can read the saved files."""

    generation: int
    rank0_host: str
    checkpoint: str


@message
class SavingResult:
    """Answer to FinishSaving: digests by name of the files stored as chunks.

    Files are chunks of the store if rank 0 is on another host.
    """

    files: dict[str, str] = field(default_factory=dict)
    fault: RankFault = field(default_factory=RankFault)
    in_progress: bool = False  # not done yet: repeat the request


@message
class RestoreRows:
    """Order to restore the rank's rows from a checkpoint.

    If the checkpoint has no float32 weights, these rows come from the version.
    """

    generation: int
    restore_id: int  # a repeated id is the same order
    rank0_host: str  # host of rank 0, which has verified the checkpoint's files
    checkpoint: str
    files: dict[str, str]  # digests of the checkpoint's files, by path
    manifest: str


@message
class RestoreResult:
    """Answer to RestoreRows."""

    fault: RankFault = field(default_factory=RankFault)
    in_progress: bool = False  # not done yet: repeat the request


@message
class SleepOrder:
    """Order about a rank's rows and gradients while it sleeps.

    Actions: `keep` a copy at a tier, or `discard` it; `release` the memory; `take` memory and copy
    again; `move` the copy to a tier (absent: a checkpoint covers all ranks, accelerator: the copy
    is needed again); `resume` from a copy that an earlier group has kept; `forget` it.
    """

    generation: int
    action: str
    tier: str
    metadata: Any  # metadata of rank 0 that is stored with the copy


class Ranks(RoleControl):
    """Methods of a rank other than 0.

    An order may take longer than a call may last: the answer then has `in_progress`, and the caller
    repeats the request.
    """

    stand_by = Call(RankOrder, StandbyAnswer, deadline_s=30.0, idempotent=True)
    form_group = Call(Rendezvous, NoneType, deadline_s=FORM_TIMEOUT_S + FORM_MARGIN_S)
    create_model = Call(CreateModel, NoneType, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    begin_step = Call(BeginStep, NoneType, deadline_s=30.0)
    compute_round = Call(ComputeRound, RoundStats, deadline_s=COMPUTE_TIMEOUT_S)
    fetch_gradient = Call(FetchGradient, RankFault, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    add_gradient = Call(AddGradient, NoneType, deadline_s=STATE_TRANSFER_TIMEOUT_S)
    update_settings = Call(UpdateSettings, NoneType, deadline_s=UPDATE_SETTINGS_TIMEOUT_S)
    # norm of the gradient, before clipping
    apply_gradient = Call(ApplyGradient, float, deadline_s=COMPUTE_TIMEOUT_S)
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
