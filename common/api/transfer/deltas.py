"""Messages about deltas to the weight store: chunks of a version as changes to those of another.

The calls are in `Weights`.
"""

from __future__ import annotations

from dataclasses import field

from meshrl.common.base.encoding.messages import message


@message
class VersionRef:
    """Reference to a version."""

    lineage: int
    version: int
    manifest: str  # of the manifest


@message
class ChunkDelta:
    """Delta from one chunk to another with the same pieces of the same tensors."""

    old_chunk: str  # digest
    new_chunk: str
    # Digest of the stored chunk with the delta (`meshrl.common.weights.delta.codec`), which may
    # also hold deltas of other chunks; offset and size of this one.
    blob: str
    offset: int
    size_bytes: int


@message
class DeltaSet:
    """Delta between two versions, or a part of one, chunk by chunk.

    Chunks without a delta are pulled in full. A delta is part of neither manifest.
    """

    base: VersionRef
    target: VersionRef
    chunks: list[ChunkDelta]


@message
class BeginDelta:
    """Announcement of deltas to a staged version, before its commit.

    The answer lists the versions to make deltas from.
    """

    job: str
    target: VersionRef
    anchor_interval: int  # every n-th version stays a base for hosts that fall behind
    part: int = 0  # index of the sending process among those that staged the version
    parts: int = 1  # number of processes that make deltas
    host: str = ""  # host of the chunks; not needed from a process that makes all deltas


@message
class DeltaBases:
    """Answer to BeginDelta, the version that most hosts have first.

    An empty list: no other host receives versions, and no process waits for a delta.
    """

    bases: list[VersionRef]


@message
class StageDelta:
    """More of a delta, whose blobs are stored; `is_last`: the end of this part."""

    deltas: DeltaSet
    part: int = 0
    is_last: bool = False


@message
class DeltaQuery:
    """Request for the deltas to a version, after the first `offset` ones.

    The call waits if more deltas that the host can use are expected.
    """

    target: str  # digest of its manifest
    host: str
    offset: int = 0
    wait_s: float = 0.0


@message
class DeltaBatch:
    """Answer to DeltaQuery. `has_more`: further deltas from a version of the host may follow."""

    chunks: list[ChunkDelta] = field(default_factory=list)
    has_more: bool = False


@message
class VersionAcknowledgement:
    """Report that a host has a complete version: later deltas may start from it."""

    host: str
    target: VersionRef
    job: str
