"""Copies of large host memory at its full speed.

The implementation is csrc/copy.cpp, or the C library's copy without a compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.kernels.library_build import build_library

ByteArray = NDArray[np.uint8]
STREAM_BYTES = 1 << 16  # copies from this size on bypass the caches, which hold smaller ones
SIGNATURES: dict[str, list[Any]] = {
    "copy_past_caches": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
}


@cache
def find_streaming_copy() -> Callable[[int, int, int], object]:
    """Return the library's copy, built on first use, or the C library's if that fails."""
    built = build_library("copy")
    if built.path is None:
        return ctypes.memmove
    copy: Callable[[int, int, int], object] = built.load_with_signatures(
        SIGNATURES, None
    ).copy_past_caches
    return copy


def view_memory(address: int, size_bytes: int) -> ByteArray:
    """View bytes of host memory, which must outlive the view."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), np.uint8)


def copy_memory(target: ByteArray, source: ByteArray) -> None:
    """Copy bytes between ranges of host memory that do not overlap, without the GIL."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit {len(target)}")
    copy = find_streaming_copy() if len(source) >= STREAM_BYTES else ctypes.memmove
    copy(target.ctypes.data, source.ctypes.data, len(source))
