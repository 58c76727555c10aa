"""Released tensors: their memory is free for others, and their content is restored bit for bit."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshrl.common.base.files import offloaded_tensors
from meshrl.common.base.files.offload_media import MEMORY_THREADS, MemorySegment
from meshrl.common.base.files.offloaded_tensors import CHUNK_BYTES
from meshrl.common.model.files.device_copies import DeviceCopies
from meshrl.common.model.files.tensor_storages import OFFERED_BYTES, TensorStorages

# The kernel counts some pages that it may take (at most 31 a processor) only later: a tenth of a
# tensor is more.
ELEMENTS = {"large": 2 * CHUNK_BYTES // 4, "medium": 7 * OFFERED_BYTES // 4, "small": 1000}


def make_tensors() -> dict[str, Tensor]:
    return {name: torch.arange(count, dtype=torch.int32) for name, count in ELEMENTS.items()}


@pytest.fixture
def segment() -> Iterator[MemorySegment]:
    size_bytes = offloaded_tensors.compute_size_bytes(
        {}, TensorStorages(make_tensors()).sizes_bytes
    )
    descriptor = os.memfd_create("kept")
    os.ftruncate(descriptor, size_bytes)
    try:
        yield MemorySegment(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def copy_and_restore(segment: MemorySegment, storages: TensorStorages) -> None:
    offloaded_tensors.offload(segment, {}, storages)
    storages.release()
    storages.reallocate()
    offloaded_tensors.restore(segment, offloaded_tensors.read_header(segment), storages)


def get_pages(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first whole page and of the end of its last."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


@contextmanager
def separate_mapping(tensor: Tensor) -> Iterator[None]:
    """Give a tensor's pages a flag, so that the kernel lists them apart from the rest of the heap.

    Otherwise, allocations beside the tensor would change the listed figures.
    """
    first, end = get_pages(tensor)

    def advise(advice: int) -> None:
        libc = ctypes.CDLL(None)
        assert libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice) == 0

    advise(mmap.MADV_DONTDUMP)
    try:
        yield
    finally:
        advise(mmap.MADV_DODUMP)


def count_used_kib(tensor: Tensor) -> int:
    """Return the KiB of a tensor's pages that the kernel cannot take without writing them.

    The tensor needs a separate mapping.
    """
    first, end = get_pages(tensor)
    used = size_kib = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            low, high = (int(part, 16) for part in words[0].split("-"))
            inside = first <= low and high <= end
            size_kib += (high - low) >> 10 if inside else 0
        elif inside and words[0] in ("Anonymous:", "LazyFree:"):
            used += int(words[1]) * (1 if words[0] == "Anonymous:" else -1)
    assert size_kib == (end - first) >> 10, "the pages are part of another mapping"
    return used


def test_released_memory_is_free_and_the_tensors_are_restored(segment: MemorySegment) -> None:
    tensors, expected = make_tensors(), make_tensors()
    aliases = {name: tensor[1:] for name, tensor in tensors.items()}
    storages = TensorStorages(tensors)
    offered = tensors["large"], tensors["medium"]
    with separate_mapping(offered[0]), separate_mapping(offered[1]):
        for _ in range(3):
            offloaded_tensors.offload(segment, {}, storages)
            before = [count_used_kib(tensor) for tensor in offered]
            storages.release()
            for tensor, used_kib in zip(offered, before, strict=True):
                assert used_kib - count_used_kib(tensor) > 0.9 * (tensor.nbytes >> 10)
            storages.reallocate()
            offloaded_tensors.restore(segment, offloaded_tensors.read_header(segment), storages)
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected[name])
                assert torch.equal(aliases[name], expected[name][1:])


class RecordedDriver:
    """Driver that records its calls; a copy happens when its event is waited for."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.calls: list[str] = []
        self.stream_count = 0
        self.largest_bytes = 0

    def pin(self, address: int, size_bytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = size_bytes
        self.calls.append("pin")

    def unpin(self, address: int) -> None:
        del self.pinned[address]
        self.calls.append("unpin")

    def create_stream(self, like: Tensor) -> Any:
        self.stream_count += 1
        return {"busy": False}

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> Any:
        assert not stream["busy"], "two threads use one stream"
        stream["busy"] = True
        self.largest_bytes = max(self.largest_bytes, target.nbytes)
        return stream, target, source

    def wait(self, event: Any) -> None:
        stream, target, source = event
        stream["busy"] = False
        target.copy_(source)


def test_copies_of_a_device_use_pinned_memory_and_streams_of_their_own(
    segment: MemorySegment,
) -> None:
    driver = RecordedDriver()
    tensors, expected = make_tensors(), make_tensors()
    storages = TensorStorages(tensors, device_copies=DeviceCopies(driver))
    for _ in range(2):
        copy_and_restore(segment, storages)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name])
    assert driver.pinned.popitem()[1] == segment.size_bytes and driver.calls == ["pin"]
    assert 1 <= driver.stream_count <= MEMORY_THREADS
    assert driver.largest_bytes == CHUNK_BYTES
    driver.pinned[segment.open_chunk(0, 1).ctypes.data] = segment.size_bytes
    segment.close()
    assert driver.calls == ["pin", "unpin"] and not driver.pinned


def test_failed_copy_returns_its_stream() -> None:
    driver, source = RecordedDriver(), torch.ones(2, dtype=torch.uint8)
    copies, out = DeviceCopies(driver), np.zeros(3, np.uint8)
    with pytest.raises(RuntimeError):
        copies.read(source, out[:1])
    copies.read(source, out[:2])
    assert out.tolist() == [1, 1, 0] and driver.stream_count == 1
