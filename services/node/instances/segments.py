"""Memory segments that a worker owns for its role processes.

Their content outlives the role processes and ends with the worker. A segment that is no longer
needed keeps its memory for the next segment of the same process, because fresh memory costs several
times a copy: the kernel has to find and clear it. No other process gets that memory, and it is
released as soon as the worker's budget or the host needs room.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from meshrl.common.api.calls.role import RoleControl
from meshrl.common.api.node import CreateSegment, SegmentLocation, Worker
from meshrl.common.base.errors import MeshError, NotFound, PeerLost, Refused, StorageFull
from meshrl.common.base.files.offload_media import get_segment_process, make_segment_name
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.mesh.telemetry.tracing import current_call

SPARE_BYTES = 64 << 20  # host memory that no segment takes: other processes need some to answer
POOL_SPARE_BYTES = 1 << 30  # free host memory below which no unused segment keeps its memory
RELEASE_POLL_S = 0.5  # between two looks at the host's free memory
MAX_EXCESS = 1.25  # size of a reused segment over the requested size, at most


@dataclass(frozen=True)
class _Segment:
    key: str
    descriptor: int
    size_bytes: int

    @property
    def process(self) -> str:
        return get_segment_process(self.key)

    @property
    def location(self) -> SegmentLocation:
        return SegmentLocation(f"/proc/{os.getpid()}/fd/{self.descriptor}", self.size_bytes)

    @property
    def inode(self) -> int:
        return os.fstat(self.descriptor).st_ino

    @property
    def filled_bytes(self) -> int:
        return 512 * os.fstat(self.descriptor).st_blocks

    def free(self) -> None:
        """Free the memory, even if a process still maps it."""
        with mmap.mmap(self.descriptor, self.size_bytes) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)
        os.close(self.descriptor)


class MemorySegments:
    """Anonymous memory files of a worker, by key.

    Together they have at most `budget_bytes` (0: as many as the host has). They are closed on exit.

    async with MemorySegments(read_free_bytes, budget) as segments:
        segment = segments.create(CreateSegment("trainer/sums:optimizer", 1 << 30))
        segments.commit("trainer/sums:optimizer")
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
        self._segments: dict[str, _Segment] = {}  # with a complete copy
        self._pending: dict[str, _Segment] = {}  # being filled, to replace that of the same key
        self._unused: list[_Segment] = []  # oldest first
        self.freed: list[tuple[str, int]] = []  # process and inode, which may still be pinned
        self.unmapping = asyncio.Lock()
        self.unmapped_count = 0  # of the freed segments so far

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for segment in (*self._segments.values(), *self._pending.values(), *self._unused):
            os.close(segment.descriptor)
        self._segments, self._pending, self._unused = {}, {}, []

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments in use."""
        used = (*self._segments.values(), *self._pending.values())
        return sum(segment.size_bytes for segment in used)

    @property
    def unused_bytes(self) -> int:
        """Bytes of memory that waits for its next use, and can be released at any time."""
        return sum(segment.size_bytes for segment in self._unused)

    @property
    def keys(self) -> list[str]:
        return sorted(self._segments)

    def create(self, request: CreateSegment) -> SegmentLocation:
        """Create a segment, which replaces one of the same key at `commit`.

        It has zeros, or what the same process has written to an earlier segment.

        Raises:
            StorageFull: The budget or the host has too little room.
        """
        self.discard(request.key)
        segment = self._take_unused(request) or self._create(request)
        self._pending[request.key] = segment
        return segment.location

    def commit(self, key: str) -> None:
        """Replace the segment of a key by the one created last. Idempotent."""
        segment = self._pending.pop(key, None)
        if segment is None and key not in self._segments:
            raise NotFound(f"no segment was created for {key}", where=self._where)
        if segment is not None:
            self._retire(self._segments, key)
            self._segments[key] = segment

    def find(self, key: str) -> SegmentLocation:
        """Return path and bytes of a committed segment; the path is empty if there is none.

        Any process of the same user can open the path while the segment exists.
        """
        segment = self._segments.get(key)
        return segment.location if segment is not None else SegmentLocation("", 0)

    def discard(self, key: str) -> None:
        """Delete a segment that is not committed, if there is one."""
        self._retire(self._pending, key)

    def delete(self, key: str) -> None:
        """Delete the segments of a key; their memory may serve the same process again."""
        self._retire(self._pending, key)
        self._retire(self._segments, key)

    def delete_process(self, process: str) -> None:
        """Delete all segments of a process and release their memory."""
        for table in (self._segments, self._pending):
            for key in [key for key, one in table.items() if one.process == process]:
                self._retire(table, key)
        for segment in [one for one in self._unused if one.process == process]:
            self._free(segment)
        self.freed = [one for one in self.freed if one[0] != process]

    def record_unmapped(self, process: str, inode: int) -> None:
        """Record that a process has unmapped a freed segment."""
        self.freed = [one for one in self.freed if one != (process, inode)]
        self.unmapped_count += 1

    def release_unused(self) -> None:
        """Release unused memory, the oldest first, while the host has little free memory."""
        while self._unused and self._read_free_bytes() < POOL_SPARE_BYTES:
            self._free(self._unused[0])

    def _take_unused(self, request: CreateSegment) -> _Segment | None:
        process, size = get_segment_process(request.key), request.size_bytes
        fitting = [
            one
            for one in self._unused
            if one.process == process and size <= one.size_bytes <= MAX_EXCESS * size
        ]
        if not fitting:
            return None
        # the process has mapped an earlier segment of the same key
        segment = min(fitting, key=lambda one: (one.key != request.key, one.size_bytes))
        if self._budget_bytes and self.total_bytes + segment.size_bytes > self._budget_bytes:
            return None
        self._unused.remove(segment)
        return replace(segment, key=request.key)

    def _create(self, request: CreateSegment) -> _Segment:
        size, used_bytes = request.size_bytes, self.total_bytes
        if self._budget_bytes and used_bytes + size > self._budget_bytes:
            raise StorageFull(
                f"{request.key} requests {size} bytes of memory, and other "
                f"segments use {used_bytes} of the worker's {self._budget_bytes}",
                where=self._where,
                fix="Raise the worker's memory budget, or let the instance sleep on disk",
            )
        while self._budget_bytes and (
            self._unused and used_bytes + self.unused_bytes + size > self._budget_bytes
        ):
            self._free(self._unused[0])
        room = self._measure_room()
        while self._unused and size + SPARE_BYTES > room:
            room += self._free(self._unused[0])  # at once, or when its process has unmapped it
        if size + SPARE_BYTES > (room := self._measure_room()):
            raise StorageFull(
                f"{request.key} requests {size} bytes of memory, and the host has {room} available",
                where=self._where,
                fix="End other processes, or let the instance sleep on disk",
            )
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(make_segment_name(get_segment_process(request.key)), flags)
        os.ftruncate(descriptor, size)
        # Every process that maps it can rely on its size.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return _Segment(request.key, descriptor, size)

    def _measure_room(self) -> int:
        """Return the host's free memory less what the segments in use have still to fill."""
        used = (*self._segments.values(), *self._pending.values())
        return self._read_free_bytes() - sum(
            max(0, one.size_bytes - one.filled_bytes) for one in used
        )

    def _retire(self, table: dict[str, _Segment], key: str) -> None:
        segment = table.pop(key, None)
        if segment is not None:
            self._unused.append(segment)

    def _free(self, segment: _Segment) -> int:
        """Free an unused segment and return its bytes."""
        self._unused.remove(segment)
        self.freed.append((segment.process, segment.inode))
        size_bytes = segment.filled_bytes
        segment.free()
        return size_bytes


