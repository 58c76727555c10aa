"""Image of a version on a host: its mapped chunk files. Tensors are views of them.

The caller maps and verifies each file (`receiver.py`). Removed files stay mapped as long as the
image or one of its tensors exists. Writes to tensors do not reach the files. The addresses are
unmapped once, when the last tensor is gone, because the storage of each tensor references them.

Processes of the mesh never truncate a file. If another program has, access through the image raises
CorruptData instead of killing the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from meshrl.common.api import weights as api
from meshrl.common.base.digest import compute_digest
from meshrl.common.base.errors import CorruptData, MeshError
from meshrl.common.model.files.safetensors_writer import DTYPES
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.manifest import (
    RowRange,
    group_by_tensor,
    read_complete_manifest,
    select_pieces,
)
from meshrl.common.weights.layout.memory_layout import PAGE_BYTES, make_memory_layout

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux's mman.h, which the mmap module does not name
_MADV_POPULATE_READ = 22  # since Linux 5.14; EINVAL before
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class ElementRange:
    """Elements begin .. end of a tensor whose dimension `dim` is outermost: [end - begin]."""

    dim: int
    begin: int
    end: int
    elements: Tensor


class VersionImage:
    """Version, or a selection of its tensors, on this host. Map each chunk before its tensors are
    read.
    """

    def __init__(
        self,
        manifest: api.Manifest,
        digest: str = "",
        selection: Mapping[str, RowRange | None] | None = None,
    ) -> None:
        """Reserve addresses for the image.

        Args:
            selection: Rows by tensor name, None for all rows; without it, the whole version.
        """
        self.manifest, self.digest = manifest, digest
        every = manifest.tensors
        there = every if selection is None else select_pieces(every, selection)
        self._pieces = group_by_tensor(there)
        self._layout = make_memory_layout(every, there)
        self.chunk_sizes: Mapping[str, int] = self._layout.chunk_sizes  # bytes by digest
        self.size_bytes = sum(piece.size_bytes for piece in there)
        self.copied_bytes = 0  # copied from the files, also to assemble tensors
        self.joined_bytes = 0  # of assembled tensors that are not contiguous in memory
        self._copied_chunks: set[str] = set()  # chunks that have no file
        self._memory: ctypes.Array[ctypes.c_uint8] | None = None
        if self._layout.total_bytes:
            # Reserve addresses for the whole image; they are unmapped when the array is freed.
            total, kind = (
                self._layout.total_bytes,
                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            )
            at, unmap = _mmap(None, total, 0, kind, -1), _load_libc().munmap
            self._memory = (ctypes.c_uint8 * total).from_address(at)
            place = ctypes.c_void_p(at), ctypes.c_size_t(total)
            self._unmap_finalizer = weakref.finalize(self._memory, unmap, *place)
            self._unmap_finalizer.atexit = (
                False  # threads may compute with it until the process exits
            )
        self._memory_tensor = (
            torch.empty(0, dtype=torch.uint8)
            if self._memory is None
            else torch.frombuffer(self._memory, dtype=torch.uint8)
        )
        self.meta_tensors: Mapping[str, Tensor] = {
            name: torch.empty(pieces[0].shape, dtype=DTYPES[pieces[0].dtype], device="meta")
            for name, pieces in self._pieces.items()
        }

    @property
    def tensors(self) -> ImageTensors:
        """Tensors of the image by name."""
        return ImageTensors(self)

    def map_chunk(self, digest: str, descriptor: int, where: str = "") -> None:
        """Map the file of a chunk; the descriptor may be closed afterwards.

        Raises:
            CorruptData: The file has another size or cannot be read.
        """
        size, found = self.chunk_sizes[digest], os.fstat(descriptor).st_size
        if found != size:
            raise CorruptData(f"a chunk has {found} bytes instead of {size}", where=where)
        self._map_at_chunk(digest, mmap.MAP_PRIVATE | _MAP_NORESERVE, descriptor)
        self._populate(self._layout.chunk_offsets[digest], size, where)

    def copy_chunk(self, digest: str, content: bytes) -> None:
        """Copy a chunk's bytes into the image, for a chunk that has no file on this host."""
        size = self.chunk_sizes[digest]
        if len(content) != size:
            raise CorruptData(f"a chunk has {len(content)} bytes instead of {size}")
        at = self._map_at_chunk(digest, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._copied_chunks.add(digest)
        ctypes.memmove(at, content, size)

    def _map_at_chunk(self, digest: str, kind: int, descriptor: int) -> int:
        at, size = self._chunk_address(digest), self.chunk_sizes[digest]
        try:
            _mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, descriptor)
        except MeshError:
            # The range may be unmapped now, and another mapping may soon use it:
            # never unmap these addresses.
            self._unmap_finalizer.detach()
            raise
        return at

    def _populate(self, begin: int, size: int, where: str = "") -> None:
        """Raise CorruptData unless these bytes are readable: access to them would kill the
        process.
        """
        assert self._memory is not None
        low = begin // PAGE_BYTES * PAGE_BYTES
        at, length = ctypes.addressof(self._memory) + low, begin + size - low
        if (
            _load_libc().madvise(at, length, _MADV_POPULATE_READ)
            and ctypes.get_errno() != errno.EINVAL
        ):
            why = os.strerror(ctypes.get_errno())
            raise CorruptData(f"a chunk cannot be read: {why}", where=where)

    def is_valid(self, digest: str) -> bool:
        """Return True if the mapped chunk has this digest."""
        begin = self._layout.chunk_offsets[digest]
        mapped = memoryview(self._memory)[begin : begin + self.chunk_sizes[digest]]  # type: ignore[arg-type]
        return compute_digest(mapped) == digest

    def tensor_ranges(self, name: str) -> list[ElementRange]:
        """Return the available ranges of a tensor as views, in element order.

        Raises:
            CorruptData: A file is shorter than it was; so do all functions that return tensors.
        """
        return [
            ElementRange(piece.dim, piece.begin, piece.end, self._view_pieces([piece]))
            for piece in self._pieces[name]
        ]

    def is_contiguous(self, name: str) -> bool:
        """Return True if all of a tensor is available and contiguous."""
        pieces = self._pieces[name]
        return (
            self._is_complete(pieces) and pieces[0].dim == 0 and self._layout.is_contiguous(pieces)
        )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: a view if it is contiguous, else a new copy at each call.

        Raises:
            KeyError: Part of the tensor is missing.
        """
        if not (pieces := self._pieces[name]) or not self._is_complete(pieces):
            raise KeyError(name)
        if self.is_contiguous(name):
            return self._view_pieces(pieces).reshape(pieces[0].shape)
        joined = torch.empty_like(self.meta_tensors[name], device="cpu")
        self.copy_into(name, joined)
        self.joined_bytes += joined.nbytes
        return joined

    def tensor_parts(self, name: str) -> list[Tensor]:
        """Return the elements of a tensor in their order as flat tensors, [n] each.

        They are views, unless the tensor is cut along another dimension than the first.

        Raises:
            KeyError: Part of the tensor is missing.
        """
        pieces = self._pieces[name]
        if self.is_contiguous(name) or not self._is_complete(pieces) or pieces[0].dim:
            return [self.tensor(name).reshape(-1)]
        return [self._view_pieces([piece]) for piece in pieces]

    @torch.no_grad()
    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor, or its available part, into `target` piece by piece.

        `target` has the shape of the tensor, and may have another dtype and device.
        """
        for piece in self.tensor_ranges(name):
            _copy_piece(target, piece)
            self.copied_bytes += piece.elements.nbytes

    def load_tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these tensors after dropping all other file pages from this process's memory."""
        for digest in self.chunk_sizes.keys() - self._copied_chunks:
            self.release_pages(digest)
        return {name: self.tensor(name) for name in names}

    def release_pages(self, digest: str) -> None:
        """Drop a file's pages from this process's memory until the next access."""
        _load_libc().madvise(
            self._chunk_address(digest), self.chunk_sizes[digest], mmap.MADV_DONTNEED
        )

    def _chunk_address(self, digest: str) -> int:
        assert self._memory is not None
        return ctypes.addressof(self._memory) + self._layout.chunk_offsets[digest]

    def _is_complete(self, pieces: list[api.TensorPiece]) -> bool:
        return sum(piece.end - piece.begin for piece in pieces) == math.prod(pieces[0].shape)

    def _view_pieces(self, pieces: list[api.TensorPiece]) -> Tensor:
        dtype = DTYPES[pieces[0].dtype]
        filled = [piece for piece in pieces if piece.size_bytes]
        if not filled:
            return torch.empty(0, dtype=dtype)
        begin, size = (
            self._layout.piece_offset(filled[0]),
            sum(piece.size_bytes for piece in filled),
        )
        self._populate(begin, size, f"version {self.manifest.version} of {self.manifest.job}")
        content = self._memory_tensor[begin : begin + size]
        return (content if begin % dtype.itemsize == 0 else content.clone()).view(dtype)


