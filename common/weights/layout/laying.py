"""Lays rows of weights into chunks: casts them to the type that is published, and adds up what they
are to the identities of the image and of the masters. It blocks, and knows no store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.common.api.weights import Tensor
from meshrl.common.model.files.safetensors_file import DTYPES
from meshrl.common.model.files.source import nbytes
from meshrl.common.model.files.storages import lent
from meshrl.common.model.network.lora import is_adapter
from meshrl.common.weights.layout.identity import Tree, Trees
from meshrl.common.weights.layout.manifest import chunk_bytes

BLOCK_BYTES = 8 << 20  # of masters that are cast, hashed and copied at a time: about a core's cache


@dataclass(frozen=True)
class Part:
    """Rows of a tensor of `shape`, from row `first` on, as whoever trains them has them."""

    shape: tuple[int, ...]
    first: int
    rows: torch.Tensor

    def slice(self, part: int, parts: int) -> Part:
        """Part number `part` of these rows, cut into so many."""
        if parts == 1 or not self.rows.dim():
            return self if part == 0 else Part(self.shape, self.first, self.rows.reshape(-1)[:0])
        count = len(self.rows)
        low, high = count * part // parts, count * (part + 1) // parts
        return Part(self.shape, self.first + low, self.rows[low:high])


@dataclass(frozen=True)
class How:
    """How rows are staged."""

    dtype: str  # safetensors' name of the type that is published
    chunk_bytes: int  # most that a chunk has
    write: bool = True  # False: it is only told what would lie where


@dataclass(frozen=True)
class Laid:
    """Rows that a process has staged: where they lie, and their parts of the identities of the
    published image and of the masters, packed, by tensor.
    """

    pieces: list[Tensor] = field(default_factory=list)
    image: dict[str, bytes] = field(default_factory=dict)
    masters: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Chunk:
    """One that is full; its pieces do not have its digest yet."""

    content: memoryview
    pieces: list[Tensor]


class Laying:
    """Lays rows into chunks in the order in which they come. It blocks."""

    def __init__(self, how: How) -> None:
        self._how, self._dtype = how, DTYPES[how.dtype]
        self._image: Trees = {}
        self._masters: Trees = {}
        self._adapters = False  # whether the chunk that is being filled has adapters
        self._begin()

    def _begin(self) -> None:
        self._content: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._filled = 0
        self._pieces: list[Tensor] = []

    @torch.no_grad()
    def add(self, parts: Mapping[str, Part]) -> list[Chunk]:
        """The chunks that are full now. Adapters never lie in one with what they are added to."""
        full: list[Chunk] = []
        for name, part in parts.items():
            if is_adapter(name) != self._adapters:
                full += self.rest()
                self._adapters = is_adapter(name)
            full += self._add(name, part)
        return full

    def rest(self) -> list[Chunk]:
        """The chunk that is not full, if there is anything in it."""
        pieces, content = self._pieces, self._content[: self._filled]
        self._begin()
        return [Chunk(content.data, pieces)] if pieces else []

    def _add(self, name: str, part: Part) -> list[Chunk]:
        width = math.prod(part.shape[1:])
        rows = part.rows.detach().reshape(-1, *part.shape[1:])
        most = max(1, BLOCK_BYTES // max(1, width * rows.element_size()))
        full: list[Chunk] = []
        for low in range(0, len(rows), most):
            first, there = part.first + low, rows[low : low + most].cpu().contiguous()
            block = lent(there)  # who trains them gives their memory back to others
            image = block.to(self._dtype).contiguous()
            self._image.setdefault(name, Tree()).add_rows(image, first)
            if image.dtype != block.dtype:
                self._masters.setdefault(name, Tree()).add_rows(block, first)
            content = image.reshape(-1).view(torch.uint8).numpy()
            full += self._lay(name, part.shape, first * width, content)
        return full

    def laid(self, pieces: list[Tensor]) -> Laid:
        """All rows that were added, which lie in these pieces."""
        image = {name: tree.packed for name, tree in self._image.items()}
        # Masters that are published as they are have their identity, by tensor, from there.
        masters = {name: tree.packed for name, tree in self._masters.items()}
        return Laid(pieces, image, image | masters)

    def _lay(
        self, name: str, shape: tuple[int, ...], begin: int, content: NDArray[np.uint8]
    ) -> list[Chunk]:
        item, full = self._dtype.itemsize, list[Chunk]()
        most = self._how.chunk_bytes // item * item
        while len(content):
            if self._filled == most:
                full += self.rest()
            if not len(self._content):
                self._content = np.empty(most, np.uint8)
            fits = content[: most - self._filled]
            at, self._filled = self._filled, self._filled + len(fits)
            self._content[at : self._filled] = fits
            end = begin + len(fits) // item
            first = begin
            if self._pieces and (last := self._pieces[-1]).name == name and last.end == begin:
                first, at = last.begin, last.offset
                self._pieces.pop()
            dtype, size = self._how.dtype, (end - first) * item
            self._pieces.append(Tensor(name, dtype, list(shape), "", at, size, 0, first, end))
            content, begin = content[len(fits) :], end
        return full


def laying(outline: Mapping[str, torch.Tensor], dtype: str, *, write: bool = True) -> How:
    """How tensors like these are staged, of which only shapes are looked at."""
    size = sum(tensor.numel() for tensor in outline.values()) * DTYPES[dtype].itemsize
    return How(dtype, chunk_bytes(size), write)


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """Tensors of which all rows are here."""
    return {name: Part(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}


def slices(outline: Mapping[str, torch.Tensor], most: int) -> Iterable[tuple[list[str], int, int]]:
    """What is copied at a time, at most so many bytes: names, of whose rows part number .. of .. is
    meant. Of adapters after all others.
    """
    names: list[str] = []
    filled = 0
    ordered = sorted(outline.items(), key=lambda item: is_adapter(item[0]))
    for name, tensor in ordered:
        size = nbytes(tensor)
        if names and filled + size > most:
            yield names, 0, 1
            names, filled = [], 0
        if size > most:
            parts = -(-size // most)
            yield from (([name], part, parts) for part in range(parts))
        else:
            names.append(name)
            filled += size
    if names:
        yield names, 0, 1
