"""Memory behind tensors, freed and allocated again under the same tensors.

A tensor retains its identity, its shape and its holder. No code may access it while its storage is
freed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from meshrl.common.base.files.offloaded_tensors import CHUNK_BYTES, PIECE_BYTES, Octets
from meshrl.common.model.files.device_copies import DeviceCopies, find_cuda_copies
from meshrl.kernels.memory_copy import copy_memory, view_memory

OFFERED_BYTES = 1 << 18  # of host memory that stays mapped when it is released, at least
HUGE_PAGE_BYTES = 2 << 20  # of x86-64
MALLOPT_MMAP_THRESHOLD = -3  # parameter of `mallopt`, from malloc.h


_offered: set[tuple[int, int]] = set()  # address and bytes of memory that was released before


class TensorStorages:
    """Storages of named tensors, each once, under the name of the first tensor in it.

    Derived tensors are freed and allocated with them, and `refresh` computes them from the others.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        derived_tensors: Mapping[str, Tensor] | None = None,
        refresh: Callable[[], None] | None = None,
        device_copies: DeviceCopies | None = None,
    ) -> None:
        """Collect the storages; copy memory that cannot be freed, such as numpy's.

        `device_copies` copies to and from host memory; without it, tensors there need none.
        """
        derived = derived_tensors or {}
        make_releasable([*tensors.values(), *derived.values()])
        self._refresh = refresh
        self._storages: dict[str, torch.UntypedStorage] = {}
        self.sizes_bytes: dict[str, int] = {}
        self._all_bytes: dict[str, int] = {}
        known_pointers: set[int] = set()
        for name, tensor in [*tensors.items(), *((f"derived {n}", t) for n, t in derived.items())]:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known_pointers:
                known_pointers.add(storage.data_ptr())
                self._storages[name] = storage
                self._all_bytes[name] = storage.nbytes()
                if name in tensors:
                    self.sizes_bytes[name] = storage.nbytes()
        if any(storage.device.type == "cuda" for storage in self._storages.values()):
            device_copies = device_copies or find_cuda_copies()
        self._device_copies = device_copies
        self.piece_bytes = CHUNK_BYTES if device_copies else PIECE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages, with derived tensors."""
        return sum(self._all_bytes.values())

    def read_into(self, name: str, start: int, out: Octets) -> Octets | None:
        """Copy bytes of a storage from `start` to host memory; return a view of them there."""
        storage = self._storages[name]
        if self._device_copies is not None:
            device_bytes = _view_byte_tensor(storage)[start : start + len(out)]
            self._device_copies.read(device_bytes, out)
            return None
        source = view_memory(storage.data_ptr() + start, len(out))
        copy_memory(out, source)
        return source

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Write bytes to a storage."""
        storage = self._storages[name]
        if self._device_copies is not None:
            device_bytes = _view_byte_tensor(storage)[start : start + len(piece)]
            self._device_copies.write(device_bytes, piece)
        else:
            copy_memory(view_memory(storage.data_ptr() + start, len(piece)), piece)

    def release(self) -> None:
        """Free the memory.

        Large host memory stays mapped: the kernel may take its pages at any time, and counts them
        as available. The tensors then have undefined content.
        """
        devices = {storage.device.type for storage in self._storages.values()}
        for storage in self._storages.values():
            if storage.device.type != "cpu" or not _offer_pages(storage):
                storage.resize_(0)
        if "cuda" in devices:
            torch.cuda.empty_cache()
        trim_heap()

    def reallocate(self) -> None:
        """Allocate the same amount of memory, with undefined content.

        Raise MemoryError, with all of it freed again, if there is not enough.
        """
        try:
            for name, storage in self._storages.items():
                if storage.nbytes() != self._all_bytes[name]:
                    storage.resize_(self._all_bytes[name])
        except (RuntimeError, MemoryError) as error:  # torch's own error is a RuntimeError
            self.release()
            raise MemoryError(str(error)) from error

    def refresh(self) -> None:
        """Compute the derived tensors, once the others have their content."""
        if self._refresh is not None:
            self._refresh()


def _offer_pages(storage: torch.UntypedStorage) -> bool:
    """Let the kernel take the pages of large host memory; return False for other memory.

    The kernel frees them at once the first time, and only when it needs memory from then on, so
    that a process that is soon loaded again writes to pages that are there. The pages become huge
    ones, because the processor notes the first write to each page, which costs as much as copying
    4 KiB.
    """
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - start < OFFERED_BYTES:
        return False
    libc = ctypes.CDLL(None)

    def advise(advice: int) -> bool:
        there, count = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        return int(libc.madvise(there, count, advice)) == 0

    key = storage.data_ptr(), storage.nbytes()
    if key in _offered:
        return advise(mmap.MADV_FREE)
    if not advise(mmap.MADV_DONTNEED):
        return False
    if end - start >= HUGE_PAGE_BYTES:
        advise(mmap.MADV_HUGEPAGE)  # a kernel without them has small ones
    _offered.add(key)
    return True


def alias_for_numpy(tensor: Tensor) -> Tensor:
    """Return a tensor of the same numbers in host memory for numpy to use.

    The original storage can still be freed afterwards. A contiguous tensor in host memory is not
    copied, and must outlive the result.
    """
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.numel():
        return tensor
    there = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    alias = torch.from_numpy(np.frombuffer(memoryview(there), np.uint8))
    return alias.view(tensor.dtype).reshape(tensor.shape)


def _view_byte_tensor(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@torch.no_grad()
def make_releasable(tensors: Iterable[Tensor]) -> None:
    """Move tensors whose memory cannot be freed; tensors that share storage still share it."""
    moved: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for tensor in tensors:
        if tensor.untyped_storage().resizable() or not tensor.numel():
            continue
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        if key not in moved:
            moved[key] = tensor.detach().clone()
        tensor.data = moved[key]


def set_mmap_threshold(size_bytes: int) -> None:
    """Set the size from which on freed blocks return to the host at once (glibc).

    A retained heap spares a small model its page faults. Tensors of a large model, of many sizes,
    leave gaps in it that add up to several times the used memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MALLOPT_MMAP_THRESHOLD, size_bytes)


def trim_heap() -> None:
    """Return free heap memory to the host.

    Role processes start with a retained heap, and a sleeping process should not use memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
