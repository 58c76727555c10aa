"""The interface of the weight store: versions as manifests of chunks, checkpoints, finished groups,
and the files at a run's home, which other hosts get as chunks.
"""

from __future__ import annotations

from dataclasses import field
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.calls.interface import Call, Interface
from meshrl.common.api.transfer.deltas import (
    BeginDelta,
    DeltaBases,
    DeltaBatch,
    DeltaQuery,
    StageDelta,
    VersionAcknowledgement,
)
from meshrl.common.api.transfer.deltas import VersionRef as VersionRef
from meshrl.common.base.encoding.messages import Array, message
from meshrl.common.base.expert_routing import NO_EXPERTS
from meshrl.common.base.lineages import SINGLE_LINEAGE

STORE_NAME = "weights"  # the store's name in the registry


@message
class TensorPiece:
    """A tensor, or a piece of one. A piece holds elements `begin` to `end` of the tensor laid out
    row by row with dimension `dim` outermost, so the rows of a rank are a piece, and so is a part
    of them.
    """

    name: str
    dtype: str  # safetensors' names: F32, BF16, ...
    shape: list[int]  # shape of the whole tensor
    chunk: str  # digest of the chunk that holds the piece
    offset: int  # where the piece begins, in bytes into the chunk
    size: int  # bytes of the piece
    dim: int = 0
    begin: int = 0
    end: int = -1  # exclusive; -1, format 1: the pieces of a tensor follow each other


@message
class Manifest:
    """The tensors of one weight version, and the chunks that hold them.

    `image` is the identity of what is published (`meshrl.common.weights.layout.identity`): it
    depends neither on chunks nor on who staged which rows. `sha256` is that of the manifest without
    it.
    """

    job: str
    lineage: int
    version: int
    tensors: list[TensorPiece]
    base: VersionRef | None = None  # a version of adapters alone: what they are added to
    scale: float = 0.0  # of such a version: what the product of its factors is multiplied by
    image: str = ""
    format: int = 1
    sha256: str = ""


@message
class ManifestRequest:
    """Asks for a manifest by its digest. That of a version of adapters is answered with what its
    base has besides; `alone`: as it was staged.
    """

    digest: str
    without_base: bool = False


@message
class ChunkVerification:
    """Asks the store to look at a chunk that somebody found damaged: the file of a `kind` of
    `meshrl.common.base.files.corruption`, and of a job.
    """

    digest: str
    kind: str
    job: str
    space: str = ""  # of `meshrl.common.api.transfer.bulk_permissions.SPACES`


@message
class FailedTransfer:
    """A chunk did not come from a source. `gone`: that has not got it as it should be."""

    chunk: str
    source: str
    source_lacks_chunk: bool


@message
class SourceRequest:
    """A process that fetches chunks says what has become of those that it was sent for, and asks
    for more: `room` at most.
    """

    fetch_id: str  # of this fetch alone
    host: str
    serving_process: str  # name of the process that serves on what the host has; empty: nobody does
    max_chunks: int
    missing: list[str] | None = None  # all that it wants and lacks; None: it has told
    present: list[str] = field(default_factory=list)  # chunks that have come to its host
    failed: list[FailedTransfer] = field(default_factory=list)
    is_last: bool = False  # it fetches no more


@message
class ChunkOrigin:
    """A chunk, and the name of who is to be asked for it."""

    chunk: str
    source: str


@message
class SourceAssignments:
    """The answer to Seek."""

    origins: list[ChunkOrigin]
    retry_after_s: float  # when to ask again, if there is room left
    is_known: bool = True  # False: ask again with what is lacking, the store was started anew


@message
class Checkpoint:
    """What training continues from: the staged weights, and the job's account at that step. The
    rest lies in the checkpoint's directory.
    """

    job: str
    lineage: int
    step: int
    weights: str  # digest of the weights' manifest
    account: Any
    files: dict[str, str]  # digests of the files of its directory, by their path there
    image: str = ""  # identities of the weights, see `common/weights/layout/identity.py`
    masters: str = ""


@message
class CheckpointName:
    """A checkpoint of a job: it is asked for, or those of earlier steps are."""

    job: str
    name: str


@message
class CheckpointAssembly:
    """Asks the store to make a checkpoint's directory at the run's home, of chunks: its writer does
    not see that home.
    """

    job: str
    name: str
    files: dict[str, str]  # digests by path


@message
class CheckpointNames:
    """The answer to Weights.list_older_checkpoints, the last one first."""

    names: list[str]


@message
class CheckpointQuarantine:
    """Asks the store to set a damaged checkpoint aside at the run's home, and to tell the event
    `damaged` if it does, once for `op`: who asks may not be there any more to tell it.
    """

    job: str
    name: str
    op_id: str
    event_fields: dict[str, Any]  # the event's fields, without `aside`


