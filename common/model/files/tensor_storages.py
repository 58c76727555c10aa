"""The memory behind tensors: given back and taken again, under the same tensors.

A tensor keeps its identity, shape and place in whatever holds it; while its storage is given back
nobody may look at it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from meshrl.common.base.files.offloaded_tensors import Octets

MALLOPT_MMAP_THRESHOLD = -3  # of `mallopt`, in malloc.h


class TensorStorages:
    """Storages of named tensors, each once, under the first tensor's name that lies in it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """What cannot be given back, as memory that numpy has, is copied to some that can."""
        make_releasable(tensors.values())
        self._storages: dict[str, torch.UntypedStorage] = {}
        seen: set[int] = set()
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self._storages[name] = storage
        self.sizes_bytes = {name: storage.nbytes() for name, storage in self._storages.items()}

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return sum(self.sizes_bytes.values())

    def read(self, name: str, start: int, end: int) -> Octets:
        """Bytes of one; a view where it lies in the host's memory."""
        storage = self._storages[name]
        if storage.device.type == "cpu":
            return _view_bytes(storage)[start:end]
        found: Octets = _view_byte_tensor(storage)[start:end].cpu().numpy()
        return found

    def write(self, name: str, start: int, piece: Octets) -> None:
        """Puts bytes in place."""
        storage, end = self._storages[name], start + len(piece)
        if storage.device.type == "cpu":
            _view_bytes(storage)[start:end] = piece
        else:
            _view_byte_tensor(storage)[start:end].copy_(torch.from_numpy(np.array(piece)))

    def release(self) -> None:
        """Frees the memory."""
        devices = {storage.device.type for storage in self._storages.values()}
        for storage in self._storages.values():
            storage.resize_(0)
        if "cuda" in devices:
            torch.cuda.empty_cache()
        trim_heap()

    def reallocate(self) -> None:
        """Allocates as much memory again, of any content. MemoryError, and all of it is given back,
        where there is none.
        """
        try:
            for name, storage in self._storages.items():
                storage.resize_(self.sizes_bytes[name])
        except (RuntimeError, MemoryError) as error:  # torch's own is the former
            self.release()
            raise MemoryError(str(error)) from error


def alias_for_numpy(tensor: Tensor) -> Tensor:
    """The same numbers for numpy to see, in the host's memory: its storage can be given back
    afterwards. As long as the tensor is there, and lies whole and in order, no copy.
    """
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.numel():
        return tensor
    there = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    seen = torch.from_numpy(np.frombuffer(memoryview(there), np.uint8))
    return seen.view(tensor.dtype).reshape(tensor.shape)


def _view_bytes(storage: torch.UntypedStorage) -> Octets:
    """The bytes in the host's memory. Not by way of torch, whose storages cannot be given back any
    more once numpy has seen them.
    """
    there = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.ctypeslib.as_array(there)


def _view_byte_tensor(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@torch.no_grad()
def make_releasable(tensors: Iterable[Tensor]) -> None:
    """Moves tensors whose memory cannot be given back; those that are one stay one."""
    moved: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
    for tensor in tensors:
        if tensor.untyped_storage().resizable() or not tensor.numel():
            continue
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        if key not in moved:
            moved[key] = tensor.detach().clone()
        tensor.data = moved[key]


def set_mmap_threshold(size_bytes: int) -> None:
    """Has freed blocks of at least `size` bytes go back to the host at once, from now on (glibc). A
    heap that is kept spares a small model its page faults; tensors of a large one, of many sizes,
    leave holes there that add up to several times what is in use.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MALLOPT_MMAP_THRESHOLD, size_bytes)


def trim_heap() -> None:
    """Gives free memory of the heap back to the host: role processes are started with a heap that
    is kept, and what sleeps should not take memory.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
