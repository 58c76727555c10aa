"""The image of a version: chunk files side by side in memory, of which tensors are views."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from meshrl.common.api.weights import Manifest, TensorPiece
from meshrl.common.base.errors import CorruptData, MeshError
from meshrl.common.model.files.safetensors_writer import DTYPE_NAMES
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.manifest import RowRange
from meshrl.common.weights.layout.memory_layout import PAGE_BYTES
from meshrl.common.weights.layout.version_image import VersionImage, load_tensor

Cut = tuple[str, int, int]  # elements of a tensor


class Files:
    """Chunk files below a directory, and what a manifest says of them."""

    def __init__(self, root: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.store, self.tensors = ChunkStore(root), tensors
        self.pieces: list[TensorPiece] = []

    def chunk(self, *cuts: Cut, dim: int = 0) -> str:
        """Writes pieces one after the other into a chunk."""
        laid = {name: tensor.movedim(dim, 0).reshape(-1) for name, tensor in self.tensors.items()}
        parts = [laid[name][begin:end].contiguous() for name, begin, end in cuts]
        content = b"".join(bytes(part.view(torch.uint8).numpy()) for part in parts)
        digest, offset = self.store.write(content), 0
        for (name, begin, end), part in zip(cuts, parts, strict=True):
            whole = self.tensors[name]
            told = DTYPE_NAMES[whole.dtype], list(whole.shape), digest, offset, part.nbytes
            self.pieces.append(TensorPiece(name, *told, dim, begin, end))
            offset += part.nbytes
        return digest

    def image(self, wanted: dict[str, RowRange | None] | None = None) -> VersionImage:
        image = VersionImage(Manifest("job", 0, 0, self.pieces, format=2), selection=wanted)
        for digest in image.chunk_sizes:
            with self.store.chunk_path(digest).open("rb") as file:
                image.map_chunk(digest, file.fileno())
                assert image.is_valid(digest)
        return image


AT_EXIT = """
import atexit, sys
from pathlib import Path

held = []
# What is told first of all runs last, as threads do.
atexit.register(lambda: print(int(held[0].tensors["a"].sum()), flush=True))
import torch
from tests.unit.common.weights.test_version_image import Files