def open_verified_image(chunks: ChunkStore, digest: str) -> VersionImage:
    """Return the image of a version whose files are all in one store, after hashing each.

    Args:
        digest: Digest of the version's manifest.
    Raises:
        NotFound: A chunk or manifest is missing.
        CorruptData: A chunk does not have its digest.
    """
    manifest = read_complete_manifest(chunks.read, digest)
    image = VersionImage(manifest, digest)
    for chunk in image.chunk_sizes:
        with chunks.open(chunk) as file:
            image.map_chunk(chunk, file.fileno(), file.name)
        if not image.is_valid(chunk):
            raise CorruptData("a chunk does not match its digest", where=file.name)
    return image


class ImageTensors(Mapping[str, Tensor]):
    """Tensors of an image by name. Item access copies tensors that are not contiguous; `copy_into`
    copies once.
    """

    def __init__(self, image: VersionImage) -> None:
        self._image = image

    @property
    def meta_tensors(self) -> Mapping[str, Tensor]:
        """Dtypes and shapes as tensors on the `meta` device."""
        return self._image.meta_tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._image.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._image.meta_tensors)

    def __len__(self) -> int:
        return len(self._image.meta_tensors)

    def tensor_parts(self, name: str) -> list[Tensor]:
        """Return the elements of a tensor in their order, [n] each, as views where possible."""
        return self._image.tensor_parts(name)

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor from the files into `target` of the same shape, once."""
        self._image.copy_into(name, target)


def load_tensor(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copy the tensor `name` into `target`, which has its shape. KeyError: no such tensor."""
    if isinstance(tensors, ImageTensors):
        tensors.copy_into(name, target)
    else:
        target.copy_(tensors[name])


