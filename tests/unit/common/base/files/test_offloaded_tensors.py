"""Offloaded tensors of a sleeping process: restored bit for bit, or reported as incomplete."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from meshrl.common.base.errors import CorruptData, StorageFull
from meshrl.common.base.files import offloaded_tensors
from meshrl.common.base.files.offloaded_tensors import (
    PIECE_BYTES,
    MemorySegment,
    Octets,
    OffloadFile,
    OffloadMedium,
)
from tests.unit.common.base.files.harms import files_up_to

SIZES = {"empty": 0, "small": 7, "piece": PIECE_BYTES, "large": 2 * PIECE_BYTES + 13}


class TensorBytes:
    """Content of random bytes; `dies_at` is the index of the piece at which its reader is
    killed.
    """

    def __init__(self, seed: int | None, dies_at: int = -1) -> None:
        draw = np.random.default_rng(seed)
        self.sizes_bytes = SIZES
        self.bytes_by_name = {
            name: np.zeros(size, np.uint8)
            if seed is None
            else draw.integers(0, 256, size).astype(np.uint8)
            for name, size in SIZES.items()
        }
        self._pieces_left = dies_at

    def read(self, name: str, start: int, end: int) -> Octets:
        if self._pieces_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._pieces_left -= 1
        return self.bytes_by_name[name][start:end]

    def write(self, name: str, start: int, piece: Octets) -> None:
        self.bytes_by_name[name][start : start + len(piece)] = piece

    def equals(self, other: TensorBytes) -> bool:
        return all((self.bytes_by_name[name] == other.bytes_by_name[name]).all() for name in SIZES)


METADATA = {"job": "sums", "version": 3}
FILE_BYTES = offloaded_tensors.compute_size_bytes(METADATA, SIZES)


@contextmanager
def open_segment() -> Iterator[str]:
    descriptor = os.memfd_create("kept")
    os.ftruncate(descriptor, FILE_BYTES)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@pytest.fixture(params=["memory", "disk"])
def open_medium(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., OffloadMedium]]:
    """Return a function that opens the medium, new or existing."""
    if request.param == "disk":
        yield lambda fresh=False: OffloadFile(tmp_path / "one.kept", create=fresh)
        return
    with open_segment() as path:
        yield lambda fresh=False: MemorySegment(path)


def write_offload(medium: OffloadMedium, content: TensorBytes) -> None:
    offloaded_tensors.offload(medium, METADATA, content)
    if isinstance(medium, OffloadFile):
        medium.commit()
    medium.close()


def test_restore_returns_offloaded_content(open_medium: Callable[..., OffloadMedium]) -> None:
    content, restored = TensorBytes(1), TensorBytes(None)
    write_offload(open_medium(fresh=True), content)
    medium = open_medium()
    header = offloaded_tensors.read_header(medium)
    assert header.metadata == METADATA and dict(header.sizes_bytes) == SIZES
    offloaded_tensors.restore(medium, header, restored)
    assert restored.equals(content)


def test_copying_moves_an_offload_between_memory_and_disk(tmp_path: Path) -> None:
    content, restored = TensorBytes(2), TensorBytes(None)
    with open_segment() as first, open_segment() as second:
        write_offload(MemorySegment(first), content)
        file = OffloadFile(tmp_path / "one.kept", create=True)
        offloaded_tensors.copy_offload(MemorySegment(first), file)
        file.commit()
        offloaded_tensors.copy_offload(file, MemorySegment(second))
        offloaded_tensors.restore(
            MemorySegment(second), offloaded_tensors.read_header(MemorySegment(second)), restored
        )
        file.close()
    assert restored.equals(content)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("piece", range(4))
def test_writer_killed_at_any_piece_leaves_an_invalid_offload(piece: int, tmp_path: Path) -> None:
    with open_segment() as path:
        for medium in (MemorySegment(path), OffloadFile(tmp_path / "one.kept", create=True)):
            child = os.fork()
            if not child:
                write_offload(medium, TensorBytes(3, dies_at=piece))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            with pytest.raises(CorruptData):
                offloaded_tensors.read_header(medium)
        assert not (tmp_path / "one.kept").exists()
        write_offload(MemorySegment(path), TensorBytes(3))  # the next writer overwrites the remains
        offloaded_tensors.read_header(MemorySegment(path))


class InterruptedMedium:
    """Medium whose writer is interrupted at its n-th write."""

    def __init__(self, inner: OffloadMedium, writes: int) -> None:
        self._inner, self._writes_left = inner, writes
        self.location, self.size_bytes, self.read_at = (
            inner.location,
            inner.size_bytes,
            inner.read_at,
        )

    def write_at(self, offset: int, piece: Octets) -> None:
        self._writes_left -= 1
        if self._writes_left < 0:
            raise KeyboardInterrupt
        self._inner.write_at(offset, piece)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


def test_incomplete_offload_is_rejected_until_its_mark_is_written() -> None:
    writes = 5 + 2  # pieces, header, mark
    for number in range(writes):
        with open_segment() as path:
            with pytest.raises(KeyboardInterrupt):
                offloaded_tensors.offload(
                    InterruptedMedium(MemorySegment(path), number), METADATA, TensorBytes(4)
                )
            with pytest.raises(CorruptData):
                offloaded_tensors.read_header(MemorySegment(path))
    with open_segment() as path:
        offloaded_tensors.offload(
            InterruptedMedium(MemorySegment(path), writes), METADATA, TensorBytes(4)
        )
        offloaded_tensors.read_header(MemorySegment(path))


def test_any_changed_byte_is_detected(open_medium: Callable[..., OffloadMedium]) -> None:
    write_offload(open_medium(fresh=True), TensorBytes(5))
    medium = open_medium()
    header = offloaded_tensors.read_header(medium)
    draw = np.random.default_rng(0)
    inside = [
        start + int(draw.integers(SIZES[n])) for n, start in header.offsets.items() if SIZES[n]
    ]
    header_bytes = min(header.offsets.values())
    for offset in [*range(0, header_bytes, 9), *inside]:
        if isinstance(medium, MemorySegment):
            original = medium.read_at(offset, 1).copy()
            medium.write_at(offset, original ^ np.uint8(1))
        else:
            file = os.open(medium.location, os.O_RDWR)
            original = np.frombuffer(os.pread(file, 1, offset), np.uint8)
            os.pwrite(file, (original ^ 1).tobytes(), offset)
        try:
            if (offset % 64 or offset < header_bytes) and not _is_padding(header, offset):
                with pytest.raises(CorruptData):
                    offloaded_tensors.restore(
                        medium, offloaded_tensors.read_header(medium), TensorBytes(None)
                    )
        finally:
            if isinstance(medium, MemorySegment):
                medium.write_at(offset, original)
            else:
                os.pwrite(file, original.tobytes(), offset)
                os.close(file)
    offloaded_tensors.restore(medium, offloaded_tensors.read_header(medium), TensorBytes(None))


def _is_padding(header: offloaded_tensors.OffloadHeader, offset: int) -> bool:
    description_bytes = (
        len(offloaded_tensors._encode_description(header.metadata, header.sizes_bytes))
        + offloaded_tensors.HEADER_BYTES
        + 16 * len(SIZES)
    )
    return description_bytes <= offset < min(header.offsets.values())


def test_truncated_offload_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    write_offload(OffloadFile(path, create=True), TensorBytes(6))
    os.truncate(path, FILE_BYTES - 1)
    with pytest.raises(CorruptData):
        offloaded_tensors.read_header(OffloadFile(path))


def test_full_disk_raises_storage_full_and_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    write_offload(OffloadFile(path, create=True), TensorBytes(7))
    with (
        files_up_to(PIECE_BYTES),
        closing(OffloadFile(path, create=True)) as medium,
        pytest.raises(StorageFull, match="no space"),
    ):
        offloaded_tensors.offload(medium, METADATA, TensorBytes(8))
    assert [file.name for file in tmp_path.iterdir()] == ["one.kept"]
    restored = TensorBytes(None)
    offloaded_tensors.restore(
        OffloadFile(path), offloaded_tensors.read_header(OffloadFile(path)), restored
    )
    assert restored.equals(TensorBytes(7))