files = Files(Path(sys.argv[1]), {"a": torch.ones(5000)})
files.chunk(("a", 0, 5000))
held.append(files.image())
"""


PAGE_FLOATS = PAGE_BYTES // 4
LARGE = torch.arange(5 * PAGE_FLOATS // 2, dtype=torch.float32).reshape(-1, 2)
COUNT = LARGE.numel()


def test_a_tensor_that_was_cut_at_pages_is_one_view_of_several_files(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    files.chunk(("a", 0, PAGE_FLOATS))
    files.chunk(("a", PAGE_FLOATS, 2 * PAGE_FLOATS))
    files.chunk(("a", 2 * PAGE_FLOATS, COUNT), ("b", 0, 7))
    image = files.image()
    assert image.is_contiguous("a") and image.is_contiguous("b")
    assert torch.equal(image.tensors["a"], LARGE) and torch.equal(
        image.tensors["b"], torch.arange(7)
    )
    first, *_, last = image.tensor_ranges("a")
    assert image.tensors["a"].data_ptr() == first.elements.data_ptr()
    assert last.elements.data_ptr() - first.elements.data_ptr() == 2 * PAGE_BYTES
    assert image.joined_bytes == 0 and image.size_bytes == LARGE.nbytes + 7 * 8


@pytest.mark.parametrize("at", [PAGE_FLOATS - 2, 3, PAGE_FLOATS])
def test_a_tensor_that_does_not_go_on_is_put_together_from_its_pieces(
    tmp_path: Path, at: int
) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    files.chunk(("a", 0, at))
    files.chunk(("b", 0, 7), ("a", at, COUNT))
    image = files.image()
    assert not image.is_contiguous("a")
    target = torch.zeros_like(LARGE)
    load_tensor(image.tensors, "a", target)
    assert torch.equal(target, LARGE) and image.joined_bytes == 0
    assert torch.equal(image.tensors["a"], LARGE) and image.copied_bytes == 2 * LARGE.nbytes
    assert image.joined_bytes == LARGE.nbytes


def test_a_chunk_that_is_there_more_than_once_lies_in_one_place(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": torch.ones(3 * PAGE_FLOATS), "b": torch.ones(PAGE_FLOATS)})
    for begin in range(3):
        files.chunk(("a", begin * PAGE_FLOATS, (begin + 1) * PAGE_FLOATS))
    files.chunk(("b", 0, PAGE_FLOATS))
    image = files.image()
    assert len(image.chunk_sizes) == 1
    assert all(torch.equal(image.tensors[name], files.tensors[name]) for name in "ab")


def test_tensors_of_other_widths_and_none_are_what_they_were(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(7.0),
    }
    files = Files(tmp_path, tensors)
    files.chunk(*((name, 0, tensor.numel()) for name, tensor in tensors.items()))
    image = files.image()
    for name, tensor in tensors.items():
        assert torch.equal(image.tensors[name], tensor)
        assert image.tensors[name].shape == tensor.shape


@pytest.mark.parametrize("contiguous", [True, False])
def test_columns_of_ranks_come_together(tmp_path: Path, contiguous: bool) -> None:
    whole = torch.arange(6 * 10, dtype=torch.float32).reshape(6, 10)
    files = Files(tmp_path, {"a": whole})
    files.chunk(("a", 0, 25), dim=1)  # in the middle of a column
    files.chunk(("a", 25, 60), dim=1)
    image = files.image()
    target = torch.zeros(6, 10) if contiguous else torch.zeros(10, 6).T
    image.copy_into("a", target)
    assert torch.equal(target, whole) and torch.equal(image.tensors["a"], whole)


def test_who_wants_rows_has_their_chunks_alone(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    first = files.chunk(("a", 0, PAGE_FLOATS))
    files.chunk(("a", PAGE_FLOATS, COUNT))
    last = files.chunk(("b", 0, 7))
    image = files.image({"a": RowRange(0, 0, 3), "b": None})
    assert set(image.chunk_sizes) == {first, last}
    assert torch.equal(image.tensor_ranges("a")[0].elements[:6].reshape(3, 2), LARGE[:3])
    with pytest.raises(KeyError):
        image.tensors["a"]
    assert torch.equal(image.tensors["b"], torch.arange(7))


def test_files_that_are_removed_stay_for_who_holds_a_tensor(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE})
    digest = files.chunk(("a", 0, COUNT))
    image = files.image()
    held = image.tensors["a"]
    files.store.chunk_path(digest).unlink()
    before = mapped(digest)
    del image
    gc.collect()
    assert before and mapped(digest) == before and torch.equal(held, LARGE)
    del held
    gc.collect()
    assert not mapped(digest)


VIEWS: dict[str, Callable[[VersionImage], object]] = {
    "tensor": lambda image: image.tensor("a"),
    "piece": lambda image: image.tensor_ranges("a")[0].elements.reshape(-1, 2),
    "part": lambda image: image.tensor_parts("a")[0].reshape(-1, 2),
    "slice": lambda image: image.tensor("a")[:],
    "storage": lambda image: torch.empty(0).set_(
        image.tensor("a").untyped_storage(), 0, LARGE.shape, LARGE.stride()
    ),
    "array": lambda image: image.tensor("a").numpy(),
    "buffer": lambda image: memoryview(image.tensor("a").numpy().data),
}


@pytest.mark.rotating(7)
@pytest.mark.parametrize("kind", VIEWS)
def test_whatever_looks_at_it_keeps_it_and_nothing_longer(tmp_path: Path, kind: str) -> None:
    files = Files(tmp_path, {"a": LARGE})
    digest = files.chunk(("a", 0, COUNT))
    held = VIEWS[kind](files.image())
    gc.collect()
    assert mapped(digest) and torch.equal(as_tensor(held), LARGE)
    del held
    gc.collect()
    assert not mapped(digest)


def as_tensor(held: object) -> torch.Tensor:
    return (
        torch.from_numpy(np.asarray(held))
        if isinstance(held, memoryview)
        else torch.as_tensor(held)
    )


LAST_LOOK = """
import gc, sys
from pathlib import Path
import torch
from tests.unit.common.weights.test_version_image import Files, mapped

class Last:
    def __del__(self):
        print(int(self.tensor.sum()), flush=True)

