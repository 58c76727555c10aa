"""The image of a version on a host: its chunk files, mapped. Its tensors are views of them.

Whoever makes one maps each file and sees that it is right (`receiver.py`). Files that are removed
meanwhile stay as long as somebody has the image or one of its tensors; what is written to tensors
reaches no file. The addresses are given back once, when the last tensor is gone: each holds them by
its storage, so nothing can look at them after that.

Nobody who belongs to the mesh makes a file shorter. Where somebody else has, whoever takes a tensor
is told so, instead of being killed as it looks there.
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
    """Elements begin .. end of a tensor laid out with dimension `dim` outermost: [end - begin]."""

    dim: int
    begin: int
    end: int
    elements: Tensor


class VersionImage:
    """A version, or what is wanted of one, on this host. Nothing may be looked at before its chunk
    is mapped.
    """

    def __init__(
        self,
        manifest: api.Manifest,
        digest: str = "",
        selection: Mapping[str, RowRange | None] | None = None,
    ) -> None:
        """`selection`: rows by tensor, None for all of one; without it, the whole version."""
        self.manifest, self.digest = manifest, digest
        every = manifest.tensors
        there = every if selection is None else select_pieces(every, selection)
        self._pieces = group_by_tensor(there)
        self._layout = make_memory_layout(every, there)
        self.chunk_sizes: Mapping[str, int] = self._layout.chunk_sizes  # bytes by digest
        self.size_bytes = sum(piece.size for piece in there)
        self.copied_bytes = 0  # from the files, also to put tensors together
        self.joined_bytes = 0  # of tensors that do not lie in one piece, and were put together
        self._copied_chunks: set[str] = set()  # those of which there is no file
        self._memory: ctypes.Array[ctypes.c_uint8] | None = None
        if self._layout.total_bytes:
            # Addresses for all of it, which are given back when nobody has the array any more.
            total, kind = (
                self._layout.total_bytes,
                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            )
            at, unmap = _mmap(None, total, 0, kind, -1), _load_libc().munmap
            self._memory = (ctypes.c_uint8 * total).from_address(at)
            place = ctypes.c_void_p(at), ctypes.c_size_t(total)
            self._unmap_finalizer = weakref.finalize(self._memory, unmap, *place)
            self._unmap_finalizer.atexit = False  # threads that compute with it run until the end
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
        """All of them by name."""
        return ImageTensors(self)

    def map_chunk(self, digest: str, descriptor: int, where: str = "") -> None:
        """Takes the file of a chunk, which may be closed then. Damaged: it has another size, or
        cannot be read.
        """
        size, found = self.chunk_sizes[digest], os.fstat(descriptor).st_size
        if found != size:
            raise CorruptData(f"a chunk has {found} bytes instead of {size}", where=where)
        self._map_at_chunk(digest, mmap.MAP_PRIVATE | _MAP_NORESERVE, descriptor)
        self._populate(self._layout.chunk_offsets[digest], size, where)

    def copy_chunk(self, digest: str, content: bytes) -> None:
        """Takes a copy of a chunk's bytes, of which this host keeps no file."""
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
            # There may be nothing at all in its place now, or soon what somebody else maps there:
            # these addresses stay this image's for ever.
            self._unmap_finalizer.detach()
            raise
        return at

    def _populate(self, begin: int, size: int, where: str = "") -> None:
        """Damaged unless these bytes are there: whoever looked at them would be killed."""
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
        """Whether the chunk that is mapped has this digest."""
        begin = self._layout.chunk_offsets[digest]
        mapped = memoryview(self._memory)[begin : begin + self.chunk_sizes[digest]]  # type: ignore[arg-type]
        return compute_digest(mapped) == digest

    def tensor_ranges(self, name: str) -> list[ElementRange]:
        """What is there of a tensor, as views, in the order of its elements. Damaged, as from all
        that gives tensors: a file is shorter than it was.
        """
        return [
            ElementRange(piece.dim, piece.begin, piece.end, self._view_pieces([piece]))
            for piece in self._pieces[name]
        ]

    def is_contiguous(self, name: str) -> bool:
        """Whether all of a tensor is there, and lies in one piece."""
        pieces = self._pieces[name]
        return (
            self._is_complete(pieces) and pieces[0].dim == 0 and self._layout.is_contiguous(pieces)
        )

    def tensor(self, name: str) -> Tensor:
        """A tensor: a view where it lies in one piece, else put together each time. KeyError when
        not all of it is there.
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
        """The elements of a tensor in their order, [n] each: views, unless it was cut along another
        dimension than the first. KeyError when not all of it is there.
        """
        pieces = self._pieces[name]
        if self.is_contiguous(name) or not self._is_complete(pieces) or pieces[0].dim:
            return [self.tensor(name).reshape(-1)]
        return [self._view_pieces([piece]) for piece in pieces]

    @torch.no_grad()
    def copy_into(self, name: str, target: Tensor) -> None:
        """Copies a tensor, or what is there of it, piece by piece. `target` has its shape, and may
        have another type and lie on another device.
        """
        for piece in self.tensor_ranges(name):
            _copy_piece(target, piece)
            self.copied_bytes += piece.elements.nbytes

    def load_tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, of which alone files are in this process's memory then."""
        for digest in self.chunk_sizes.keys() - self._copied_chunks:
            self.release_pages(digest)
        return {name: self.tensor(name) for name in names}

    def release_pages(self, digest: str) -> None:
        """Takes a file out of this process's memory until it is looked at again."""
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
        filled = [piece for piece in pieces if piece.size]
        if not filled:
            return torch.empty(0, dtype=dtype)
        begin, size = self._layout.piece_offset(filled[0]), sum(piece.size for piece in filled)
        self._populate(begin, size, f"version {self.manifest.version} of {self.manifest.job}")
        content = self._memory_tensor[begin : begin + size]
        return (content if begin % dtype.itemsize == 0 else content.clone()).view(dtype)


