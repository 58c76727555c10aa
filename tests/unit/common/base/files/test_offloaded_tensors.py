"""Offloaded tensors of a process: restored bit for bit, or reported as incomplete."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

from meshrl.common.base.errors import CorruptData, StorageFull
from meshrl.common.base.files import offloaded_tensors
from meshrl.common.base.files.offload_media import MemorySegment, OffloadFile
from meshrl.common.base.files.offloaded_tensors import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    PIECE_BYTES,
    Cancellation,
    CopyCancelled,
    Octets,
    OffloadMedium,
)
from tests.unit.common.base.files.harms import files_up_to

SIZES = {"empty": 0, "small": 7, "piece": PIECE_BYTES, "large": 2 * CHUNK_BYTES + 13}
METADATA = {"job": "sums", "version": 3}
FILE_BYTES = offloaded_tensors.compute_size_bytes(METADATA, SIZES)


class TensorBytes:
    """Content of random bytes. Its reader is killed, or `cancel` is set, before the piece
    `stops_at`.
    """

    def __init__(
        self, seed: int | None, stops_at: int = -1, cancel: Cancellation | None = None
    ) -> None:
        draw = np.random.default_rng(seed)
        self.sizes_bytes, self.piece_bytes = SIZES, PIECE_BYTES
        self.bytes_by_name = {
            name: np.zeros(size, np.uint8)
            if seed is None
            else draw.integers(0, 256, size, np.uint8)
            for name, size in SIZES.items()
        }
        self.pieces_left, self._cancel, self._lock = stops_at, cancel, Lock()

    def read_into(self, name: str, start: int, out: Octets) -> None:
        self._count_piece()
        out[:] = self.bytes_by_name[name][start : start + len(out)]

    def write(self, name: str, start: int, piece: Octets) -> None:
        self._count_piece()
        self.bytes_by_name[name][start : start + len(piece)] = piece

    def _count_piece(self) -> None:
        with self._lock:
            if self.pieces_left == 0 and self._cancel is not None:
                self._cancel.request()
            elif self.pieces_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.pieces_left -= 1

    def equals(self, other: TensorBytes) -> bool:
        return all((self.bytes_by_name[name] == other.bytes_by_name[name]).all() for name in SIZES)


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


def read_offload(medium: OffloadMedium) -> TensorBytes:
    restored = TensorBytes(None)
    offloaded_tensors.restore(medium, offloaded_tensors.read_header(medium), restored)
    return restored


def test_restore_returns_offloaded_content(open_medium: Callable[..., OffloadMedium]) -> None:
    content = TensorBytes(1)
    write_offload(open_medium(fresh=True), content)
    medium = open_medium()
    header = offloaded_tensors.read_header(medium)
    assert header.metadata == METADATA and dict(header.sizes_bytes) == SIZES
    assert header.size_bytes == medium.size_bytes == FILE_BYTES
    assert read_offload(medium).equals(content)


def test_copying_moves_an_offload_between_memory_and_disk(tmp_path: Path) -> None:
    content = TensorBytes(2)
    with open_segment() as first, open_segment() as second:
        write_offload(MemorySegment(first), content)
        file = OffloadFile(tmp_path / "one.kept", create=True)
        offloaded_tensors.copy_offload(MemorySegment(first), file)
        file.commit()
        offloaded_tensors.copy_offload(file, MemorySegment(second))
        assert read_offload(MemorySegment(second)).equals(content)
        file.close()


@pytest.mark.rotating(3)
@pytest.mark.parametrize("piece", [0, 1, 2, 5, 10])
def test_writer_killed_at_any_piece_leaves_an_invalid_offload(piece: int, tmp_path: Path) -> None:
    with open_segment() as path:
        for medium in (MemorySegment(path), OffloadFile(tmp_path / "one.kept", create=True)):
            child = os.fork()
            if not child:
                write_offload(medium, TensorBytes(3, stops_at=piece))
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
        self._inner, self._writes_left, self._lock = inner, writes, Lock()
        self.location, self.size_bytes = inner.location, inner.size_bytes
        self.thread_count = inner.thread_count
        self.open_chunk, self.read_chunk = inner.open_chunk, inner.read_chunk
        self.flush, self.close = inner.flush, inner.close

    def write_chunk(self, offset: int, chunk: Octets) -> None:
        with self._lock:
            self._writes_left -= 1
            if self._writes_left < 0:
                raise KeyboardInterrupt
        self._inner.write_chunk(offset, chunk)


def test_incomplete_offload_is_rejected_until_its_mark_is_written(tmp_path: Path) -> None:
    content = TensorBytes(4)
    writes = 1 + 3 + 1  # empty header, chunks, header with the mark
    for number in range(writes + 1):
        medium = OffloadFile(tmp_path / "one.kept", create=True)
        with closing(medium):
            interrupted = InterruptedMedium(medium, number)
            if number == writes:
                offloaded_tensors.offload(interrupted, METADATA, content)
                offloaded_tensors.read_header(medium)
                continue
            with pytest.raises(KeyboardInterrupt):
                offloaded_tensors.offload(interrupted, METADATA, content)
            with pytest.raises(CorruptData):
                offloaded_tensors.read_header(medium)


@pytest.mark.parametrize("piece", [0, 6])
def test_cancelled_copy_stops_within_its_chunks(
    open_medium: Callable[..., OffloadMedium], piece: int
) -> None:
    cancel, content = Cancellation(), TensorBytes(9)
    source = TensorBytes(9, piece, cancel)
    with closing(open_medium(fresh=True)) as medium:
        with pytest.raises(CopyCancelled):
            offloaded_tensors.offload(medium, METADATA, source, cancel)
        with pytest.raises(CorruptData):
            offloaded_tensors.read_header(medium)
    chunk_pieces = CHUNK_BYTES // PIECE_BYTES + 2  # of a chunk with parts of several tensors
    assert -1 - source.pieces_left <= chunk_pieces * medium.thread_count
    write_offload(open_medium(fresh=True), content)
    cancel.is_requested = False
    with closing(open_medium()) as medium:
        header = offloaded_tensors.read_header(medium)
        with pytest.raises(CopyCancelled):
            offloaded_tensors.restore(medium, header, TensorBytes(None, piece, cancel), cancel)
        assert read_offload(medium).equals(content)


def test_any_changed_byte_is_detected(open_medium: Callable[..., OffloadMedium]) -> None:
    write_offload(open_medium(fresh=True), TensorBytes(5))
    medium = open_medium()
    header = offloaded_tensors.read_header(medium)
    draw = np.random.default_rng(0)
    used_bytes = 32 + len(offloaded_tensors._encode_description(METADATA, SIZES)) + 16 * 3
    inside = header.data_offset + draw.integers(7, header.data_bytes - ALIGNED, 16)
    for offset in [*range(0, used_bytes, 9), header.data_offset, *map(int, inside)]:
        if is_padding(header, offset):
            continue
        with changed_byte(medium, offset), pytest.raises(CorruptData):
            read_offload(medium)
    assert read_offload(medium).equals(TensorBytes(5))


ALIGNED = offloaded_tensors.ALIGN_BYTES


def is_padding(header: offloaded_tensors.OffloadHeader, offset: int) -> bool:
    """Return True for the bytes between two tensors, which no checksum covers."""
    at = header.data_offset
    for size in SIZES.values():
        if at + size <= offset < at + size + -size % ALIGNED:
            return True
        at += size + -size % ALIGNED
    return False


@contextmanager
def changed_byte(medium: OffloadMedium, offset: int) -> Iterator[None]:
    """Flip a bit of the medium during the block."""
    file = os.open(medium.location, os.O_RDWR)
    try:
        original = os.pread(file, 1, offset)
        os.pwrite(file, bytes([original[0] ^ 1]), offset)
        yield
        os.pwrite(file, original, offset)
    finally:
        os.close(file)


def test_truncated_offload_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    draw = np.random.default_rng(1)
    write_offload(OffloadFile(path, create=True), TensorBytes(6))
    cuts = {1, BLOCK_BYTES, *map(int, draw.integers(1, FILE_BYTES + 1, 8)), FILE_BYTES}
    for cut in sorted(cuts):  # each cuts off more
        os.truncate(path, FILE_BYTES - cut)
        with closing(OffloadFile(path)) as medium, pytest.raises(CorruptData):
            offloaded_tensors.read_header(medium)


def test_copy_of_an_earlier_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    path.write_bytes(offloaded_tensors.OLD_MAGIC + bytes(100))
    with (
        closing(OffloadFile(path)) as medium,
        pytest.raises(CorruptData, match="an earlier version of MeshRL has written it"),
    ):
        offloaded_tensors.read_header(medium)


def test_full_disk_raises_storage_full_and_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    write_offload(OffloadFile(path, create=True), TensorBytes(7))
    with files_up_to(PIECE_BYTES), closing(OffloadFile(path, create=True)) as medium:
        with pytest.raises(StorageFull, match="no space"):
            medium.reserve(FILE_BYTES)
        with pytest.raises(StorageFull, match="no space"):
            offloaded_tensors.offload(medium, METADATA, TensorBytes(8))
    assert [file.name for file in tmp_path.iterdir()] == ["one.kept"]
    assert read_offload(OffloadFile(path)).equals(TensorBytes(7))
