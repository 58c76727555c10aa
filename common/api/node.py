"""Interfaces of a host's agent, and of a worker.

They have hints to read records again, log files, the time slices of a gang, and the memory segments
that a worker owns for its role processes.
"""

from __future__ import annotations

from types import NoneType

from meshrl.common.api.calls.interface import Call, Cast, ChangeHint, Interface
from meshrl.common.base.encoding.messages import message

# a longer wait needs another request, which keeps its place in the queue
SLICE_WAIT_TIMEOUT_S = 600.0


# A memory segment outlives the process that uses it, and ends with the worker that owns it.


@message
class CreateSegment:
    """Request for a segment of `size_bytes` zero bytes; an earlier one of the same key is removed.

    StorageFull if the worker's budget, or the host, has no space for it.
    """

    key: str  # names the instance's process
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
    operation: str  # generate | score | train_step | sync | save
    estimate_s: float  # expected duration; 0: unknown


@message
class TimeSlice:
    """Granted time slice: a process that still has it after `duration_s` is killed."""

    ticket: int
    duration_s: float


@message
class ReleaseSlice:
    """Report that a time slice is over, or no longer needed, with all earlier ones of this
    process.
    """

    instance: str
    incarnation: str
    ticket: int


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
    # By the key of the process. Deleting a missing segment is not an error.
    find_segment = Call(str, SegmentLocation, deadline_s=10.0, idempotent=True)
    delete_segment = Call(str, NoneType, deadline_s=10.0, idempotent=True)
    acquire_slice = Call(AcquireSlice, TimeSlice, deadline_s=SLICE_WAIT_TIMEOUT_S, idempotent=True)
    release_slice = Call(ReleaseSlice, NoneType, deadline_s=10.0, idempotent=True)
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