@message
class UnfinishedCheckpoints:
    """Asks the store to remove what an earlier start of the job's trainer began to write and did
    not end; `committed` names the checkpoint that stays whatever it looks like.
    """

    job: str
    committed: str


@message
class FilePublication:
    """Asks for files at a run's home to become chunks of the store, from where any host gets them
    by their digests: of the job's bundle, or of one of its checkpoints.
    """

    job: str
    checkpoint: str = ""  # empty: the bundle
    folders: list[str] = field(default_factory=list)  # files or folders of it; none: all


@message
class PublishedFiles:
    """The answer to Publish: digests by path. They stay for hours; ask again after that, and at
    once while not all are there (`meshrl.common.weights.store.weight_store_client` does).
    """

    files: dict[str, str]
    is_complete: bool = True


@message
class LineBatch:
    """Hands lines of a process's samples or traces over, for the run's home."""

    job: str
    file: str  # as `meshrl.common.records.line_files` names them
    op_id: str  # repeated, it is done once
    lines: str


@message
class TrajectoryGroup:
    """A finished group: members' sequences one after the other."""

    group: int
    prompt: int  # row of the dataset
    lengths: Array  # int32 [members], prompt included
    tokens: Array  # int32
    logprobs: Array  # float32, 0 where the model did not sample
    versions: Array  # int32, -1 where the model did not sample
    rewards: Array  # float64 [members], in older runs float32; NaN: it failed and is not trained
    # bool [members]: cut off at the longest length; empty: nobody recorded it
    truncated: Array = field(default_factory=lambda: np.zeros(0, np.bool_))
    # Log-probabilities of the job's frozen models beside `logprobs`, 0 for what begins a member and
    # for members that failed; empty: the job has no such model.
    reference: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    teacher: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    # Where a mixture of experts sent the place that predicted each token, int16 [tokens, layers x
    # k], as its engine noted it; empty for a dense model. `expert_shape` is [layers, k].
    experts: Array = field(default_factory=lambda: NO_EXPERTS)
    expert_shape: list[int] = field(default_factory=lambda: [0, 0])
    foreign_above: int = SINGLE_LINEAGE  # see `lineages`; of a stored group, its row alone says so

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """The weight versions, int32 [n], of the tokens that the model sampled in scored members;
        only these tokens are trained.
        """
        scored = np.repeat(np.isfinite(self.rewards), self.lengths)
        found: NDArray[np.int32] = self.versions[scored & (self.versions >= 0)]
        return found


class Weights(Interface):
    """The methods of the weight store."""

    # All chunks of the manifest are there already. Its own digest, by which steps and checkpoints
    # name it.
    stage_version = Call(Manifest, str, deadline_s=30.0, idempotent=True)
    fetch_manifest = Call(ManifestRequest, Manifest, deadline_s=10.0, idempotent=True)
    # False: the chunk is gone or was set aside.
    verify_chunk = Call(ChunkVerification, bool, deadline_s=60.0, idempotent=True)
    # What it answers from is soft: who is not answered in time asks again.
    assign_sources = Call(SourceRequest, SourceAssignments, deadline_s=5.0, idempotent=True)
    # Where home is on another disk than the store, files are copied: `whole` says when all are.
    assemble_checkpoint = Call(CheckpointAssembly, bool, deadline_s=120.0, idempotent=True)
    save_checkpoint = Call(
        Checkpoint, str, deadline_s=30.0, idempotent=True
    )  # the name to load it by
    load_checkpoint = Call(CheckpointName, Checkpoint, deadline_s=10.0, idempotent=True)
    list_older_checkpoints = Call(CheckpointName, CheckpointNames, deadline_s=30.0, idempotent=True)
    # Where it lies now; empty: somebody else has moved it.
    quarantine_checkpoint = Call(CheckpointQuarantine, str, deadline_s=30.0, idempotent=True)
    remove_unfinished_checkpoints = Call(
        UnfinishedCheckpoints, NoneType, deadline_s=60.0, idempotent=True
    )
    append_lines = Call(LineBatch, NoneType, deadline_s=30.0, idempotent=True)
    publish_files = Call(FilePublication, PublishedFiles, deadline_s=120.0, idempotent=True)
    begin_deltas = Call(BeginDelta, DeltaBases, deadline_s=5.0, idempotent=True)
    # False: nobody needs more of it.
    stage_deltas = Call(StageDelta, bool, deadline_s=10.0, idempotent=True)
    fetch_deltas = Call(
        DeltaQuery, DeltaBatch, deadline_s=20.0, idempotent=True
    )  # it may wait for some
    acknowledge_version = Call(VersionAcknowledgement, NoneType, deadline_s=5.0, idempotent=True)
