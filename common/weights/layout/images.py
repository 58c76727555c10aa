"""The image of a version on a host: its chunk files, mapped. Its tensors are views of them.

Whoever makes one maps each file and sees that it is right (`receive.py`). Files that are removed
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
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import Damaged, MeshError
from meshrl.common.model.files.safetensors_file import DTYPES
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.layout.layout import PAGE, laid_out
from meshrl.common.weights.layout.manifest import Rows, by_tensor, overlapping, read_whole

_FIXED, _NO_RESERVE = 0x10, 0x4000  # of Linux's mman.h, which the mmap module does not name
_POPULATE_READ = 22  # since Linux 5.14; EINVAL before
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Piece:
    """Elements begin .. end of a tensor laid out with dimension `dim` outermost: [end - begin]."""

    dim: int
    begin: int
    end: int
    content: Tensor


class Image:
    """A version, or what is wanted of one, on this host. Nothing may be looked at before its chunk
    is mapped.
    """

    def __init__(
        self,
        manifest: api.Manifest,
        digest: str = "",
        wanted: Mapping[str, Rows | None] | None = None,
    ) -> None:
        """`wanted`: rows by tensor, None for all of one; without it, the whole version."""
        self.manifest, self.digest = manifest, digest
        every = manifest.tensors
        there = every if wanted is None else overlapping(every, wanted)
        self._pieces = by_tensor(there)
        self._layout = laid_out(every, there)
        self.chunks: Mapping[str, int] = self._layout.sizes  # bytes by digest
        self.bytes = sum(piece.size for piece in there)
        self.copied_bytes = 0  # from the files, also to put tensors together
        self.joined_bytes = 0  # of tensors that do not lie in one piece, and were put together
        self._held: set[str] = set()  # those of which there is no file
        self._memory: ctypes.Array[ctypes.c_uint8] | None = None
        if self._layout.total:
            # Addresses for all of it, which are given back when nobody has the array any more.
            total, kind = self._layout.total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            at, unmap = _map(None, total, 0, kind, -1), _libc().munmap
            self._memory = (ctypes.c_uint8 * total).from_address(at)
            place = ctypes.c_void_p(at), ctypes.c_size_t(total)
            self._given_back = weakref.finalize(self._memory, unmap, *place)
            self._given_back.atexit = False  # threads that compute with it run until the end
        self._flat = (
            torch.empty(0, dtype=torch.uint8)
            if self._memory is None
            else torch.frombuffer(self._memory, dtype=torch.uint8)
        )
        self.outline: Mapping[str, Tensor] = {
            name: torch.empty(pieces[0].shape, dtype=DTYPES[pieces[0].dtype], device="meta")
            for name, pieces in self._pieces.items()
        }

    @property
    def tensors(self) -> Tensors:
        """All of them by name."""
        return Tensors(self)

    def map(self, digest: str, descriptor: int, where: str = "") -> None:
        """Takes the file of a chunk, which may be closed then. Damaged: it has another size, or
        cannot be read.
        """
        size, found = self.chunks[digest], os.fstat(descriptor).st_size
        if found != size:
            raise Damaged(f"a chunk has {found} bytes instead of {size}", where=where)
        self._place(digest, mmap.MAP_PRIVATE | _NO_RESERVE, descriptor)
        self._see(self._layout.begins[digest], size, where)

    def hold(self, digest: str, content: bytes) -> None:
        """Takes a copy of a chunk's bytes, of which this host keeps no file."""
        size = self.chunks[digest]
        if len(content) != size:
            raise Damaged(f"a chunk has {len(content)} bytes instead of {size}")
        at = self._place(digest, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._held.add(digest)
        ctypes.memmove(at, content, size)

    def _place(self, digest: str, kind: int, descriptor: int) -> int:
        at, size = self._at(digest), self.chunks[digest]
        try:
            _map(at, size, mmap.PROT_READ | mmap.PROT_WRITE, kind | _FIXED, descriptor)
        except MeshError:
            # There may be nothing at all in its place now, or soon what somebody else maps there:
            # these addresses stay this image's for ever.
            self._given_back.detach()
            raise
        return at

    def _see(self, begin: int, size: int, where: str = "") -> None:
        """Damaged unless these bytes are there: whoever looked at them would be killed."""
        assert self._memory is not None
        low = begin // PAGE * PAGE
        at, length = ctypes.addressof(self._memory) + low, begin + size - low
        if _libc().madvise(at, length, _POPULATE_READ) and ctypes.get_errno() != errno.EINVAL:
            why = os.strerror(ctypes.get_errno())
            raise Damaged(f"a chunk cannot be read: {why}", where=where)

    def right(self, digest: str) -> bool:
        """Whether the chunk that is mapped has this digest."""
        begin = self._layout.begins[digest]
        mapped = memoryview(self._memory)[begin : begin + self.chunks[digest]]  # type: ignore[arg-type]
        return digest_of(mapped) == digest

    def pieces(self, name: str) -> list[Piece]:
        """What is there of a tensor, as views, in the order of its elements. Damaged, as from all
        that gives tensors: a file is shorter than it was.
        """
        return [
            Piece(piece.dim, piece.begin, piece.end, self._view([piece]))
            for piece in self._pieces[name]
        ]

    def whole(self, name: str) -> bool:
        """Whether all of a tensor is there, and lies in one piece."""
        pieces = self._pieces[name]
        return self._complete(pieces) and pieces[0].dim == 0 and self._layout.follow(pieces)

    def tensor(self, name: str) -> Tensor:
        """A tensor: a view where it lies in one piece, else put together each time. KeyError when
        not all of it is there.
        """
        if not (pieces := self._pieces[name]) or not self._complete(pieces):
            raise KeyError(name)
        if self.whole(name):
            return self._view(pieces).reshape(pieces[0].shape)
        joined = torch.empty_like(self.outline[name], device="cpu")
        self.copy_into(name, joined)
        self.joined_bytes += joined.nbytes
        return joined

    def parts(self, name: str) -> list[Tensor]:
        """The elements of a tensor in their order, [n] each: views, unless it was cut along another
        dimension than the first. KeyError when not all of it is there.
        """
        pieces = self._pieces[name]
        if self.whole(name) or not self._complete(pieces) or pieces[0].dim:
            return [self.tensor(name).reshape(-1)]
        return [self._view([piece]) for piece in pieces]

    @torch.no_grad()
    def copy_into(self, name: str, target: Tensor) -> None:
        """Copies a tensor, or what is there of it, piece by piece. `target` has its shape, and may
        have another type and lie on another device.
        """
        for piece in self.pieces(name):
            _into(target, piece)
            self.copied_bytes += piece.content.nbytes

    def gathered(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, of which alone files are in this process's memory then."""
        for digest in self.chunks.keys() - self._held:
            self.give_back(digest)
        return {name: self.tensor(name) for name in names}

    def give_back(self, digest: str) -> None:
        """Takes a file out of this process's memory until it is looked at again."""
        _libc().madvise(self._at(digest), self.chunks[digest], mmap.MADV_DONTNEED)

    def _at(self, digest: str) -> int:
        assert self._memory is not None
        return ctypes.addressof(self._memory) + self._layout.begins[digest]

    def _complete(self, pieces: list[api.Tensor]) -> bool:
        return sum(piece.end - piece.begin for piece in pieces) == math.prod(pieces[0].shape)

    def _view(self, pieces: list[api.Tensor]) -> Tensor:
        dtype = DTYPES[pieces[0].dtype]
        filled = [piece for piece in pieces if piece.size]
        if not filled:
            return torch.empty(0, dtype=dtype)
        begin, size = self._layout.begin(filled[0]), sum(piece.size for piece in filled)
        self._see(begin, size, f"version {self.manifest.version} of {self.manifest.job}")
        content = self._flat[begin : begin + size]
        return (content if begin % dtype.itemsize == 0 else content.clone()).view(dtype)


def opened(chunks: ChunkStore, digest: str) -> Image:
    """The image of a version whose files are all in one place, hashed anew, by its manifest's
    digest; NotFound, Damaged.
    """
    manifest = read_whole(chunks.read, digest)
    image = Image(manifest, digest)
    for chunk in image.chunks:
        with chunks.open(chunk) as file:
            image.map(chunk, file.fileno(), file.name)
        if not image.right(chunk):
            raise Damaged("a chunk is not what its name says", where=file.name)
    return image


class Tensors(Mapping[str, Tensor]):
    """An image's tensors by name. Look-ups of those that do not lie in one piece copy them; `load`
    does not.
    """

    def __init__(self, image: Image) -> None:
        self._image = image

    @property
    def outline(self) -> Mapping[str, Tensor]:
        """Types and shapes."""
        return self._image.outline

    def __getitem__(self, name: str) -> Tensor:
        return self._image.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._image.outline)

    def __len__(self) -> int:
        return len(self._image.outline)

    def parts(self, name: str) -> list[Tensor]:
        """The elements of a tensor in their order, [n] each, where they lie."""
        return self._image.parts(name)

    def load(self, name: str, target: Tensor) -> None:
        """Copies a tensor from the files into one of its shape, once."""
        self._image.copy_into(name, target)


def load_tensor(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copies one of some tensors into `target`, which has its shape. KeyError: there is none."""
    if isinstance(tensors, Tensors):
        tensors.load(name, target)
    else:
        target.copy_(tensors[name])


def parts_of(tensors: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """The elements of one of some tensors in their order, [n] each, where they lie."""
    if isinstance(tensors, Tensors):
        return tensors.parts(name)
    return [tensors[name].reshape(-1)]


def outline(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors to look at types and shapes of, none of which is put together for that."""
    return tensors.outline if isinstance(tensors, Tensors) else tensors


def _into(target: Tensor, piece: Piece) -> None:
    laid = target.movedim(piece.dim, 0) if target.dim() and piece.dim else target
    if laid.is_contiguous():
        laid.view(-1)[piece.begin : piece.end].copy_(piece.content)
        return
    width = laid.numel() // len(laid)  # elements of a row
    begin, content = piece.begin, piece.content
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


def _map(at: int | None, size: int, protection: int, kind: int, descriptor: int) -> int:
    found: int = _libc().mmap(at, size, protection, kind, descriptor, 0)
    if found == _FAILED:
        why = os.strerror(ctypes.get_errno())
        raise MeshError(f"cannot map {size} bytes of weights: {why}")
    return found


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