class SegmentCallsMixin(Actor):
    """Segment calls of a worker's actor, each from the process that the segment is named after."""

    segments: MemorySegments
    _mesh: Mesh

    async def is_process(self, name: str, incarnation: str, owner: str | bytes) -> bool:
        """Return True if the worker runs this process, with this incarnation and proved key."""
        raise NotImplementedError

    async def release_segments(self) -> None:
        """Release unused memory while the host has little, and have it unmapped; until cancelled.

        A process that does not answer delays nothing else of the worker.
        """
        while True:
            self.segments.release_unused()
            await self.unmap_freed()
            await self._mesh.clock.sleep(RELEASE_POLL_S)

    async def unmap_freed(self) -> None:
        """Let processes unmap freed segments, as pinned memory is free only then.

        A call that fails is repeated by the next one. The exit of a process unmaps its segments.
        """

        async def unmap(process: str, inode: int) -> None:
            try:
                await self._mesh.ref(process).call(RoleControl.unmap_segment, inode)
            except PeerLost:
                pass  # it has exited
            except MeshError as error:
                self._mesh.log.warning("a freed segment stays mapped", error=str(error))
                return
            self.segments.record_unmapped(process, inode)

        async with self.segments.unmapping:
            await run_all(unmap(*one) for one in self.segments.freed)

    async def _check_requester(self, key: str) -> None:
        """Raise Refused unless the call comes from the process that a segment is named after."""
        process, requester = get_segment_process(key), current_call.get()
        assert requester is not None
        if not await self.is_process(process, requester.sender, requester.owner):
            raise Refused(
                f"the segment {key} belongs to {process}, and the requester is another process",
                where="memory segments",
                fix=f"Request it in the process that this worker runs as {process}",
            )

    @call(Worker.create_segment)
    async def create_segment(self, request: CreateSegment) -> SegmentLocation:
        await self._check_requester(request.key)
        while True:
            unmapped_count = self.segments.unmapped_count
            try:
                location = self.segments.create(request)
            except StorageFull:
                await self.unmap_freed()  # perhaps after another call that has begun to do so
                if self.segments.unmapped_count == unmapped_count:
                    raise
            else:
                await self.unmap_freed()
                return location

    @call(Worker.commit_segment)
    async def commit_segment(self, key: str) -> None:
        await self._check_requester(key)
        self.segments.commit(key)

    @call(Worker.find_segment)
    async def find_segment(self, key: str) -> SegmentLocation:
        await self._check_requester(key)
        return self.segments.find(key)

    @call(Worker.discard_segment)
    async def discard_segment(self, key: str) -> None:
        await self._check_requester(key)
        self.segments.discard(key)

    @call(Worker.delete_segment)
    async def delete_segment(self, key: str) -> None:
        await self._check_requester(key)
        self.segments.delete(key)