def list_tensor_parts(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """Return the elements of the tensor `name` in their order, [n] each, as views where
    possible.
    """
    if isinstance(tensors, ImageTensors):
        return tensors.tensor_parts(name)
    return [tensors[name].reshape(-1)]


def get_meta_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors for reading dtypes and shapes only; no tensor is assembled for that."""
    return tensors.meta_tensors if isinstance(tensors, ImageTensors) else tensors


def _copy_piece(target: Tensor, piece: ElementRange) -> None:
    laid = target.movedim(piece.dim, 0) if target.dim() and piece.dim else target
    if laid.is_contiguous():
        laid.view(-1)[piece.begin : piece.end].copy_(piece.elements)
        return
    width = laid.numel() // len(laid)  # elements of a row
    begin, content = piece.begin, piece.elements
    while len(content):  # one row, or as many complete rows as there are
        row, column = divmod(begin, width)
        rows = 0 if column else len(content) // width
        count = rows * width or min(width - column, len(content))
        part = content[:count]
        if rows:
            laid[row : row + rows].copy_(part.reshape(rows, *laid.shape[1:]))
        else:
            flat = laid[row].reshape(-1).clone()  # a row may not be contiguous
            flat[column : column + count] = part.to(flat)
            laid[row].copy_(flat.view(laid[row].shape))
        begin, content = begin + count, content[count:]


def _mmap(address: int | None, size_bytes: int, protection: int, kind: int, descriptor: int) -> int:
    found: int = _load_libc().mmap(address, size_bytes, protection, kind, descriptor, 0)
    if found == _MAP_FAILED:
        why = os.strerror(ctypes.get_errno())
        raise MeshError(f"cannot map {size_bytes} bytes of weights: {why}")
    return found


@cache
def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
