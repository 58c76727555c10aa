"""Differences of two byte runs by elements, and their application to another run.

The implementation is csrc/delta.cpp, or NumPy without a compiler. Bytes are compared, so the sign
of a zero and NaN values are preserved.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl.kernels.library_build import build_library

ELEMENT_WIDTHS = (1, 2, 4, 8)  # bytes of an element
BLOCK_ELEMENTS = 64  # maximum of elements per call: csrc/delta.cpp needs room for all of them
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
    """Differing elements, in order."""

    # [changed]: unchanged elements since the previous changed one, or since the start
    gaps: NDArray[np.uint32]
    values: NDArray[Any]  # [changed], unsigned of the element's width: new values


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, built on first use, or None if that fails."""
    built = build_library("delta")
    if built.path is None:
        return None
    return built.load_with_signatures(SIGNATURES, C_INT64)


def find_differences(
    old: ByteArray, new: ByteArray, width: int, max_differences: int
) -> ElementDifferences | None:
    """Find the elements of `width` bytes in which two runs of equal length differ.

    Return None if there are more than `max_differences`.
    """
    if len(old) != len(new) or len(new) % width:
        raise ValueError(
            f"runs have {len(old)} and {len(new)} bytes, with elements of {width} bytes"
        )
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
    """Find differences by NumPy; see `find_differences`."""
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
    """Overwrite elements in a block of a run that begins with its element `first_element`.

    Write the values from `first_value` on whose `positions`, which are ascending, are in the block.
    Return the index of the next value.
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
    """Overwrite elements by NumPy; see `overwrite_elements`."""
    elements = block.view(values.dtype)
    end = int(np.searchsorted(positions, first_element + len(elements)))
    elements[positions[first_value:end].astype(np.int64) - first_element] = values[first_value:end]
    return end
