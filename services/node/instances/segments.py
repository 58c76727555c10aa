"""Memory segments that a worker owns for its role processes.

Their content outlives the role processes and ends with the worker.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Self

from meshrl.common.api.node import CreateSegment, SegmentLocation, Worker
from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.offloaded_tensors import make_segment_name
from meshrl.common.mesh.runtime.calls.actor import Actor, call

SPARE_BYTES = 64 << 20  # host memory that no segment takes: other processes need some to answer


class MemorySegments:
    """Memory files by key.

    Together they have at most `budget_bytes` (0: as many as the host has).

    async with MemorySegments(read_free_bytes, budget) as segments:
        segment = segments.create(CreateSegment("trainer/sums", 1 << 30))
    """

    def __init__(
        self, read_free_bytes: Callable[[], int], budget_bytes: int = 0, where: str = ""
    ) -> None:
        """Create an empty table; `read_free_bytes` returns the host's free memory."""
        self._read_free_bytes, self._budget_bytes, self._where = (
            read_free_bytes,
            budget_bytes,
            where,
        )
        self._segments: dict[str, tuple[int, int]] = {}  # descriptor, bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._segments):
            self.delete(key)

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self._segments.values())

    @property
    def keys(self) -> list[str]:
        return sorted(self._segments)

    def create(self, request: CreateSegment) -> SegmentLocation:
        """Create a segment of zeros, which replaces one of the same key.

        StorageFull when the budget or the host has no room for it; the old segment remains.
        """
        _, before = self._segments.get(request.key, (-1, 0))
        others = self.total_bytes - before
        if self._budget_bytes and others + request.size_bytes > self._budget_bytes:
            raise StorageFull(
                f"{request.key} requests {request.size_bytes} bytes of memory, and other "
                f"segments use {others} of the worker's {self._budget_bytes}",
                where=self._where,
                fix="Raise the worker's memory budget, or let the instance sleep on disk",
            )
        filled = {key: 512 * os.fstat(fd).st_blocks for key, (fd, _) in self._segments.items()}
        # Others may still fill the rest of theirs; the replaced segment frees its own bytes.
        left = self._read_free_bytes() - (others - sum(filled.values()))
        if request.size_bytes + SPARE_BYTES > left:
            raise StorageFull(
                f"{request.key} requests {request.size_bytes} bytes of memory, and the host "
                f"has {left} available",
                where=self._where,
                fix="End other processes, or let the instance sleep on disk",
            )
        self.delete(request.key)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(make_segment_name(request.key), flags)
        os.ftruncate(descriptor, request.size_bytes)
        # Every process that maps it can rely on its size.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._segments[request.key] = descriptor, request.size_bytes
        return self._describe(request.key)

    def find(self, key: str) -> SegmentLocation:
        """Return the segment of this key; its path is empty if there is none."""
        return self._describe(key) if key in self._segments else SegmentLocation("", 0)

    def delete(self, key: str) -> None:
        """Delete a segment; the kernel frees its memory once no process maps it."""
        descriptor, _ = self._segments.pop(key, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)

    def _describe(self, key: str) -> SegmentLocation:
        descriptor, size = self._segments[key]
        return SegmentLocation(f"/proc/{os.getpid()}/fd/{descriptor}", size)


class SegmentCallsMixin(Actor):
    """Segment calls of a worker's actor."""

    segments: MemorySegments

    @call(Worker.create_segment)
    def create_segment(self, request: CreateSegment) -> SegmentLocation:
        return self.segments.create(request)

    @call(Worker.find_segment)
    def find_segment(self, key: str) -> SegmentLocation:
        return self.segments.find(key)

    @call(Worker.delete_segment)
    def delete_segment(self, key: str) -> None:
        return self.segments.delete(key)
