"""The protocol of what runs the model in the built-in engine, which differs from path to path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.generation.batch.adapter_deltas import AdapterDeltas
from meshrl.common.generation.engine_contract import IntArray

SlotIndices = NDArray[np.int64]  # slot numbers, ascending where they decode


class StepCompute(Protocol):
    """Runs tokens of slots through the model. State is in the engine's `Slots`."""

    vocab_size: int
    cache_layout: str  # what `read` gives: path, type, order and shape
    cache_bytes_per_token: int

    def run_steps(
        self, slots: SlotIndices, counts: SlotIndices, max_steps: int, budget_s: float
    ) -> int:
        """Computes the next `counts[i]` known tokens of `slots[i]` and samples behind those that
        have no more; the number of tokens sampled. Where all counts are 1 it may go on for up to
        `steps` steps, until a request ends or `budget_s` is spent.
        """

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Takes weights (`Decoder`'s names, which the engine has checked)."""

    def find_differing_weights(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names of the weights that it computes with otherwise than `state` has them, rounded to
        its type."""

    def load_adapter(self, adapter_index: int, deltas: AdapterDeltas) -> None:
        """Puts an adapter, of `Slots.adapter` number `place`, beside the base: whole or not at all.
        It stays when the engine sleeps."""

    def drop_adapter(self, adapter_index: int) -> None:
        """Frees an adapter that no slot computes with."""

    def score(
        self, tokens: IntArray, blocks: IntArray, adapter_index: int = 0
    ) -> NDArray[np.float32]:
        """Log-probabilities at temperature 1 of all tokens but the first, with the adapter in
        `place` (0: none); `blocks` of the cache are free to use."""

    def span_bytes(self, start: int, end: int) -> int:
        """Bytes of the entries of tokens [start, end); `start` begins a block."""

    def read_cache(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """A copy of a slot's entries for tokens [start, end)."""

    def write_cache(self, slot: int, start: int, end: int, content: NDArray[np.uint8]) -> None:
        """Puts what `read` gave into a slot that has room for it."""

    def sleep(self) -> None:
        """Frees the memory of weights and cache."""

    def wake(self) -> None:
        """Allocates memory for weights and cache again; `load` follows."""
