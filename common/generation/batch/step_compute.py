"""Protocol of the backends of the built-in engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.base.errors import MeshError
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.generation.batch.adapter_deltas import AdapterDeltas
from meshrl.common.generation.engine_contract import IntArray

SlotIndices = NDArray[np.int64]  # slot numbers; those that decode are ascending


class StepCompute(Protocol):
    """Backend that runs tokens of slots through the model. State is in the engine's `Slots`."""

    vocab_size: int
    cache_layout: str  # layout of `read_cache`: backend, type, order and shape
    cache_bytes_per_token: int
    weights_bytes: int  # memory of the weights while awake

    def run_steps(
        self, slots: SlotIndices, counts: SlotIndices, max_steps: int, budget_s: float
    ) -> int:
        """Compute the next `counts[i]` known tokens of `slots[i]`; sample where none is left.

        Return the number of sampled tokens. If all counts are 1, the call may run up to `max_steps`
        steps, until a request ends or `budget_s` has passed.
        """

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Load weights (`Decoder`'s names, which the engine has checked)."""

    def find_differing_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Return names of the loaded weights that differ from `state`, rounded to the backend's
        type.
        """

    def load_adapter(self, adapter_index: int, deltas: AdapterDeltas) -> None:
        """Load an adapter at `adapter_index` of `Slots.adapter_index`, as a whole or not at all.

        It remains loaded while the engine sleeps.
        """

    def drop_adapter(self, adapter_index: int) -> None:
        """Remove an adapter that no slot uses."""

    def score(
        self, tokens: IntArray, blocks: IntArray, adapter_index: int = 0
    ) -> NDArray[np.float32]:
        """Score all tokens but the first with the adapter at `adapter_index` (0: none).

        Return log-probabilities at temperature 1. `blocks` of the cache may be overwritten.
        """

    def span_bytes(self, start: int, end: int) -> int:
        """Return the bytes of the entries of tokens [start, end); `start` begins a block."""

    def read_cache(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """Copy a slot's entries for tokens [start, end)."""

    def write_cache(self, slot: int, start: int, end: int, content: NDArray[np.uint8]) -> None:
        """Write the result of `read_cache` into a slot that has blocks for it."""

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy blocks of the cache."""

    def write_blocks(self, blocks: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Write the result of `read_blocks`."""

    def release_cache(self) -> None:
        """Free the memory of the cache, which nothing may access until `reallocate_cache`."""

    def reallocate_cache(self) -> None:
        """Allocate the cache again, with undefined content; raise MemoryError without enough."""

    def collect_weights(self) -> ReleasableMemory:
        """Return the memory of the weights."""

    def sleep(self) -> None:
        """Free the memory of weights and cache."""

    def wake(self, num_blocks: int) -> None:
        """Allocate memory for weights and a cache of `num_blocks` blocks; `load_weights` follows.

        Raise MeshError if memory runs out.
        """


def out_of_memory_error(reason: str = "") -> MeshError:
    """Return the error of a backend whose memory ran out."""
    return MeshError(
        f"memory is too small for the weights and the cache{reason and ': '}{reason}",
        where="engine",
        fix="Lower rollout.kv_memory or rollout.kv_tokens",
    )
