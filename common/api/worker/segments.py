"""Messages about segments of memory, which a worker owns and its role processes write and read.
What lies there outlives them, and ends with the worker.
"""

from __future__ import annotations

from common.base.encoding.messages import message


@message
class MakeSegment:
    """Asks for a segment of so many bytes, all zero; one of the same key is gone then. StorageFull
    when the worker's budget, or the host, has no room for it.
    """

    key: str  # names the resident's process
    bytes: int


@message
class FindSegment:
    """Asks for the segment of a key."""

    key: str


@message
class DropSegment:
    """Gives a segment back; it is no error if there is none."""

    key: str


@message
class Segment:
    """Where a segment can be opened, by processes of the same user; `path` empty: there is none."""

    path: str
    bytes: int


@message
class SegmentDropped:
    """The answer to DropSegment."""
