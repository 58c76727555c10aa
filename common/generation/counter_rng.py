"""Counter-based random numbers: a draw depends on a seed and a position, not on other draws.

The generator is SplitMix64 (Steele, Lea, Flood 2014), jumped to its position-th output.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(n) for n in (27, 30, 31, 32))
_ONE = np.uint64(1)

Keys = NDArray[np.uint64]


def seed_to_key(seed: int) -> int:
    """Return the state of a seed's stream; adjacent seeds give unrelated streams."""
    return int(_mix(np.array([seed % 2**64], np.uint64))[0])


def draw_uint64(keys: Keys, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the positions-th output, 64 bits, of each key's stream; shapes broadcast."""
    return _mix(keys + (positions.view(np.uint64) + _ONE) * _GOLDEN)


def draw_uniforms(keys: Keys, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in the open interval (0, 1), on a grid of 2**32.

    They are never 0 and never 1, also after scaling.
    """
    return ((draw_uint64(keys, positions) >> _S32).astype(np.float64) + 0.5) * 2.0**-32


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)