def open_verified_image(chunks: ChunkStore, digest: str) -> VersionImage:
    """The image of a version whose files are all in one place, hashed anew, by its manifest's
    digest; NotFound, Damaged.
    """
    manifest = read_complete_manifest(chunks.read, digest)
    image = VersionImage(manifest, digest)
    for chunk in image.chunk_sizes:
        with chunks.open(chunk) as file:
            image.map_chunk(chunk, file.fileno(), file.name)
        if not image.is_valid(chunk):
            raise CorruptData("a chunk is not what its name says", where=file.name)
    return image


class ImageTensors(Mapping[str, Tensor]):
    """An image's tensors by name. Look-ups of those that do not lie in one piece copy them; `load`
    does not.
    """

    def __init__(self, image: VersionImage) -> None:
        self._image = image

    @property
    def meta_tensors(self) -> Mapping[str, Tensor]:
        """Types and shapes."""
        return self._image.meta_tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._image.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._image.meta_tensors)

    def __len__(self) -> int:
        return len(self._image.meta_tensors)

    def tensor_parts(self, name: str) -> list[Tensor]:
        """The elements of a tensor in their order, [n] each, where they lie."""
        return self._image.tensor_parts(name)

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copies a tensor from the files into one of its shape, once."""
        self._image.copy_into(name, target)


def load_tensor(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copies one of some tensors into `target`, which has its shape. KeyError: there is none."""
    if isinstance(tensors, ImageTensors):
        tensors.copy_into(name, target)
    else:
        target.copy_(tensors[name])


def list_tensor_parts(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """The elements of one of some tensors in their order, [n] each, where they lie."""
    if isinstance(tensors, ImageTensors):
        return tensors.tensor_parts(name)
    return [tensors[name].reshape(-1)]


def get_meta_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors to look at types and shapes of, none of which is put together for that."""
    return tensors.meta_tensors if isinstance(tensors, ImageTensors) else tensors


def _copy_piece(target: Tensor, piece: ElementRange) -> None:
    laid = target.movedim(piece.dim, 0) if target.dim() and piece.dim else target
    if laid.is_contiguous():
        laid.view(-1)[piece.begin : piece.end].copy_(piece.elements)
        return
    width = laid.numel() // len(laid)  # elements of a row
    begin, content = piece.begin, piece.elements
    while len(content):  # a row, or as many whole ones as there are
        row, column = divmod(begin, width)
        rows = 0 if column else len(content) // width
        count = rows * width or min(width - column, len(content))
        part = content[:count]
        if rows:
            laid[row : row + rows].copy_(part.reshape(rows, *laid.shape[1:]))
        else:
            flat = laid[row].reshape(-1).clone()  # a row need not be contiguous
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
