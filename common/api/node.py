"""Interfaces of a host's agent, and of a worker.

They have hints to read records again, log files, the time slices of a gang, and the memory segments
that a worker owns for its role processes.
"""

from __future__ import annotations

import math
from dataclasses import field
from types import NoneType

from meshrl.common.api.calls.interface import Call, Cast, ChangeHint, Interface
from meshrl.common.base.encoding.messages import message

# a longer wait needs another request, which keeps its place in the queue
SLICE_WAIT_TIMEOUT_S = 600.0
PREPARE_TIMEOUT_S = 900.0  # to move about 100 GB to and from a disk


# A memory segment outlives the process that uses it, and ends with the worker that owns it.


@message
class CreateSegment:
    """Request for a segment; a complete one of the same key stays until `commit_segment`.

    It has zeros, or old content of the same process. StorageFull if the worker's budget, or the
    host, has no space for it beside the other segments.
    """

    key: str  # names the instance's process and the kind of its tensors
    size_bytes: int


@message
class SegmentLocation:
    """Path of a segment for processes of the same user; empty `path`: there is none."""

    path: str
    size_bytes: int


@message
class AcquireSlice:
    """Request of an instance for a time slice on its gang's accelerators.

    The answer comes when the slice is granted.
    """

    instance: str
    generation: int
    process: str  # name of the requesting process
    incarnation: str  # of that process
    ticket: int  # number of the request: a repeated number is the same request
    # generate | score | forward_backward | optim_step | train_step | sync | save | load
    function: str
    estimate_s: float  # expected duration; 0: unknown
    # of `meshrl.common.state.pool.workers.rows.TensorKind`: kinds that must be on the accelerator;
    # empty: all of the instance
    kinds: list[str]
    # True: the first piece of the function in this process, which may compile kernels for minutes
    is_first: bool = False
    # True: from a worker, to start the first rank's process; no process of that rank runs
    starts_process: bool = False
    # expected from the end of the slice to a request of the same function; infinity: unknown
    repeat_gap_s: float = math.inf


@message
class TimeSlice:
    """Granted time slice: a process that still has it after `duration_s` is killed.

    A holder that could continue, such as an engine at a step boundary, releases it after
    `quantum_s`; 0: whenever that suits the holder.
    """

    ticket: int
    duration_s: float
    quantum_s: float
    switch_s: float = 0.0  # moves of tensors before the slice
    loaded_bytes: int = 0  # of these, to the accelerators
    hidden_bytes: int = 0  # of its kinds, loaded by a prefetch while others computed
    other_jobs_s: float = 0.0  # of the wait for it: slices of other jobs on its ranks


@message
class ReleaseSlice:
    """Report that a time slice is over, or no longer needed, with all earlier ones of this
    process.
    """

    instance: str
    incarnation: str
    ticket: int


@message
class KindUse:
    """Kinds that a time slice of an instance computes with."""

    instance: str
    kinds: list[str]  # none: all of the instance
    starts_in_s: float = 0.0  # expected, for a slice that has not begun


@message
class PrepareResidency:
    """Order of a gang's slice scheduler to bring kinds of an instance onto a worker's accelerator.

    Other kinds leave it to make room. A prefetch moves what is needed first in the place of what is
    needed later, and the next order may cancel it.
    """

    ticket: str  # name of the request for a time slice; a repeated ticket is the same order
    instance: str
    generation: int
    kinds: list[str]
    computing: list[KindUse]  # by slices that run now: these kinds must stay
    prefetch: bool
    expected: list[KindUse] = field(default_factory=list)  # kinds that are needed last leave first


@message
class KindMove:
    """Move of a kind between tiers of a worker, as it happened."""

    instance: str
    kind: str
    source: str  # tier
    target: str  # tier
    size_bytes: int
    duration_s: float


@message
class ResidencyReport:
    """Answer to PrepareResidency, when the kinds are on the accelerator or a prefetch has ended."""

    is_complete: bool  # False: a prefetch that lacked room, or was cancelled
    moves: list[KindMove]
    prefetched_bytes: int  # of the kinds, which were loaded by an earlier prefetch


@message
class InstanceResidency:
    """Bytes of an instance's kinds on one worker, by kind."""

    instance: str
    generation: int
    accelerator_bytes: dict[str, int]
    size_bytes: dict[str, int]  # when on the accelerator
    dirty_kinds: list[str]  # without an equal copy in host memory or on disk
    memory_bytes: dict[str, int] = field(default_factory=dict)  # of copies, also outdated ones
    disk_bytes: dict[str, int] = field(default_factory=dict)


@message
class ResidencyState:
    """State of a worker's residency, from which a slice scheduler estimates the cost of switches.

    Rates are bytes per second as measured, by `source>target` of tiers; a missing one is unknown.
    """

    accelerator_budget: int  # bytes; 0: unlimited
    instances: list[InstanceResidency]
    rates: dict[str, float]
    # False: some instance cannot compute while all kinds of all are on the accelerator
    fits_together: bool = True
    memory_room: int = -1  # bytes of host memory for further copies; -1: unlimited


