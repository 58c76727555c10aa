"""Deltas of chunks: exact, small, paired by content, and chosen by predicted time."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshrl.common.api.weights import TensorPiece
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import BadMessage, CorruptData
from meshrl.common.weights.delta.codec import (
    BLOCK_BYTES,
    ChunkPair,
    apply_delta,
    compute_element_bytes,
    compute_max_changed,
    decode_delta,
    encode_delta,
    group_by_size,
    pair_chunks,
)
from meshrl.common.weights.delta.policy import is_delta_faster, is_worth_waiting
from meshrl.kernels import delta

ByteArray = NDArray[np.uint8]
T = TypeVar("T")
MIB = 1 << 20
SLOW, FAST = 25e6, 5e9  # bytes a second: 200 Mbit/s, and more than a core applies


def make_weights(elements: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> ByteArray:
    """Return random weights as of a layer that is 512 wide."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator) / math.sqrt(512)
    weight_bytes: ByteArray = values.to(dtype).view(torch.uint8).numpy()
    return weight_bytes


def change_elements(old: ByteArray, width: int, share: float, seed: int) -> ByteArray:
    """Return a copy with new weights in a share of its elements."""
    new, changed_mask = old.copy(), np.random.default_rng(seed).random(len(old) // width) < share
    dtype = {2: torch.bfloat16, 4: torch.float32}[width]
    new.reshape(-1, width)[changed_mask] = make_weights(
        int(changed_mask.sum()), seed + 1, dtype
    ).reshape(-1, width)
    return new


def apply(old: ByteArray | bytes, blob: bytes, digest: str) -> bytes:
    parts: list[bytes] = []
    apply_delta(old, blob, digest, lambda part: parts.append(bytes(part)))
    return b"".join(parts)


@settings(max_examples=60)
@given(
    st.integers(0, 5000),
    st.sampled_from([2, 4]),
    st.sampled_from([0.0, 0.002, 0.01, 0.1, 0.2]),
    st.integers(0, 1 << 20),
)
def test_applied_delta_gives_the_new_chunk(
    elements: int, width: int, share: float, seed: int
) -> None:
    old = make_weights(elements, seed, {2: torch.bfloat16, 4: torch.float32}[width])
    new = change_elements(old, width, share, seed)
    blob = encode_delta(old, memoryview(new.data), width)
    # So few bytes that the header alone is as large, or by chance too many changes.
    if blob is None:
        assert len(new) < 600 or (old.view(f"u{width}") != new.view(f"u{width}")).mean() > 0.25
    else:
        assert apply(bytes(old), blob, compute_digest(new.data)) == new.tobytes()


def test_delta_is_the_same_with_and_without_the_native_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = make_weights(700_000, 1)
    new = change_elements(old, 2, 0.02, 2)
    native = encode_delta(old, new, 2)
    monkeypatch.setattr(delta, "load_library", lambda: None)
    assert encode_delta(old, new, 2) == native and native is not None
    assert apply(old, native, compute_digest(new.data)) == new.tobytes()
    assert len(new) > 2 * BLOCK_BYTES


@pytest.mark.parametrize(("share", "max_ratio"), [(0.01, 0.0135), (0.002, 0.0030)])
@pytest.mark.parametrize("mib", [1, 4])
def test_delta_is_little_larger_than_the_changes(share: float, max_ratio: float, mib: int) -> None:
    old = make_weights(mib << 19, 3)
    blob = encode_delta(old, change_elements(old, 2, share, 4), 2)
    assert blob is not None and len(blob) < max_ratio * len(old)


def test_gaps_beyond_two_bytes_take_four() -> None:
    old = make_weights(1 << 20, 5)
    for places in ([65535], [65536], [3, 4, 65541], [(1 << 20) - 1], [0, 70_000, 70_001]):
        new = old.copy()
        new.view(np.uint16)[places] ^= 1
        blob = encode_delta(old, new, 2)
        assert blob is not None and len(blob) < 200
        assert apply(old, blob, compute_digest(new.data)) == new.tobytes()


def test_no_delta_is_made_of_large_changes() -> None:
    old = make_weights(10_000, 6)
    assert encode_delta(old, make_weights(10_000, 7), 2) is None
    assert encode_delta(old, old[:-2], 2) is None
    assert encode_delta(old[:-1], old[:-1], 2) is None


def test_delta_of_another_chunk_is_rejected() -> None:
    old, other = make_weights(4000, 8), make_weights(4000, 9)
    new = change_elements(old, 2, 0.01, 8)
    blob = encode_delta(old, new, 2)
    assert blob is not None
    with pytest.raises(CorruptData, match="instead of chunk"):
        apply(other, blob, compute_digest(new.data))
    with pytest.raises(BadMessage, match="8000 bytes, but the chunk has 7998"):
        apply(old[:-2], blob, compute_digest(new.data))


@settings(max_examples=150)
@given(st.data())
def test_corrupt_delta_is_rejected_or_gives_the_same_chunk(data: st.DataObject) -> None:
    old = make_weights(3000, 10)
    new = change_elements(old, 2, 0.02, 10)
    blob = bytearray(encode_delta(old, new, 2) or b"")
    position = data.draw(st.integers(0, len(blob) - 1))
    blob[position] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([len(blob), position, 0]))
    try:
        result = apply(old, bytes(blob[:cut]), compute_digest(new.data))
    except (BadMessage, CorruptData):
        return
    assert result == new.tobytes()  # an unused bit, as those that pad the header


