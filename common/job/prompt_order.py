"""Order of a job's training prompts, a pure function of its seed and of the prompt's index.

The index counts admitted prompts over all epochs. Every shard, and a resumed run, therefore finds
the same row for an index. Random numbers are the raw stream of PCG64, which is the same in all
versions of NumPy; derived ones, such as its permutations, need not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meshrl.common.job.config import JobConfig

CACHED_EPOCHS = 2  # permutations of a source in memory: those of two epochs at a boundary
SEED_MASK = (1 << 64) - 1  # generators take no negative seed
MIX_STREAM = 1 << 31  # last number of the seeds for sources; those for rows have the source's
BLOCK_PROMPTS = 1 << 14  # prompts whose sources are drawn together


def _draw_numbers(seed: int, count: int, *stream: int) -> NDArray[np.uint64]:
    return np.random.PCG64([seed & SEED_MASK, *stream]).random_raw(count)


def _permute_rows(seed: int, epoch: int, source: int, count: int) -> NDArray[np.intp]:
    """Return the order of a source's rows in an epoch of that source."""
    return np.argsort(_draw_numbers(seed, count, epoch, source), kind="stable")


class PromptMix:
    """Source of each prompt: drawn by weight, for each index on its own."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self.seed = seed
        *self._bounds, self._total = accumulate(weights)
        # prompts of each source before each block that was needed so far
        self._counts = [np.zeros(len(weights), np.int64)]
        self._block: tuple[int, NDArray[np.intp]] = -1, np.zeros(0, np.intp)

    @classmethod
    def from_job(cls, config: JobConfig) -> PromptMix:
        """Return the mix of a job, which has one source without `dataset.mix`."""
        return cls(config.seed, [source.weight for source in config.dataset.mix] or [1.0])

    def find_source(self, prompt: int) -> int:
        """Return the number of a prompt's source."""
        block, place = divmod(prompt, BLOCK_PROMPTS)
        return int(self._draw_block(block)[place]) if self._bounds else 0

    def locate(self, prompt: int) -> tuple[int, int]:
        """Return a prompt's source, and its index among the prompts of that source."""
        if not self._bounds:
            return 0, prompt
        block, place = divmod(prompt, BLOCK_PROMPTS)
        while len(self._counts) <= block:
            last = self._draw_block(len(self._counts) - 1)
            self._counts.append(
                self._counts[-1] + np.bincount(last, minlength=len(self._counts[0]))
            )
        sources = self._draw_block(block)
        source = int(sources[place])
        return source, int(self._counts[block][source] + (sources[:place] == source).sum())

    def _draw_block(self, block: int) -> NDArray[np.intp]:
        """Return the sources of a block's prompts."""
        if self._block[0] != block:
            numbers = _draw_numbers(self.seed, BLOCK_PROMPTS, block, MIX_STREAM) >> np.uint64(11)
            shares = numbers * (self._total / (1 << 53))
            self._block = block, np.searchsorted(self._bounds, shares, side="right")
        return self._block[1]


class PromptOrder:
    """Order of the prompts over the training rows, which are those of one source after another."""

    def __init__(self, mix: PromptMix, row_counts: Sequence[int], *, shuffles: bool) -> None:
        self._mix, self._row_counts, self._shuffles = mix, row_counts, shuffles
        self._first_rows = [0, *accumulate(row_counts)]
        self._permute_rows = lru_cache(CACHED_EPOCHS * len(row_counts))(_permute_rows)

    def find_row(self, prompt: int) -> int:
        """Return the number of the row, from 0, that a prompt index stands for."""
        source, index = self._mix.locate(prompt)
        epoch, place = divmod(index, self._row_counts[source])
        if self._shuffles:
            order = self._permute_rows(self._mix.seed, epoch, source, self._row_counts[source])
            place = int(order[place])
        return self._first_rows[source] + place