@message
class ExplainSlices:
    """Request for the recent decisions of a gang's slice scheduler, and its history of slices."""

    # wall clock, seconds of the epoch: omits slices that ended before, and decisions; 0: all
    since_s: float


@message
class SliceCandidate:
    """Request for a time slice, as a decision compared it with others. Times are in seconds."""

    instance: str
    function: str
    wait_s: float  # since the request
    service_s: float  # expected duration of the slice
    switch_s: float  # expected duration of the moves of tensors before the slice
    score: float  # of the policy; the highest goes first


@message
class SliceDecision:
    """Choice of the next request by the policy of a gang's slice scheduler."""

    at_s: float  # wall clock, seconds of the epoch
    policy: str
    candidates: list[SliceCandidate]  # best first
    chosen: str  # instance
    # such as `response ratio`, `quantum`, `starvation cap`
    reason: str


@message
class SliceRecord:
    """Time slice of a gang's history. Times are seconds of the epoch, by the wall clock."""

    number: int  # of the scheduler's slices so far; a restarted scheduler begins at 1
    instance: str
    job: str
    function: str
    ranks: list[int]  # of the gang
    requested_s: float
    # start of the moves of tensors; equal to granted_s if there were none
    chosen_s: float
    granted_s: float
    ended_s: float  # 0: not yet
    end: str  # released | killed | lost (the process has exited); empty: not yet
    moves: list[KindMove]  # before the slice, on all its workers
    hidden_bytes: int  # of its kinds, loaded by a prefetch while others computed


RETAINED_SLICES = 256  # ended ones that a scheduler explains, the last ones


@message
class SliceExplanation:
    """Answer to ExplainSlices."""

    gang: str  # whose slice scheduler this worker is; empty: none
    policy: str
    decisions: list[SliceDecision]  # in the order of time
    slices: list[SliceRecord]  # in the order of grants
    waiting: list[SliceCandidate] = field(default_factory=list)  # requests now, best first
    kill_errors: list[str] = field(default_factory=list)  # of overdue holders that survive


@message
class KillInstance:
    """Order to kill an instance's processes at once. The answer comes when none is left."""

    instance: str
    generation: int
    reason: str


class Worker(Interface):
    """Methods of a worker."""

    notify_change = Cast(ChangeHint)
    create_segment = Call(CreateSegment, SegmentLocation, deadline_s=30.0, idempotent=True)
    # By key. `commit` replaces the earlier segment by the created one, `discard` deletes that.
    # Discarding or deleting a missing segment is not an error.
    commit_segment = Call(str, NoneType, deadline_s=10.0, idempotent=True)
    find_segment = Call(str, SegmentLocation, deadline_s=10.0, idempotent=True)
    discard_segment = Call(str, NoneType, deadline_s=10.0, idempotent=True)
    delete_segment = Call(str, NoneType, deadline_s=10.0, idempotent=True)
    acquire_slice = Call(AcquireSlice, TimeSlice, deadline_s=SLICE_WAIT_TIMEOUT_S, idempotent=True)
    release_slice = Call(ReleaseSlice, NoneType, deadline_s=10.0, idempotent=True)
    # GpuMemoryFull, StorageFull: the kinds do not fit; NotFound: no such process runs here.
    prepare_residency = Call(
        PrepareResidency, ResidencyReport, deadline_s=PREPARE_TIMEOUT_S, idempotent=True
    )
    read_residency = Call(NoneType, ResidencyState, deadline_s=10.0, idempotent=True)
    explain_slices = Call(ExplainSlices, SliceExplanation, deadline_s=5.0, idempotent=True)
    kill_instance = Call(KillInstance, NoneType, deadline_s=10.0, idempotent=True)


@message
class LogFile:
    """Log file: its process's name with `-` for `/`."""

    name: str
    bytes: int
    modified_s: float  # last modification, in seconds of the epoch by the host's clock


@message
class LogFiles:
    """Answer to Node.list_logs."""

    files: list[LogFile]


@message
class ReadLog:
    """Request for a part of a log file, at most `max_bytes` bytes."""

    name: str
    offset: int  # negative: from the end of the file
    max_bytes: int


@message
class LogPart:
    """Answer to ReadLog.

    It has complete lines, if there is one and the request is not for the end of the file.
    """

    text: str
    next_offset: int  # start of the next part
    file_size_bytes: int  # current size


class Node(Interface):
    """Methods of a host's agent."""

    notify_change = Cast(ChangeHint)
    list_logs = Call(NoneType, LogFiles, deadline_s=10.0, idempotent=True)
    read_log = Call(ReadLog, LogPart, deadline_s=10.0, idempotent=True)
