"""The interfaces of a host's agent, and of a worker: hints to read their records again, log files,
the turns of a gang, and the segments of memory that a worker owns for its role processes.
"""

from __future__ import annotations

from types import NoneType

from meshrl.common.api.calls.interface import Call, Cast, ChangeHint, Interface
from meshrl.common.base.encoding.messages import message

SLICE_WAIT_TIMEOUT_S = 600.0  # who waits longer for its turn asks again, and keeps its place


# A segment of memory outlives the process that uses it, and ends with the worker that owns it.


@message
class CreateSegment:
    """Asks for a segment of so many bytes, all zero; one of the same key is gone then. StorageFull
    when the worker's budget, or the host, has no room for it.
    """

    key: str  # names the resident's process
    size_bytes: int


@message
class SegmentLocation:
    """Where a segment can be opened, by processes of the same user; `path` empty: there is none."""

    path: str
    size_bytes: int


@message
class AcquireSlice:
    """A resident wants to compute on its gang's accelerators. It is answered when it may."""

    instance: str
    generation: int
    process: str  # the name of the process that asks,
    incarnation: str  # and which start of it that is
    ticket: int  # counts its requests: the same one again is the same request
    operation: str  # generate | score | train_step | sync | save
    estimate_s: float  # how long it will take, as far as the resident knows; 0: it does not


@message
class TimeSlice:
    """A turn that was granted: a process that still has it after `lasts_s` is killed."""

    ticket: int
    duration_s: float


@message
class ReleaseSlice:
    """A turn is over, or not wanted any more, and with it all that this process had before it."""

    instance: str
    incarnation: str
    ticket: int


@message
class KillInstance:
    """A resident's processes are to be killed at once, whatever they do. It is answered when there
    is none any more.
    """

    instance: str
    generation: int
    reason: str


class Worker(Interface):
    """The methods of a worker."""

    notify_change = Cast(ChangeHint)
    create_segment = Call(CreateSegment, SegmentLocation, deadline_s=30.0, idempotent=True)
    # of the process that is named; it is no error to drop one that is not there
    find_segment = Call(str, SegmentLocation, deadline_s=10.0, idempotent=True)
    delete_segment = Call(str, NoneType, deadline_s=10.0, idempotent=True)
    acquire_slice = Call(AcquireSlice, TimeSlice, deadline_s=SLICE_WAIT_TIMEOUT_S, idempotent=True)
    release_slice = Call(ReleaseSlice, NoneType, deadline_s=10.0, idempotent=True)
    kill_instance = Call(KillInstance, NoneType, deadline_s=10.0, idempotent=True)


@message
class LogFile:
    """A log file: its process's name with `-` for `/`."""

    name: str
    bytes: int
    modified_s: float  # when last, in seconds of the epoch by the host's clock


@message
class LogFiles:
    """The answer to Node.list_logs."""

    files: list[LogFile]


@message
class ReadLog:
    """Asks for a part of a log file, `most` bytes at most."""

    name: str
    offset: int  # less than 0: so many bytes before its end
    max_bytes: int


@message
class LogPart:
    """The answer to ReadLog: whole lines, if there is one and it is not the end that was asked
    for.
    """

    text: str
    next_offset: int  # where what follows begins
    file_size_bytes: int  # bytes of the file now


class Node(Interface):
    """The methods of a host's agent."""

    notify_change = Cast(ChangeHint)
    list_logs = Call(NoneType, LogFiles, deadline_s=10.0, idempotent=True)
    read_log = Call(ReadLog, LogPart, deadline_s=10.0, idempotent=True)
