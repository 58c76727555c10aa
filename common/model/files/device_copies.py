"""Copies between a GPU and host memory, on streams of their own.

The host memory is pinned when it is first used, and stays so while it exists. Each copying thread
has a stream for one chunk: while one chunk is copied, another thread sums the chunk before.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from meshrl.common.base.files.offloaded_tensors import Octets


class CopyDriver(Protocol):
    """Calls of a GPU's driver."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin host memory; without success, copies are slower."""

    def unpin(self, address: int) -> None:
        """End the pinning of host memory, which is still mapped."""

    def create_stream(self, like: Tensor) -> Any:
        """Create a stream on the device of a tensor."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> Any:
        """Begin a copy behind all that the device computes, and return its event."""

    def wait(self, event: Any) -> None:
        """Wait for the copy of an event."""


class CudaDriver:
    """Driver of NVIDIA's GPUs."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Register the memory."""
        torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)  # type: ignore[no-untyped-call]

    def unpin(self, address: int) -> None:
        """Unregister the memory."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def create_stream(self, like: Tensor) -> torch.cuda.Stream:
        """Create a stream."""
        return torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Begin a copy after the work of the device's default stream."""
        stream.wait_stream(torch.cuda.default_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
            return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the copy is complete."""
        event.synchronize()


class DeviceCopies:
    """Streams and pinned memory of a process."""

    def __init__(self, driver: CopyDriver) -> None:
        self._driver = driver
        self._streams: deque[Any] = deque()  # that no thread uses now
        self._pinned: set[int] = set()  # addresses

    def read(self, source: Tensor, out: Octets) -> None:
        """Copy a device's bytes to host memory."""
        self._pin(out)
        self._copy(torch.from_numpy(out), source, source)

    def write(self, target: Tensor, piece: Octets) -> None:
        """Copy host memory to a device."""
        self._pin(piece)
        self._copy(target, torch.from_numpy(piece), target)

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> None:
        try:
            stream = self._streams.pop()
        except IndexError:
            stream = self._driver.create_stream(on_device)
        try:
            self._driver.wait(self._driver.copy(target, source, stream))
        finally:
            self._streams.append(stream)

    def _pin(self, part: Octets) -> None:
        """Pin the memory that an array is part of, until that memory is released."""
        whole = part
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        address = whole.ctypes.data
        if address in self._pinned:
            return
        self._pinned.add(address)
        self._driver.pin(address, whole.nbytes)
        weakref.finalize(whole, self._unpin, address)  # before it is unmapped

    def _unpin(self, address: int) -> None:
        self._driver.unpin(address)
        self._pinned.discard(address)


@cache
def find_cuda_copies() -> DeviceCopies:
    """Return the copies of this process's GPU."""
    return DeviceCopies(CudaDriver())
