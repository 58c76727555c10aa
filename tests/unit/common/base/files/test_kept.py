"""What a sleeping process keeps: it comes back bit by bit, or is known not to be whole."""

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


class Memory:
    """Content of random bytes; `dies_at`: the number of the piece at which its reader is killed."""

    def __init__(self, seed: int | None, dies_at: int = -1) -> None:
        draw = np.random.default_rng(seed)
        self.sizes_bytes = SIZES
        self.runs = {
            name: np.zeros(size, np.uint8)
            if seed is None
            else draw.integers(0, 256, size).astype(np.uint8)
            for name, size in SIZES.items()
        }
        self._left = dies_at

    def read(self, name: str, start: int, end: int) -> Octets:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self.runs[name][start:end]

    def write(self, name: str, start: int, piece: Octets) -> None:
        self.runs[name][start : start + len(piece)] = piece

    def equals(self, other: Memory) -> bool:
        return all((self.runs[name] == other.runs[name]).all() for name in SIZES)


ABOUT = {"job": "sums", "version": 3}
ROOM = offloaded_tensors.compute_size_bytes(ABOUT, SIZES)


@contextmanager
def segment() -> Iterator[str]:
    descriptor = os.memfd_create("kept")
    os.ftruncate(descriptor, ROOM)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., OffloadMedium]]:
    """Makes a medium, fresh or as it lies there."""
    if request.param == "disk":
        yield lambda fresh=False: OffloadFile(tmp_path / "one.kept", create=fresh)
        return
    with segment() as path:
        yield lambda fresh=False: MemorySegment(path)


def write(medium: OffloadMedium, content: Memory) -> None:
    offloaded_tensors.offload(medium, ABOUT, content)
    if isinstance(medium, OffloadFile):
        medium.commit()
    medium.close()


def test_what_is_kept_comes_back(place: Callable[..., OffloadMedium]) -> None:
    content, back = Memory(1), Memory(None)
    write(place(fresh=True), content)
    medium = place()
    head = offloaded_tensors.read_header(medium)
    assert head.metadata == ABOUT and dict(head.sizes_bytes) == SIZES
    offloaded_tensors.restore(medium, head, back)
    assert back.equals(content)


def test_it_moves_between_memory_and_disk(tmp_path: Path) -> None:
    content, back = Memory(2), Memory(None)
    with segment() as first, segment() as second:
        write(MemorySegment(first), content)
        file = OffloadFile(tmp_path / "one.kept", create=True)
        offloaded_tensors.copy_offload(MemorySegment(first), file)
        file.commit()
        offloaded_tensors.copy_offload(file, MemorySegment(second))
        offloaded_tensors.restore(
            MemorySegment(second), offloaded_tensors.read_header(MemorySegment(second)), back
        )
        file.close()
    assert back.equals(content)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("piece", range(4))
def test_a_death_at_any_piece_leaves_nothing_that_is_taken_for_whole(
    piece: int, tmp_path: Path
) -> None:
    with segment() as path:
        for medium in (MemorySegment(path), OffloadFile(tmp_path / "one.kept", create=True)):
            child = os.fork()
            if not child:
                write(medium, Memory(3, dies_at=piece))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            with pytest.raises(CorruptData):
                offloaded_tensors.read_header(medium)
        assert not (tmp_path / "one.kept").exists()
        write(MemorySegment(path), Memory(3))  # who comes after it writes over what is left
        offloaded_tensors.read_header(MemorySegment(path))


class Stops:
    """A medium whose writer dies at the n-th thing that it puts there."""

    def __init__(self, inner: OffloadMedium, puts: int) -> None:
        self._inner, self._puts = inner, puts
        self.location, self.size_bytes, self.read_at = (
            inner.location,
            inner.size_bytes,
            inner.read_at,
        )

    def write_at(self, offset: int, piece: Octets) -> None:
        self._puts -= 1
        if self._puts < 0:
            raise KeyboardInterrupt
        self._inner.write_at(offset, piece)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


def test_only_the_mark_makes_it_whole() -> None:
    puts = 5 + 2  # pieces, head, mark
    for number in range(puts):
        with segment() as path:
            with pytest.raises(KeyboardInterrupt):
                offloaded_tensors.offload(Stops(MemorySegment(path), number), ABOUT, Memory(4))
            with pytest.raises(CorruptData):
                offloaded_tensors.read_header(MemorySegment(path))
    with segment() as path:
        offloaded_tensors.offload(Stops(MemorySegment(path), puts), ABOUT, Memory(4))
        offloaded_tensors.read_header(MemorySegment(path))


def test_any_byte_that_has_changed_is_found(place: Callable[..., OffloadMedium]) -> None:
    write(place(fresh=True), Memory(5))
    medium = place()
    head = offloaded_tensors.read_header(medium)
    draw = np.random.default_rng(0)
    inside = [start + int(draw.integers(SIZES[n])) for n, start in head.offsets.items() if SIZES[n]]
    before = min(head.offsets.values())
    for at in [*range(0, before, 9), *inside]:
        if isinstance(medium, MemorySegment):
            found = medium.read_at(at, 1).copy()
            medium.write_at(at, found ^ np.uint8(1))
        else:
            file = os.open(medium.location, os.O_RDWR)
            found = np.frombuffer(os.pread(file, 1, at), np.uint8)
            os.pwrite(file, (found ^ 1).tobytes(), at)
        try:
            if (at % 64 or at < before) and not _is_padding(head, at):
                with pytest.raises(CorruptData):
                    offloaded_tensors.restore(
                        medium, offloaded_tensors.read_header(medium), Memory(None)
                    )
        finally:
            if isinstance(medium, MemorySegment):
                medium.write_at(at, found)
            else:
                os.pwrite(file, found.tobytes(), at)
                os.close(file)
    offloaded_tensors.restore(medium, offloaded_tensors.read_header(medium), Memory(None))


def _is_padding(head: offloaded_tensors.OffloadHeader, at: int) -> bool:
    written = (
        len(offloaded_tensors._encode_description(head.metadata, head.sizes_bytes))
        + offloaded_tensors.HEADER_BYTES
        + 16 * len(SIZES)
    )
    return written <= at < min(head.offsets.values())


def test_a_shorter_file_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    write(OffloadFile(path, create=True), Memory(6))
    os.truncate(path, ROOM - 1)
    with pytest.raises(CorruptData):
        offloaded_tensors.read_header(OffloadFile(path))


def test_a_full_disk_is_told_by_type_and_the_file_before_is_there_still(tmp_path: Path) -> None:
    path = tmp_path / "one.kept"
    write(OffloadFile(path, create=True), Memory(7))
    with (
        files_up_to(PIECE_BYTES),
        closing(OffloadFile(path, create=True)) as medium,
        pytest.raises(StorageFull, match="no room"),
    ):
        offloaded_tensors.offload(medium, ABOUT, Memory(8))
    assert [file.name for file in tmp_path.iterdir()] == ["one.kept"]
    back = Memory(None)
    offloaded_tensors.restore(
        OffloadFile(path), offloaded_tensors.read_header(OffloadFile(path)), back
    )
    assert back.equals(Memory(7))
