"""Image of a version: chunk files mapped side by side, with tensors as views of them."""

from __future__ import annotations

import ctypes
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
    """Chunk files below a directory, and the pieces of their manifest."""

    def __init__(self, root: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.store, self.tensors = ChunkStore(root), tensors
        self.pieces: list[TensorPiece] = []

    def add_chunk(self, *cuts: Cut, dim: int = 0) -> str:
        """Write pieces one after the other into a chunk and return its digest."""
        flattened = {
            name: tensor.movedim(dim, 0).reshape(-1) for name, tensor in self.tensors.items()
        }
        parts = [flattened[name][begin:end].contiguous() for name, begin, end in cuts]
        content = b"".join(bytes(part.view(torch.uint8).numpy()) for part in parts)
        digest, offset = self.store.write(content), 0
        for (name, begin, end), part in zip(cuts, parts, strict=True):
            tensor = self.tensors[name]
            metadata = DTYPE_NAMES[tensor.dtype], list(tensor.shape), digest, offset, part.nbytes
            self.pieces.append(TensorPiece(name, *metadata, dim, begin, end))
            offset += part.nbytes
        return digest

    def map_image(self, selection: dict[str, RowRange | None] | None = None) -> VersionImage:
        image = VersionImage(Manifest("job", 0, 0, self.pieces, format=2), selection=selection)
        for digest in image.chunk_sizes:
            with self.store.chunk_path(digest).open("rb") as file:
                image.map_chunk(digest, file.fileno())
                assert image.is_valid(digest)
        return image


AT_EXIT = """
import atexit, sys
from pathlib import Path

held = []
# The callback registered first runs last, as threads do.
atexit.register(lambda: print(int(held[0].tensors["a"].sum()), flush=True))
import torch
from tests.unit.common.weights.test_version_image import Files

files = Files(Path(sys.argv[1]), {"a": torch.ones(5000)})
files.add_chunk(("a", 0, 5000))
held.append(files.map_image())
"""


PAGE_FLOATS = PAGE_BYTES // 4
LARGE = torch.arange(5 * PAGE_FLOATS // 2, dtype=torch.float32).reshape(-1, 2)
COUNT = LARGE.numel()


def test_tensor_cut_at_pages_is_one_view_of_several_files(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    files.add_chunk(("a", 0, PAGE_FLOATS))
    files.add_chunk(("a", PAGE_FLOATS, 2 * PAGE_FLOATS))
    files.add_chunk(("a", 2 * PAGE_FLOATS, COUNT), ("b", 0, 7))
    image = files.map_image()
    assert image.is_contiguous("a") and image.is_contiguous("b")
    assert torch.equal(image.tensors["a"], LARGE) and torch.equal(
        image.tensors["b"], torch.arange(7)
    )
    first, *_, last = image.tensor_ranges("a")
    assert image.tensors["a"].data_ptr() == first.elements.data_ptr()
    assert last.elements.data_ptr() - first.elements.data_ptr() == 2 * PAGE_BYTES
    assert image.joined_bytes == 0 and image.size_bytes == LARGE.nbytes + 7 * 8


@pytest.mark.parametrize("at", [PAGE_FLOATS - 2, 3, PAGE_FLOATS])
def test_non_contiguous_tensor_is_joined_from_its_pieces(tmp_path: Path, at: int) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    files.add_chunk(("a", 0, at))
    files.add_chunk(("b", 0, 7), ("a", at, COUNT))
    image = files.map_image()
    assert not image.is_contiguous("a")
    target = torch.zeros_like(LARGE)
    load_tensor(image.tensors, "a", target)
    assert torch.equal(target, LARGE) and image.joined_bytes == 0
    assert torch.equal(image.tensors["a"], LARGE) and image.copied_bytes == 2 * LARGE.nbytes
    assert image.joined_bytes == LARGE.nbytes


def test_duplicate_chunks_are_stored_once(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": torch.ones(3 * PAGE_FLOATS), "b": torch.ones(PAGE_FLOATS)})
    for begin in range(3):
        files.add_chunk(("a", begin * PAGE_FLOATS, (begin + 1) * PAGE_FLOATS))
    files.add_chunk(("b", 0, PAGE_FLOATS))
    image = files.map_image()
    assert len(image.chunk_sizes) == 1
    assert all(torch.equal(image.tensors[name], files.tensors[name]) for name in "ab")


def test_tensors_of_any_width_and_empty_ones_are_read_back(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(7.0),
    }
    files = Files(tmp_path, tensors)
    files.add_chunk(*((name, 0, tensor.numel()) for name, tensor in tensors.items()))
    image = files.map_image()
    for name, tensor in tensors.items():
        assert torch.equal(image.tensors[name], tensor)
        assert image.tensors[name].shape == tensor.shape


@pytest.mark.parametrize("contiguous", [True, False])
def test_columns_of_ranks_are_joined(tmp_path: Path, contiguous: bool) -> None:
    expected = torch.arange(6 * 10, dtype=torch.float32).reshape(6, 10)
    files = Files(tmp_path, {"a": expected})
    files.add_chunk(("a", 0, 25), dim=1)  # in the middle of a column
    files.add_chunk(("a", 25, 60), dim=1)
    image = files.map_image()
    target = torch.zeros(6, 10) if contiguous else torch.zeros(10, 6).T
    image.copy_into("a", target)
    assert torch.equal(target, expected) and torch.equal(image.tensors["a"], expected)


def test_row_selection_maps_only_its_chunks(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    first = files.add_chunk(("a", 0, PAGE_FLOATS))
    files.add_chunk(("a", PAGE_FLOATS, COUNT))
    last = files.add_chunk(("b", 0, 7))
    image = files.map_image({"a": RowRange(0, 0, 3), "b": None})
    assert set(image.chunk_sizes) == {first, last}
    assert torch.equal(image.tensor_ranges("a")[0].elements[:6].reshape(3, 2), LARGE[:3])
    with pytest.raises(KeyError):
        image.tensors["a"]
    assert torch.equal(image.tensors["b"], torch.arange(7))


def test_deleted_files_stay_mapped_while_a_tensor_exists(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE})
    digest = files.add_chunk(("a", 0, COUNT))
    image = files.map_image()
    view = image.tensors["a"]
    files.store.chunk_path(digest).unlink()
    count_before = count_mappings(digest)
    del image
    assert count_before and count_mappings(digest) == count_before and torch.equal(view, LARGE)
    del view
    assert not count_mappings(digest)


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
def test_image_stays_mapped_as_long_as_any_view(tmp_path: Path, kind: str) -> None:
    files = Files(tmp_path, {"a": LARGE})
    digest = files.add_chunk(("a", 0, COUNT))
    view = VIEWS[kind](files.map_image())
    assert count_mappings(digest) and torch.equal(as_tensor(view), LARGE)
    del view
    assert not count_mappings(digest)


def as_tensor(view: object) -> torch.Tensor:
    return (
        torch.from_numpy(np.asarray(view))
        if isinstance(view, memoryview)
        else torch.as_tensor(view)
    )


IN_FINALIZER = """
import gc, sys
from pathlib import Path
import torch
from tests.unit.common.weights.test_version_image import Files, count_mappings

class Last:
    def __del__(self):
        print(int(self.tensor.sum()), flush=True)

files = Files(Path(sys.argv[1]), {"a": torch.ones(5000)})
digest = files.add_chunk(("a", 0, 5000))
gc.disable()
last = Last()
last.image = files.map_image()
last.tensor, last.memory, last.itself = last.image.tensor("a"), last.image._memory, last
del last
assert count_mappings(digest)
gc.collect()
assert not count_mappings(digest)
"""


@pytest.mark.deep
@pytest.mark.parametrize("program", [AT_EXIT, IN_FINALIZER], ids=["at exit", "in a circle"])
def test_image_is_readable_in_exit_handlers_and_finalizers(tmp_path: Path, program: str) -> None:
    root = Path(__file__).parents[4]
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "5000\n"), result.stderr


def test_addresses_are_unmapped_once(tmp_path: Path) -> None:
    """Check that the finalizer unmaps nothing that was mapped there later."""
    files = Files(tmp_path, {"a": LARGE})
    files.add_chunk(("a", 0, COUNT))
    image = files.map_image()
    finalizer, address = image._unmap_finalizer, image.tensor("a").data_ptr()
    del image
    assert not finalizer.alive
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE_BYTES), 3, flags, -1, 0)
    finalizer()
    ctypes.memset(mapping, 7, PAGE_BYTES)
    assert libc.munmap(ctypes.c_void_p(mapping), ctypes.c_size_t(PAGE_BYTES)) == 0


def test_failed_mapping_keeps_its_addresses_reserved(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE})
    path = files.store.chunk_path(digest := files.add_chunk(("a", 0, COUNT)))
    image = VersionImage(Manifest("job", 0, 0, files.pieces, format=2))
    finalizer, address = image._unmap_finalizer, image._chunk_address(digest)
    descriptor = os.open(path, os.O_WRONLY)  # a descriptor that cannot be mapped
    try:
        with pytest.raises(MeshError, match="cannot map"):
            image.map_chunk(digest, descriptor)
    finally:
        os.close(descriptor)
    del image
    assert not finalizer.alive and any(low <= address < high for low, high in list_mappings())


