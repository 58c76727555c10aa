"""What the weight store is told and asked of deltas: how chunks of a version are made of those of
an earlier one. The calls are in `Weights`.
"""

from __future__ import annotations

from dataclasses import field

from meshrl.common.base.encoding.messages import message


@message
class VersionRef:
    """A version that another one refers to, or that somebody has."""

    lineage: int
    version: int
    digest: str  # of its manifest


@message
class ChunkDelta:
    """How one chunk is made of another, which the same pieces of the same tensors lie in."""

    old_chunk: str  # digests of the two chunks
    new_chunk: str
    # The digest of a chunk of the store in which its delta (`meshrl.common.weights.delta.codec`)
    # lies, and perhaps those of chunks beside it: where, and how many bytes it has.
    blob: str
    offset: int
    size_bytes: int


@message
class DeltaSet:
    """The document of a delta, or a part of one: from one version to another, chunk by chunk. What
    has no delta is pulled in full. It is no part of either manifest.
    """

    base: VersionRef
    target: VersionRef
    chunks: list[ChunkDelta]


@message
class BeginDelta:
    """Tells the store, before a staged version is committed, that deltas to it may come, and asks
    which versions they are to be from.
    """

    job: str
    target: VersionRef
    anchor_interval: int  # each so manieth version stays a base for hosts that fall behind
    part: int = 0  # which of the processes that have staged the version asks
    parts: int = 1  # how many of them make deltas
    host: str = ""  # whose chunks they are made of: one that makes all of them needs none


@message
class DeltaBases:
    """The answer to BeginDelta, the one that most hosts have first; none: nobody on another host
    receives, and no delta is waited for.
    """

    bases: list[VersionRef]


@message
class StageDelta:
    """Hands over more of a delta, whose blobs are stored; `whole`: it is the end of this part."""

    deltas: DeltaSet
    part: int = 0
    is_last: bool = False


@message
class DeltaQuery:
    """Asks for the deltas to a version, those after the first `after` that there are, waiting for
    some if more are to come that are of use to the host.
    """

    target: str  # digest of its manifest
    host: str
    offset: int = 0
    wait_s: float = 0.0


@message
class DeltaBatch:
    """The answer to AskDeltas. `more`: others may follow that are from what the host holds."""

    chunks: list[ChunkDelta] = field(default_factory=list)
    has_more: bool = False


@message
class VersionAcknowledgement:
    """Tells that a host has a version whole: later deltas may be from it."""

    host: str
    target: VersionRef
    job: str