@settings(max_examples=60)
@given(st.binary(max_size=400))
def test_bytes_that_are_no_delta_are_rejected(content: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_delta(content, 400)
    with pytest.raises(BadMessage):
        decode_delta(b"MRD1" + content, 400)


@pytest.mark.rotating(4)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_encoding_and_decoding_take_little_memory(width: int) -> None:
    old = np.random.default_rng(12).integers(0, 256, 8 << 20, np.uint8)
    new, count = old.copy(), compute_max_changed(len(old), width)
    places = np.random.default_rng(13).choice(len(old) // width, count, replace=False)
    new.view(f"u{width}")[places] ^= 1
    blob, peak_bytes = measure_peak_memory(lambda: encode_delta(old, new, width))
    assert blob is not None and peak_bytes < 2.5 * len(old)
    changes, peak_bytes = measure_peak_memory(lambda: decode_delta(blob, len(old)))
    assert len(changes.positions) == count and peak_bytes < 2.0 * len(old)
    assert apply(old, blob, compute_digest(new.data)) == new.tobytes()


def measure_peak_memory(work: Callable[[], T]) -> tuple[T, int]:
    """Run `work` and return its result and its peak of memory in bytes."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("width", [1, 2])
def test_delta_with_too_many_changes_is_rejected_before_decompression(width: int) -> None:
    size = 8 << 20
    change_count = compute_max_changed(size, width) + 1
    header = struct.pack("<4sBBxxII", b"MRD1", width, 4, size // width, change_count)
    plane = zstandard.ZstdCompressor().compress(bytes(change_count))
    blob = header + struct.pack("<I", len(plane)) * (4 + width) + plane * (4 + width)

    def decode_oversized() -> None:
        with pytest.raises(BadMessage, match=f"changes {change_count} of {size // width}"):
            decode_delta(blob, size)

    assert measure_peak_memory(decode_oversized)[1] < size / 4


def test_positions_beyond_the_chunk_are_rejected() -> None:
    old, longer = make_weights(4000, 11), make_weights(8000, 11)
    new = longer.copy()
    new.view(np.uint16)[7999] ^= 1
    blob = bytearray(encode_delta(longer, new, 2) or b"")
    blob[8:12] = (4000).to_bytes(4, "little")  # as if the delta were of a shorter chunk
    with pytest.raises(BadMessage, match="element 7999 of 4000"):
        apply(old, bytes(blob), compute_digest(old.data))


def test_element_width_fits_all_pieces() -> None:
    def piece(dtype: str, offset: int, size: int) -> TensorPiece:
        return TensorPiece("w", dtype, [size], "a" * 32, offset, size)

    assert compute_element_bytes([piece("BF16", 0, 10), piece("BF16", 10, 6)]) == 2
    assert compute_element_bytes([piece("F32", 0, 8), piece("F32", 8, 8)]) == 4
    assert compute_element_bytes([piece("F32", 0, 8), piece("BF16", 8, 2)]) == 2
    assert compute_element_bytes([piece("BF16", 0, 10), piece("F32", 10, 8)]) == 2
    assert compute_element_bytes([piece("BF16", 0, 10), piece("U8", 10, 3)]) == 1
    assert compute_element_bytes([piece("F32", 0, 0)]) == 4


@pytest.mark.parametrize("rate", [1e5, SLOW, 3e8])
def test_small_delta_is_faster_on_a_slow_link(rate: float) -> None:
    assert is_delta_faster(MIB // 50, 4 * MIB, rate) and is_worth_waiting(rate)
    assert not is_delta_faster(4 * MIB, 4 * MIB, rate)


def test_chunk_is_faster_on_a_fast_link_and_size_decides_otherwise() -> None:
    assert not is_delta_faster(MIB // 50, 4 * MIB, FAST) and not is_worth_waiting(FAST)
    assert is_delta_faster(MIB, 4 * MIB, None) and not is_delta_faster(4 * MIB - 1, 4 * MIB, None)
    assert is_worth_waiting(None)


def piece(name: str, begin: int, chunk: str, offset: int = 0, end: int = -1) -> TensorPiece:
    """Return a piece of a bfloat16 tensor of 100 elements."""
    end = end if end >= 0 else begin + 50
    return TensorPiece(name, "BF16", [100], chunk, offset, (end - begin) * 2, 0, begin, end)


def test_chunks_with_the_same_pieces_are_paired() -> None:
    base = [piece("w", 0, "a"), piece("w", 50, "b"), piece("v", 0, "c", end=100)]
    target = [piece("w", 0, "A"), piece("w", 50, "b"), piece("v", 0, "C", end=100)]
    assert pair_chunks(base, target) == [ChunkPair("a", "A", 2, 100), ChunkPair("c", "C", 2, 200)]


def test_chunks_with_other_piece_boundaries_are_not_paired() -> None:
    base = [piece("w", 0, "a"), piece("w", 50, "a", 100)]
    assert pair_chunks(base, [piece("w", 0, "A", end=100)]) == []
    assert pair_chunks(base, [piece("w", 0, "A", 100), piece("w", 50, "A")]) == []
    assert pair_chunks(base, [piece("v", 0, "A")]) == []
    assert pair_chunks([], base) == []
    base = [piece("w", 0, "a"), piece("w", 50, "b", 100)]
    assert pair_chunks(base, [piece("w", 0, "A"), piece("w", 50, "A", 100)]) == []


def test_chunks_that_diverged_share_their_old_chunk() -> None:
    base = [piece("w", 0, "same"), piece("w", 50, "same")]
    target = [piece("w", 0, "A"), piece("w", 50, "B")]
    assert pair_chunks(base, target) == [
        ChunkPair("same", "A", 2, 100),
        ChunkPair("same", "B", 2, 100),
    ]
    assert pair_chunks(target, base) == []


@given(st.lists(st.integers(1, 50)), st.integers(1, 100))
def test_groups_have_all_pairs_in_order_and_are_filled(sizes: list[int], max_bytes: int) -> None:
    pairs = [ChunkPair(f"a{i}", f"b{i}", 2, size) for i, size in enumerate(sizes)]
    groups = list(group_by_size(pairs, max_bytes))
    assert [pair for group in groups for pair in group] == pairs
    empty: list[ChunkPair] = []
    for group, following in zip_longest(groups, groups[1:], fillvalue=empty):
        size_bytes = sum(pair.size_bytes for pair in group)
        assert len(group) == 1 or size_bytes <= max_bytes
        assert not following or size_bytes + following[0].size_bytes > max_bytes
