"""Interface of the weight store.

It stores versions as manifests of chunks, checkpoints and finished groups. It also serves the files
of the run host to other hosts as chunks.
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

STORE_NAME = "weights"  # name in the registry


@message
class TensorPiece:
    """Tensor, or a piece of one.

    A piece holds elements `begin` to `end` of the tensor stored row by row with dimension `dim`
    outermost. The rows of a rank are a piece, and so is a part of them.
    """

    name: str
    dtype: str  # safetensors' names: F32, BF16, ...
    shape: list[int]  # shape of the whole tensor
    chunk: str  # digest of the chunk that holds the piece
    offset: int  # of the piece in the chunk, in bytes
    size_bytes: int  # of the piece, in bytes
    dim: int = 0
    begin: int = 0
    end: int = -1  # exclusive; -1, format 1: the pieces of a tensor follow each other


@message
class Manifest:
    """Tensors of one weight version, and the chunks that hold them.

    `image` is the identity of the published weights (`meshrl.common.weights.layout.identity`): it
    depends neither on chunks nor on the process that staged each row. `sha256` is the digest of the
    manifest without this field.
    """

    job: str
    lineage: int
    version: int
    tensors: list[TensorPiece]
    # of a version with adapters only: the version that they are added to
    base: VersionRef | None = None
    scale: float = 0.0  # of such a version: factor of the product of its matrices
    image: str = ""
    format: int = 1
    sha256: str = ""


@message
class ManifestRequest:
    """Request for a manifest by its digest.

    The answer for a version of adapters includes its base; `without_base`: as staged.
    """

    digest: str
    without_base: bool = False


@message
class ChunkVerification:
    """Request to verify a chunk that a process found corrupt.

    The file belongs to a `kind` of `meshrl.common.base.files.corruption`, and to a job.
    """

    digest: str
    kind: str
    job: str
    space: str = ""  # of `meshrl.common.api.transfer.bulk_permissions.SPACES`


@message
class FailedTransfer:
    """Failed transfer of a chunk from a source; `source_lacks_chunk`: no valid copy is there."""

    chunk: str
    source: str
    source_lacks_chunk: bool


@message
class SourceRequest:
    """Request of a fetching process for more sources, at most `max_chunks`.

    It reports the results of its earlier assignments.
    """

    fetch_id: str  # unique to this fetch
    host: str
    serving_process: str  # name of the process that serves the host's chunks; empty: none
    max_chunks: int
    missing: list[str] | None = None  # all missing chunks; None: already reported
    present: list[str] = field(default_factory=list)  # chunks that have arrived on its host
    failed: list[FailedTransfer] = field(default_factory=list)
    is_last: bool = False  # the fetch has ended
    network: str = ""  # name of the host's network; empty: the head's
    is_joining: bool = False  # the process has no version yet: updates of others come first


@message
class ChunkOrigin:
    """Chunk, and the name of the process that serves it."""

    chunk: str
    source: str


@message
class SourceAssignments:
    """Answer to SourceRequest."""

    origins: list[ChunkOrigin]
    retry_after_s: float  # time until the next request, if there is space left
    is_known: bool = True  # False: the store has restarted; repeat the request with `missing`


@message
class Checkpoint:
    """State to resume training from: the staged weights, and the job's account at that step.

    The other state is in the checkpoint's directory.
    """

    job: str
    lineage: int
    step: int
    weights: str  # digest of the weights' manifest
    account: Any
    files: dict[str, str]  # digests of the directory's files, by path
    image: str = ""  # identities of the weights, see `common/weights/layout/identity.py`
    masters: str = ""


@message
class CheckpointName:
    """Name of a checkpoint of a job: a request for it, or for those of earlier steps."""

    job: str
    name: str


@message
class CheckpointAssembly:
    """Request to assemble a checkpoint's directory on the run host from chunks.

    Its writer has no access to the files of the run host.
    """

    job: str
    name: str
    files: dict[str, str]  # digests by path


@message
class CheckpointNames:
    """Answer to Weights.list_older_checkpoints, the last one first."""

    names: list[str]


@message
class CheckpointQuarantine:
    """Request to quarantine a corrupt checkpoint on the run host.

    The store then publishes the event `damaged`, once for `op_id`: the caller may have exited by
    then.
    """

    job: str
    name: str
    op_id: str
    event_fields: dict[str, Any]  # of the event, without `aside`


@message
class UnfinishedCheckpoints:
    """Request to remove unfinished checkpoints of an earlier start of the job's trainer.

    `committed` names the checkpoint that stays in any case.
    """

    job: str
    committed: str


@message
class FilePublication:
    """Request to publish files of the run host as chunks of the store.

    The files belong to the job's bundle, or to one of its checkpoints. Any host can fetch them by
    their digests.
    """

    job: str
    checkpoint: str = ""  # empty: of the bundle
    folders: list[str] = field(default_factory=list)  # files or folders to publish; none: all


@message
class PublishedFiles:
    """Answer to FilePublication: digests by path.

    The chunks stay for hours. Repeat the request after that, and at once while `is_complete` is
    False (`meshrl.common.weights.store.weight_store_client` does).
    """

    files: dict[str, str]
    is_complete: bool = True


@message
class LineBatch:
    """Lines of a process's samples or traces, to append on the run host."""

    job: str
    file: str  # name from `meshrl.common.records.line_files`
    op_id: str  # repetitions have no effect
    lines: str


