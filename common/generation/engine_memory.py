"""Memory of an engine's weights and cache, freed and allocated again between two steps."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.files.offloaded_tensors import PIECE_BYTES, Octets
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.kernels.memory_copy import copy_memory, view_memory

MADV_DONTNEED = 4  # advice of `madvise`, from mman.h: the pages are zero at their next use


class MappedMemory:
    """Memory of native code at fixed addresses, whose pages return to the host."""

    piece_bytes = PIECE_BYTES

    def __init__(self, regions: Mapping[str, tuple[int, int]]) -> None:
        """Create a view of regions, each an address and its bytes, which stay mapped."""
        self.sizes_bytes = {name: size for name, (_, size) in regions.items() if size}
        self._regions = regions

    @property
    def total_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(self.sizes_bytes.values())

    def read_into(self, name: str, start: int, out: Octets) -> Octets:
        """Copy bytes from `start`; return a view of them there."""
        source = self._view(name)[start : start + len(out)]
        copy_memory(out, source)
        return source

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Write bytes."""
        copy_memory(self._view(name)[start : start + len(piece)], piece)

    def _view(self, name: str) -> Octets:
        return view_memory(*self._regions[name])

    def release(self) -> None:
        """Return the whole pages of each region to the host."""
        libc = ctypes.CDLL(None)
        for name in self.sizes_bytes:
            address, size = self._regions[name]
            first, end = -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE
            if end > first:
                start, length = first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)

    def reallocate(self) -> None:
        """Do nothing, because pages are allocated at their next use."""

    def refresh(self) -> None:
        """Do nothing, because nothing is derived."""


class BlockStore(Protocol):
    """Backend with a cache in blocks; see `StepCompute`."""

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy blocks."""

    def write_blocks(self, blocks: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Write the result of `read_blocks`."""

    def release_cache(self) -> None:
        """Free the memory."""

    def reallocate_cache(self) -> None:
        """Allocate the memory again."""


class CacheMemory:
    """Memory of a paged cache, of which a copy contains the blocks in use.

    Several threads may copy different bytes.
    """

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        store: BlockStore,
        used_blocks: NDArray[np.int32],
        block_bytes: int,
        num_blocks: int,
        on_change: Callable[[bool], None],
    ) -> None:
        """Create a view; `on_change` is called with whether the content is gone."""
        self._store, self._blocks, self._block_bytes = store, used_blocks, block_bytes
        self._on_change = on_change
        self.sizes_bytes = {"blocks": len(used_blocks) * block_bytes} if len(used_blocks) else {}
        self.total_bytes = num_blocks * block_bytes
        # by index of a block of which some bytes are written: its content, and the lengths so far
        self._partial: dict[int, tuple[NDArray[np.uint8], list[int]]] = {}

    def read_into(self, name: str, start: int, out: Octets) -> None:
        """Copy bytes of the blocks from `start`."""
        for index, inner, outer in self._split(start, len(out)):
            out[outer] = self._store.read_blocks(self._blocks[index : index + 1])[inner]

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Write bytes of the blocks, each of which is stored once it is complete."""
        for index, inner, outer in self._split(start, len(piece)):
            empty = np.empty(self._block_bytes, np.uint8)
            content, lengths = self._partial.setdefault(index, (empty, []))
            content[inner] = piece[outer]
            lengths.append(inner.stop - inner.start)
            # the last of several threads sees all lengths, after their bytes
            if sum(lengths) == self._block_bytes:
                self._store.write_blocks(self._blocks[index : index + 1], content)
                self._partial.pop(index, None)

    def _split(self, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the index of each block in a range, its bytes, and their place in the range."""
        at = start
        while at < start + count:
            index, offset = divmod(at, self._block_bytes)
            length = min(self._block_bytes - offset, start + count - at)
            yield index, slice(offset, offset + length), slice(at - start, at - start + length)
            at += length

    def release(self) -> None:
        """Free the cache."""
        self._partial.clear()
        self._on_change(True)
        self._store.release_cache()

    def reallocate(self) -> None:
        """Allocate the cache again."""
        self._partial.clear()
        self._store.reallocate_cache()

    def refresh(self) -> None:
        """Report that the content is there again."""
        self._on_change(False)


class CombinedMemory:
    """Memory of several engines."""

    piece_bytes = PIECE_BYTES

    def __init__(self, parts: Mapping[str, ReleasableMemory]) -> None:
        self._parts = {
            f"{engine} {name}": (part, name)
            for engine, part in parts.items()
            for name in part.sizes_bytes
        }
        self._memories = list(parts.values())
        self.sizes_bytes = {
            key: part.sizes_bytes[name] for key, (part, name) in self._parts.items()
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of all engines."""
        return sum(memory.total_bytes for memory in self._memories)

    def read_into(self, name: str, start: int, out: Octets) -> Octets | None:
        """Copy bytes of a range."""
        part, own_name = self._parts[name]
        return part.read_into(own_name, start, out)

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Write bytes of a range."""
        part, own_name = self._parts[name]
        part.write(own_name, start, piece)

    def release(self) -> None:
        """Free the memory of all engines."""
        for memory in self._memories:
            memory.release()

    def reallocate(self) -> None:
        """Allocate the memory of all engines, or of none."""
        for done, memory in enumerate(self._memories):
            try:
                memory.reallocate()
            except MemoryError:
                for other in self._memories[:done]:
                    other.release()
                raise

    def refresh(self) -> None:
        """Complete the content of all engines."""
        for memory in self._memories:
            memory.refresh()
