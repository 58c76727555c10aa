"""Order of a job's training prompts, a pure function of its seed and of the prompt's index.

The index counts admitted prompts over all epochs. Every shard, and a resumed run, therefore finds
the same row for an index.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CACHED_EPOCHS = 4  # permutations in memory: prompts of two epochs are in flight at a boundary
SEED_MASK = (1 << 64) - 1  # generators take no negative seed


@lru_cache(maxsize=CACHED_EPOCHS)
def permute_rows(seed: int, epoch: int, count: int) -> NDArray[np.intp]:
    """Return the order of `count` rows in an epoch.

    The raw stream of PCG64 is the same in all versions of NumPy; its permutations need not be.
    """
    keys = np.random.PCG64([seed & SEED_MASK, epoch]).random_raw(count)
    return np.argsort(keys, kind="stable")


class PromptOrder:
    """Order of the prompts over the rows of a training set."""

    def __init__(self, seed: int, row_count: int, *, shuffles: bool) -> None:
        self._seed, self._row_count, self._shuffles = seed, row_count, shuffles

    def find_row(self, prompt: int) -> int:
        """Return the number of the row, from 0, that a prompt index stands for."""
        epoch, place = divmod(prompt, self._row_count)
        if not self._shuffles:
            return place
        return int(permute_rows(self._seed, epoch, self._row_count)[place])
