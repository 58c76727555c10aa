"""The interfaces of a host's agent, and of a worker: hints to read their records again, log files,
the turns of a gang, and the segments of memory that a worker owns for its role processes.
"""

from __future__ import annotations

from common.api.calls.hint import Look
from common.api.calls.interface import Call, Cast, Interface
from common.api.worker.segments import (
    DropSegment,
    FindSegment,
    MakeSegment,
    Segment,
    SegmentDropped,
)
from common.api.worker.turns import (
    TURN_S,
    EndResident,
    GangTurn,
    GiveBack,
    GivenBack,
    ResidentEnded,
    TakeTurn,
)
from common.base.encoding.messages import message


class Worker(Interface):
    """The methods of a worker."""

    look = Cast(Look)
    make_segment = Call(MakeSegment, Segment, deadline_s=30.0, idempotent=True)
    find_segment = Call(FindSegment, Segment, deadline_s=10.0, idempotent=True)
    drop_segment = Call(DropSegment, SegmentDropped, deadline_s=10.0, idempotent=True)
    take_turn = Call(TakeTurn, GangTurn, deadline_s=TURN_S, idempotent=True)
    give_back = Call(GiveBack, GivenBack, deadline_s=10.0, idempotent=True)
    end_resident = Call(EndResident, ResidentEnded, deadline_s=10.0, idempotent=True)


@message
class ListLogs:
    """Asks which log files the host has."""


@message
class LogFile:
    """A log file: its process's name with `-` for `/`."""

    name: str
    bytes: int
    written: float  # when last, in seconds of the epoch by the host's clock


@message
class LogFiles:
    """The answer to ListLogs."""

    files: list[LogFile]


@message
class ReadLog:
    """Asks for a part of a log file, `most` bytes at most."""

    name: str
    offset: int  # less than 0: so many bytes before its end
    most: int


@message
class LogPart:
    """The answer to ReadLog: whole lines, if there is one and it is not the end that was asked
    for.
    """

    text: str
    next: int  # where what follows begins
    size: int  # bytes of the file now


class Node(Interface):
    """The methods of a host's agent."""

    look = Cast(Look)
    logs = Call(ListLogs, LogFiles, deadline_s=10.0, idempotent=True)
    read_log = Call(ReadLog, LogPart, deadline_s=10.0, idempotent=True)