files = Files(Path(sys.argv[1]), {"a": torch.ones(5000)})
digest = files.chunk(("a", 0, 5000))
gc.disable()
last = Last()
last.image = files.image()
last.tensor, last.memory, last.itself = last.image.tensor("a"), last.image._memory, last
del last
assert mapped(digest)
gc.collect()
assert not mapped(digest)
"""


@pytest.mark.deep
@pytest.mark.parametrize("program", [AT_EXIT, LAST_LOOK], ids=["at exit", "in a circle"])
def test_an_image_is_there_for_the_last_that_looks_at_it(tmp_path: Path, program: str) -> None:
    """Until the process ends, and until all objects of a circle have been finalised."""
    root = Path(__file__).parents[4]
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "5000\n"), ended.stderr


def test_addresses_are_given_back_once(tmp_path: Path) -> None:
    """What somebody else has there afterwards stays."""
    files = Files(tmp_path, {"a": LARGE})
    files.chunk(("a", 0, COUNT))
    image = files.image()
    gone, at = image._unmap_finalizer, image.tensor("a").data_ptr()
    del image
    gc.collect()
    assert not gone.alive
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    there = libc.mmap(ctypes.c_void_p(at), ctypes.c_size_t(PAGE_BYTES), 3, flags, -1, 0)
    gone()
    gc.collect()
    ctypes.memset(there, 7, PAGE_BYTES)
    assert libc.munmap(ctypes.c_void_p(there), ctypes.c_size_t(PAGE_BYTES)) == 0


def test_what_could_not_be_mapped_leaves_its_addresses_to_nobody_else(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE})
    path = files.store.chunk_path(digest := files.chunk(("a", 0, COUNT)))
    image = VersionImage(Manifest("job", 0, 0, files.pieces, format=2))
    gone, at = image._unmap_finalizer, image._chunk_address(digest)
    descriptor = os.open(path, os.O_WRONLY)  # which nothing can be mapped by
    try:
        with pytest.raises(MeshError, match="cannot map"):
            image.map_chunk(digest, descriptor)
    finally:
        os.close(descriptor)
    del image
    gc.collect()
    assert not gone.alive and any(low <= at < high for low, high in ranges())


def ranges() -> Iterator[tuple[int, int]]:
    """The addresses of this process that are taken; what lies side by side may be one of them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        yield int(low, 16), int(high, 16)


def sees_ahead() -> bool:
    """Whether this kernel tells of pages that are not there before one looks (Linux 5.14)."""
    with mmap.mmap(-1, PAGE_BYTES) as memory:
        try:
            memory.madvise(22)
        except OSError:
            return False
    return True


TAKEN: dict[str, Callable[[VersionImage], object]] = {
    "tensor": lambda image: image.tensors["a"],
    "pieces": lambda image: image.tensor_ranges("a"),
    "parts": lambda image: image.tensor_parts("a"),
    "copied": lambda image: image.copy_into("a", torch.empty_like(LARGE)),
    "gathered": lambda image: image.load_tensors(["a"]),
}


@pytest.mark.skipif(not sees_ahead(), reason="a kernel that does not tell")
@pytest.mark.parametrize("kind", TAKEN)
def test_a_file_that_somebody_has_cut_meanwhile_kills_nobody(tmp_path: Path, kind: str) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    cut = files.chunk(("a", 0, COUNT))
    files.chunk(("b", 0, 7))
    image = files.image()
    os.truncate(files.store.chunk_path(cut), PAGE_BYTES)
    with pytest.raises(CorruptData, match="cannot be read"):
        TAKEN[kind](image)
    assert torch.equal(image.tensors["b"], torch.arange(7))


def mapped(digest: str) -> int:
    return Path("/proc/self/maps").read_text().count(digest)


def test_what_is_written_to_a_tensor_reaches_no_file(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE})
    digest = files.chunk(("a", 0, COUNT))
    files.image().tensors["a"].zero_()
    assert torch.equal(files.image().tensors["a"], LARGE)
    assert files.store.is_valid(digest)


@pytest.mark.parametrize("harm", ["cut", "longer", "flipped"])
def test_a_file_that_is_not_what_its_name_says_is_found(tmp_path: Path, harm: str) -> None:
    files = Files(tmp_path, {"a": LARGE})
    path = files.store.chunk_path(digest := files.chunk(("a", 0, COUNT)))
    content = path.read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]
    path.write_bytes({"cut": content[:-1], "longer": content + b"!", "flipped": flipped}[harm])
    image = VersionImage(Manifest("job", 0, 0, files.pieces, format=2))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if harm == "flipped":
            image.map_chunk(digest, descriptor)
            assert not image.is_valid(digest)
        else:
            with pytest.raises(CorruptData, match="bytes instead of"):
                image.map_chunk(digest, descriptor)
    finally:
        os.close(descriptor)
