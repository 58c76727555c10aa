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

from meshrl.kernels.library_build import build_library

ELEMENT_WIDTHS = (1, 2, 4, 8)  # bytes of an element
BLOCK_ELEMENTS = 64  # elements, at most, that csrc/delta.cpp wants room for before it looks at them
C_POINTER, C_INT64 = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: dict[str, list[Any]] = {
    "delta_differences": [C_POINTER, C_POINTER, C_INT64, C_INT64, C_INT64, C_POINTER, C_POINTER],
    "delta_overwrite": [
        C_POINTER,
        C_INT64,
        C_INT64,
        C_INT64,
        C_POINTER,
        C_POINTER,
        C_INT64,
        C_INT64,
    ],
}
ByteArray = NDArray[np.uint8]


class ElementDifferences(NamedTuple):
    """The elements that differ, in their order."""

    gaps: NDArray[np.uint32]  # [changed]: elements between the one before, or the begin, and it
    values: NDArray[Any]  # [changed], unsigned of the element's width: what it is now


@cache
def load_library() -> ctypes.CDLL | None:
    """The library, built on first use; None if it cannot be."""
    built = build_library("delta")
    if built.path is None:
        return None
    return built.load_with_signatures(SIGNATURES, C_INT64)


def find_differences(
    old: ByteArray, new: ByteArray, width: int, max_differences: int
) -> ElementDifferences | None:
    """The elements of `width` bytes in which two runs of as many bytes differ; None when they are
    more than `most`.
    """
    if len(old) != len(new) or len(new) % width:
        raise ValueError(f"runs of {len(old)} and {len(new)} bytes, elements of {width}")
    native = load_library()
    if native is None:
        return find_differences_numpy(old, new, width, max_differences)
    room = min(max_differences, len(new) // width) + BLOCK_ELEMENTS
    gaps, values = np.empty(room, np.uint32), np.empty(room, f"u{width}")
    found = native.delta_differences(
        *(old.ctypes.data, new.ctypes.data, len(new), width, room),
        *(gaps.ctypes.data, values.ctypes.data),
    )
    return (
        None
        if not 0 <= found <= max_differences
        else ElementDifferences(gaps[:found], values[:found])
    )


def find_differences_numpy(
    old: ByteArray, new: ByteArray, width: int, max_differences: int
) -> ElementDifferences | None:
    """The same by NumPy."""
    changed = new.view(f"u{width}")
    places = np.flatnonzero(old.view(f"u{width}") != changed)
    if len(places) > max_differences:
        return None
    return ElementDifferences(np.diff(places, prepend=-1).astype(np.uint32) - 1, changed[places])


def overwrite_elements(
    block: ByteArray,
    first_element: int,
    positions: NDArray[np.uint32],
    values: NDArray[Any],
    first_value: int,
) -> int:
    """Writes values over a block of a run that begins with its element `first`, those from `begin`
    on whose `positions`, which rise, lie in it; the number of the value after them.
    """
    native, width = load_library(), values.itemsize
    if native is None:
        return overwrite_elements_numpy(block, first_element, positions, values, first_value)
    written: int = native.delta_overwrite(
        *(block.ctypes.data, first_element, len(block) // width, width),
        *(positions.ctypes.data, values.ctypes.data, first_value, len(values)),
    )
    return written


def overwrite_elements_numpy(
    block: ByteArray,
    first_element: int,
    positions: NDArray[np.uint32],
    values: NDArray[Any],
    first_value: int,
) -> int:
    """The same by NumPy."""
    elements = block.view(values.dtype)
    end = int(np.searchsorted(positions, first_element + len(elements)))
    elements[positions[first_value:end].astype(np.int64) - first_element] = values[first_value:end]
    return end
