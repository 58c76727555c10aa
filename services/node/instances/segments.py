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
    """Anonymous memory files of a worker, by key.

    Together they have at most `budget_bytes` (0: as many as the host has). They are closed on exit.

    async with MemorySegments(read_free_bytes, budget) as segments:
        segment = segments.create(CreateSegment("trainer/sums", 1 << 30))
    """

    def __init__(
        self, read_free_bytes: Callable[[], int], budget_bytes: int = 0, where: str = ""
    ) -> None:
        """Create an empty table.

        Args:
            read_free_bytes: Returns the host's free memory.
            budget_bytes: Most bytes of all segments together; 0: no budget.
            where: Location for errors: the worker's name.
        """
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

        Raises:
            StorageFull: The budget or the host has too little room; the old segment remains.
        """
        _, replaced_bytes = self._segments.get(request.key, (-1, 0))
        other_bytes = self.total_bytes - replaced_bytes
        if self._budget_bytes and other_bytes + request.size_bytes > self._budget_bytes:
            raise StorageFull(
                f"{request.key} requests {request.size_bytes} bytes of memory, and other "
                f"segments use {other_bytes} of the worker's {self._budget_bytes}",
                where=self._where,
                fix="Raise the worker's memory budget, or let the instance sleep on disk",
            )
        filled_bytes = {
            key: 512 * os.fstat(fd).st_blocks for key, (fd, _) in self._segments.items()
        }
        # Others may still fill the rest of theirs; the replaced segment frees its own bytes.
        free_bytes = self._read_free_bytes() - (other_bytes - sum(filled_bytes.values()))
        if request.size_bytes + SPARE_BYTES > free_bytes:
            raise StorageFull(
                f"{request.key} requests {request.size_bytes} bytes of memory, and the host "
                f"has {free_bytes} available",
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
        """Return path and bytes of a segment; the path is empty if there is none.

        Any process of the same user can open the path while the segment exists.
        """
        return self._describe(key) if key in self._segments else SegmentLocation("", 0)

    def delete(self, key: str) -> None:
        """Delete a segment if it exists; the kernel frees its memory once no process maps it."""
        descriptor, _ = self._segments.pop(key, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)

    def delete_process(self, process: str) -> None:
        """Delete the segments of all parts of a process's state."""
        for key in self.keys:
            if key == process or key.startswith(f"{process}."):
                self.delete(key)

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
