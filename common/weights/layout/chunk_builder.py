"""Builder of chunks from rows of weights; blocking, without access to a store.

It casts rows to the published dtype, and hashes them for the identities of the published image and
of the masters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.common.api.weights import TensorPiece
from meshrl.common.model.files.safetensors_writer import DTYPES
from meshrl.common.model.files.tensor_source import count_bytes
from meshrl.common.model.files.tensor_storages import alias_for_numpy
from meshrl.common.model.network.lora import is_adapter_tensor
from meshrl.common.weights.layout.identity import MerkleTree, MerkleTrees
from meshrl.common.weights.layout.manifest import choose_chunk_bytes

BLOCK_BYTES = 8 << 20  # of masters cast, hashed and copied at a time: about a core's cache


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor of `shape` on one process, from `first_row` on."""

    shape: tuple[int, ...]
    first_row: int
    rows: torch.Tensor

    def split(self, part_index: int, part_count: int) -> TensorRows:
        """Return part `part_index` of `part_count` equal parts of these rows."""
        if part_count == 1 or not self.rows.dim():
            return (
                self
                if part_index == 0
                else TensorRows(self.shape, self.first_row, self.rows.reshape(-1)[:0])
            )
        count = len(self.rows)
        low, high = count * part_index // part_count, count * (part_index + 1) // part_count
        return TensorRows(self.shape, self.first_row + low, self.rows[low:high])


@dataclass(frozen=True)
class StagingOptions:
    """Dtype and chunk size of staged rows."""

    dtype: str  # safetensors' name of the type that is published
    max_chunk_bytes: int  # of a chunk
    write_chunks: bool = True  # False: only compute the positions


@dataclass(frozen=True)
class StagedRows:
    """Rows staged by one process: positions, and packed Merkle parts by tensor.

    The Merkle parts are those of the published image and of the masters.
    """

    pieces: list[TensorPiece] = field(default_factory=list)
    published_parts: dict[str, bytes] = field(default_factory=dict)
    masters_parts: dict[str, bytes] = field(default_factory=dict)


@dataclass
class StagedChunk:
    """Full chunk; its pieces have no digest yet."""

    content: memoryview
    pieces: list[TensorPiece]


class ChunkBuilder:
    """Builder that appends rows to chunks in order of arrival. Blocking."""

    def __init__(self, options: StagingOptions) -> None:
        self._options, self._dtype = options, DTYPES[options.dtype]
        self._published_trees: MerkleTrees = {}
        self._masters_trees: MerkleTrees = {}
        self._in_adapters = False  # True while the current chunk contains adapters
        self._reset_chunk()

    def _reset_chunk(self) -> None:
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._filled_bytes = 0
        self._pieces: list[TensorPiece] = []

    @torch.no_grad()
    def add_rows(self, rows_by_name: Mapping[str, TensorRows]) -> list[StagedChunk]:
        """Append rows and return the chunks that are full now.

        A chunk never contains both adapters and base weights.
        """
        full: list[StagedChunk] = []
        for name, part in rows_by_name.items():
            if is_adapter_tensor(name) != self._in_adapters:
                full += self.take_partial_chunk()
                self._in_adapters = is_adapter_tensor(name)
            full += self._add_tensor_rows(name, part)
        return full

    def take_partial_chunk(self) -> list[StagedChunk]:
        """Return the partially filled chunk if it contains anything, and start a new one."""
        pieces, content = self._pieces, self._buffer[: self._filled_bytes]
        self._reset_chunk()
        return [StagedChunk(content.data, pieces)] if pieces else []

    def _add_tensor_rows(self, name: str, tensor_rows: TensorRows) -> list[StagedChunk]:
        width = math.prod(tensor_rows.shape[1:])
        rows = tensor_rows.rows.detach().reshape(-1, *tensor_rows.shape[1:])
        most = max(1, BLOCK_BYTES // max(1, width * rows.element_size()))
        full: list[StagedChunk] = []
        for low in range(0, len(rows), most):
            first, there = tensor_rows.first_row + low, rows[low : low + most].cpu().contiguous()
            # the training process may release their memory to others
            block = alias_for_numpy(there)
            image = block.to(self._dtype).contiguous()
            self._published_trees.setdefault(name, MerkleTree()).add_rows(image, first)
            if image.dtype != block.dtype:
                self._masters_trees.setdefault(name, MerkleTree()).add_rows(block, first)
            content = image.reshape(-1).view(torch.uint8).numpy()
            full += self._append_bytes(name, tensor_rows.shape, first * width, content)
        return full

    def finish(self, pieces: list[TensorPiece]) -> StagedRows:
        """Return the result for all added rows, which `pieces` locate."""
        image = {name: tree.packed_parts for name, tree in self._published_trees.items()}
        # The identity of masters that are published without a cast is that of the image.
        masters = {name: tree.packed_parts for name, tree in self._masters_trees.items()}
        return StagedRows(pieces, image, image | masters)

    def _append_bytes(
        self, name: str, shape: tuple[int, ...], begin: int, content: NDArray[np.uint8]
    ) -> list[StagedChunk]:
        item, full = self._dtype.itemsize, list[StagedChunk]()
        most = self._options.max_chunk_bytes // item * item
        while len(content):
            if self._filled_bytes == most:
                full += self.take_partial_chunk()
            if not len(self._buffer):
                self._buffer = np.empty(most, np.uint8)
            fits = content[: most - self._filled_bytes]
            at, self._filled_bytes = self._filled_bytes, self._filled_bytes + len(fits)
            self._buffer[at : self._filled_bytes] = fits
            end = begin + len(fits) // item
            first = begin
            if self._pieces and (last := self._pieces[-1]).name == name and last.end == begin:
                first, at = last.begin, last.offset
                self._pieces.pop()
            dtype, size = self._options.dtype, (end - first) * item
            self._pieces.append(TensorPiece(name, dtype, list(shape), "", at, size, 0, first, end))
            content, begin = content[len(fits) :], end
        return full


def make_staging_options(
    meta_tensors: Mapping[str, torch.Tensor], dtype: str, *, write_chunks: bool = True
) -> StagingOptions:
    """Return the staging options for tensors of these dtypes and shapes."""
    size = sum(tensor.numel() for tensor in meta_tensors.values()) * DTYPES[dtype].itemsize
    return StagingOptions(dtype, choose_chunk_bytes(size), write_chunks)


def as_complete_rows(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRows]:
    """Wrap tensors whose rows are all on this process."""
    return {name: TensorRows(tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()}


def plan_copies(
    meta_tensors: Mapping[str, torch.Tensor], max_bytes: int
) -> Iterable[tuple[list[str], int, int]]:
    """Yield batches to copy of at most `max_bytes`: names, part index and part count of their rows.

    Adapters come after all other tensors.
    """
    names: list[str] = []
    filled = 0
    ordered = sorted(meta_tensors.items(), key=lambda item: is_adapter_tensor(item[0]))
    for name, tensor in ordered:
        size = count_bytes(tensor)
        if names and filled + size > max_bytes:
            yield names, 0, 1
            names, filled = [], 0
        if size > max_bytes:
            parts = -(-size // max_bytes)
            yield from (([name], part, parts) for part in range(parts))
        else:
            names.append(name)
            filled += size
    if names:
        yield names, 0, 1
