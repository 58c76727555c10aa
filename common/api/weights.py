"""The interface of the weight store: versions as manifests of chunks, checkpoints, and finished
groups.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.records.experts import NO_EXPERTS
from common.records.lineages import NATIVE
from common.runtime.interface import Call, Interface
from common.wire.frames import Array, message


@message
class Tensor:
    """A tensor, or a piece of one: those that share a name follow each other in its memory."""

    name: str
    dtype: str  # safetensors' names: F32, BF16, ...
    shape: list[int]  # shape of the whole tensor
    chunk: str  # digest of the chunk that holds the piece
    offset: int  # where the piece begins, in bytes into the chunk
    size: int  # bytes of the piece


@message
class Manifest:
    """The tensors of one weight version, and the chunks that hold them."""

    job: str
    lineage: int
    version: int
    tensors: list[Tensor]


@message
class Stage:
    """Asks the store to keep a manifest; all of its chunks are there already."""

    manifest: Manifest


@message
class Staged:
    """The answer to Stage: the manifest's own digest, by which steps and checkpoints name it."""

    digest: str


@message
class Fetch:
    """Asks for a manifest by its digest."""

    digest: str


@message
class Examine:
    """Asks the store to look at a chunk that somebody found damaged: the file of a `kind` of
    `common.records.damage`, and of a job.
    """

    digest: str
    kind: str
    job: str


@message
class Examined:
    """The answer to Examine: False, the chunk is gone or was set aside."""

    whole: bool


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


@message
class Saved:
    """The answer to Checkpoint: the name by which it is loaded."""

    name: str


@message
class Load:
    """Asks for a checkpoint by its name."""

    job: str
    name: str


@message
class Group:
    """A finished group: members' sequences one after the other."""

    group: int
    prompt: int  # row of the dataset
    lengths: Array  # int32 [members], prompt included
    tokens: Array  # int32
    logprobs: Array  # float32, 0 where the model did not sample
    versions: Array  # int32, -1 where the model did not sample
    rewards: Array  # float32 [members], NaN: the member failed and is not trained
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
    foreign_above: int = NATIVE  # see `lineages`; of a stored group, its row alone says so

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

    stage = Call(Stage, Staged, deadline_s=30.0, idempotent=True)
    manifest = Call(Fetch, Manifest, deadline_s=10.0, idempotent=True)
    examine = Call(Examine, Examined, deadline_s=60.0, idempotent=True)
    save = Call(Checkpoint, Saved, deadline_s=30.0, idempotent=True)
    load = Call(Load, Checkpoint, deadline_s=10.0, idempotent=True)