@message
class TrajectoryGroup:
    """Finished group: members' sequences one after the other."""

    group: int
    prompt: int  # row of the dataset
    lengths: Array  # int32 [members], prompt included
    tokens: Array  # int32
    logprobs: Array  # float32, 0 where the model did not sample
    versions: Array  # int32, -1 where the model did not sample
    rewards: Array  # float64 [members], in older runs float32; NaN: failed, not trained
    # bool [members]: cut off at the maximum length; empty: not recorded
    truncated: Array = field(default_factory=lambda: np.zeros(0, np.bool_))
    # Log-probabilities of the job's frozen models, like `logprobs`; 0 for the first token of a
    # member and for failed members; empty: the job has no such model.
    reference_logprobs: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    teacher_logprobs: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    # Experts of the position that predicted each token, int16 [tokens, layers x k], recorded by the
    # engine; empty for a dense model. `expert_shape` is [layers, k].
    expert_ids: Array = field(default_factory=lambda: NO_EXPERTS)
    expert_shape: list[int] = field(default_factory=lambda: [0, 0])
    abandoned_above: int = SINGLE_LINEAGE  # see `lineages`; only a stored group's row has it
    # numbers of rewards and environments, float64 [members, names]; NaN: a member has none
    metric_names: list[str] = field(default_factory=list)
    metrics: Array = field(default_factory=lambda: np.zeros((0, 0), np.float64))

    @property
    def sampled_versions(self) -> NDArray[np.int32]:
        """Weight versions, int32 [n], of the sampled tokens in scored members.

        Only these tokens are trained.
        """
        scored = np.repeat(np.isfinite(self.rewards), self.lengths)
        found: NDArray[np.int32] = self.versions[scored & (self.versions >= 0)]
        return found


class Weights(Interface):
    """Methods of the weight store."""

    # All chunks of the manifest must be in the store. Returns the manifest's digest, by which steps
    # and checkpoints refer to it.
    stage_version = Call(Manifest, str, deadline_s=30.0, idempotent=True)
    fetch_manifest = Call(ManifestRequest, Manifest, deadline_s=10.0, idempotent=True)
    # False: the chunk is gone or was quarantined.
    verify_chunk = Call(ChunkVerification, bool, deadline_s=60.0, idempotent=True)
    # The tracker's state is soft: a caller without a timely answer repeats the request.
    assign_sources = Call(SourceRequest, SourceAssignments, deadline_s=5.0, idempotent=True)
    # If the run host's files are on another disk than the store, files are copied: True when all
    # are.
    assemble_checkpoint = Call(CheckpointAssembly, bool, deadline_s=120.0, idempotent=True)
    save_checkpoint = Call(Checkpoint, str, deadline_s=30.0, idempotent=True)  # its name
    load_checkpoint = Call(CheckpointName, Checkpoint, deadline_s=10.0, idempotent=True)
    list_older_checkpoints = Call(CheckpointName, CheckpointNames, deadline_s=30.0, idempotent=True)
    # The quarantined path; empty: another process has moved it.
    quarantine_checkpoint = Call(CheckpointQuarantine, str, deadline_s=30.0, idempotent=True)
    remove_unfinished_checkpoints = Call(
        UnfinishedCheckpoints, NoneType, deadline_s=60.0, idempotent=True
    )
    append_lines = Call(LineBatch, NoneType, deadline_s=30.0, idempotent=True)
    publish_files = Call(FilePublication, PublishedFiles, deadline_s=120.0, idempotent=True)
    begin_deltas = Call(BeginDelta, DeltaBases, deadline_s=5.0, idempotent=True)
    # False: no host needs more of the delta.
    stage_deltas = Call(StageDelta, bool, deadline_s=10.0, idempotent=True)
    # may wait for deltas
    fetch_deltas = Call(DeltaQuery, DeltaBatch, deadline_s=20.0, idempotent=True)
    acknowledge_version = Call(VersionAcknowledgement, NoneType, deadline_s=5.0, idempotent=True)
