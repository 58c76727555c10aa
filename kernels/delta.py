"""Which elements of one run of bytes differ from those of another, and writing such elements over
what is there: csrc/delta.cpp, or NumPy where there is no compiler.

Bytes are compared, so neither the sign of a zero nor what is no number is lost.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl.kernels.build import library

WIDTHS = (1, 2, 4, 8)  # bytes of an element
BLOCK = 64  # elements, at most, that csrc/delta.cpp wants room for before it looks at them
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, list[Any]] = {
    "delta_differences": [POINTER, POINTER, SIZE, SIZE, SIZE, POINTER, POINTER],
    "delta_overwrite": [POINTER, SIZE, SIZE, SIZE, POINTER, POINTER, SIZE, SIZE],
}
Bytes = NDArray[np.uint8]


class Differences(NamedTuple):
    """The elements that differ, in their order."""

    gaps: NDArray[np.uint32]  # [changed]: elements between the one before, or the begin, and it
    values: NDArray[Any]  # [changed], unsigned of the element's width: what it is now


@cache
def functions() -> ctypes.CDLL | None:
    """The library, built on first use; None if it cannot be."""
    built = library("delta")
    if built.path is None:
        return None
    return built.bound(SIGNATURES, SIZE)


def differences(old: Bytes, now: Bytes, width: int, most: int) -> Differences | None:
    """The elements of `width` bytes in which two runs of as many bytes differ; None when they are
    more than `most`.
    """
    if len(old) != len(now) or len(now) % width:
        raise ValueError(f"runs of {len(old)} and {len(now)} bytes, elements of {width}")
    native = functions()
    if native is None:
        return plain_differences(old, now, width, most)
    room = min(most, len(now) // width) + BLOCK
    gaps, values = np.empty(room, np.uint32), np.empty(room, f"u{width}")
    found = native.delta_differences(
        *(old.ctypes.data, now.ctypes.data, len(now), width, room),
        *(gaps.ctypes.data, values.ctypes.data),
    )
    return None if not 0 <= found <= most else Differences(gaps[:found], values[:found])


def plain_differences(old: Bytes, now: Bytes, width: int, most: int) -> Differences | None:
    """The same by NumPy."""
    changed = now.view(f"u{width}")
    places = np.flatnonzero(old.view(f"u{width}") != changed)
    if len(places) > most:
        return None
    return Differences(np.diff(places, prepend=-1).astype(np.uint32) - 1, changed[places])


def overwrite(
    block: Bytes, first: int, positions: NDArray[np.uint32], values: NDArray[Any], begin: int
) -> int:
    """Writes values over a block of a run that begins with its element `first`, those from `begin`
    on whose `positions`, which rise, lie in it; the number of the value after them.
    """
    native, width = functions(), values.itemsize
    if native is None:
        return plain_overwrite(block, first, positions, values, begin)
    written: int = native.delta_overwrite(
        *(block.ctypes.data, first, len(block) // width, width),
        *(positions.ctypes.data, values.ctypes.data, begin, len(values)),
    )
    return written


def plain_overwrite(
    block: Bytes, first: int, positions: NDArray[np.uint32], values: NDArray[Any], begin: int
) -> int:
    """The same by NumPy."""
    elements = block.view(values.dtype)
    end = int(np.searchsorted(positions, first + len(elements)))
    elements[positions[begin:end].astype(np.int64) - first] = values[begin:end]
    return end