def list_mappings() -> Iterator[tuple[int, int]]:
    """Yield the mapped address ranges of this process; adjacent mappings may be joined."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        yield int(low, 16), int(high, 16)


def can_detect_missing_pages() -> bool:
    """Return True if this kernel reports pages that cannot be read (Linux 5.14)."""
    with mmap.mmap(-1, PAGE_BYTES) as memory:
        try:
            memory.madvise(22)
        except OSError:
            return False
    return True


READS: dict[str, Callable[[VersionImage], object]] = {
    "tensor": lambda image: image.tensors["a"],
    "pieces": lambda image: image.tensor_ranges("a"),
    "parts": lambda image: image.tensor_parts("a"),
    "copied": lambda image: image.copy_into("a", torch.empty_like(LARGE)),
    "gathered": lambda image: image.load_tensors(["a"]),
}


@pytest.mark.skipif(not can_detect_missing_pages(), reason="a kernel that does not tell")
@pytest.mark.parametrize("kind", READS)
def test_file_truncated_after_mapping_raises_an_error(tmp_path: Path, kind: str) -> None:
    files = Files(tmp_path, {"a": LARGE, "b": torch.arange(7)})
    cut = files.add_chunk(("a", 0, COUNT))
    files.add_chunk(("b", 0, 7))
    image = files.map_image()
    os.truncate(files.store.chunk_path(cut), PAGE_BYTES)
    with pytest.raises(CorruptData, match="cannot be read"):
        READS[kind](image)
    assert torch.equal(image.tensors["b"], torch.arange(7))


def count_mappings(digest: str) -> int:
    return Path("/proc/self/maps").read_text().count(digest)


def test_writes_to_a_tensor_do_not_reach_the_file(tmp_path: Path) -> None:
    files = Files(tmp_path, {"a": LARGE})
    digest = files.add_chunk(("a", 0, COUNT))
    files.map_image().tensors["a"].zero_()
    assert torch.equal(files.map_image().tensors["a"], LARGE)
    assert files.store.is_valid(digest)


@pytest.mark.parametrize("harm", ["cut", "longer", "flipped"])
def test_file_that_differs_from_its_digest_is_detected(tmp_path: Path, harm: str) -> None:
    files = Files(tmp_path, {"a": LARGE})
    path = files.store.chunk_path(digest := files.add_chunk(("a", 0, COUNT)))
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
