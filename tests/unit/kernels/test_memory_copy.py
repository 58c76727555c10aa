"""Copies past the caches write each byte of their range, and no other."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from meshrl.kernels.library_build import build_library
from meshrl.kernels.memory_copy import (
    STREAM_BYTES,
    copy_memory,
    find_streaming_copy,
    view_memory,
)

GUARD_BYTES = 128
# around the lines, vectors and blocks of pages that csrc/copy.cpp copies at a time
SIZES = (
    0,
    1,
    63,
    64,
    4 * 4096,
    4 * 4096 + 63,
    STREAM_BYTES,
    STREAM_BYTES + 16411,
    3 * STREAM_BYTES,
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("copies", ["library", "streaming"])
def test_copy_writes_its_range_at_any_alignment(size: int, copies: str) -> None:
    source = np.random.default_rng(size).integers(1, 256, size + GUARD_BYTES).astype(np.uint8)
    for shift in (0, 1, 17, 63):
        target = np.zeros(size + 2 * GUARD_BYTES, np.uint8)
        part, expected = target[shift : shift + size], source[:size]
        if copies == "library":
            copy_memory(part, expected)
        else:
            find_streaming_copy()(part.ctypes.data, expected.ctypes.data, size)
        assert (part == expected).all()
        assert not target[:shift].any() and not target[shift + size :].any()


def test_copy_of_other_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="3 bytes do not fit 2"):
        copy_memory(np.zeros(2, np.uint8), np.zeros(3, np.uint8))


def test_view_shares_memory() -> None:
    content = np.arange(8, dtype=np.uint8)
    view_memory(content.ctypes.data + 2, 3)[:] = 9
    assert content.tolist() == [0, 1, 9, 9, 9, 5, 6, 7]


@pytest.mark.needs("compiler")
def test_host_with_a_compiler_has_the_streaming_copy() -> None:
    assert build_library("copy").path is not None
    assert find_streaming_copy() is not ctypes.memmove
