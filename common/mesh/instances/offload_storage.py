"""Storage for the tensors of a sleeping role process: a memory segment of its worker, or a file.

Both outlive the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from meshrl.common.api.node import CreateSegment, SegmentLocation, Worker
from meshrl.common.base.errors import CorruptData, DeadlineExceeded, MeshError, Refused
from meshrl.common.base.files import corruption, offloaded_tensors
from meshrl.common.base.files.offload_media import MemorySegment, OffloadFile, make_segment_key
from meshrl.common.base.files.offloaded_tensors import (
    Cancellation,
    OffloadHeader,
    OffloadMedium,
    OffloadSource,
    OffloadTarget,
)
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.state import events
from meshrl.common.state.pool.workers.rows import Tier

MAX_MAPPED = 2  # segments: of a copy, and of the one that replaces it
COPY_TIMEOUT_S = 900.0  # seconds for tensors of about 100 GB to a disk


class OffloadStorage:
    """Copies of one part of a process's state. `segment_owner` is its worker, `directory` holds
    files; empty if unset.
    """

    def __init__(
        self, mesh: Mesh, segment_owner: str = "", directory: str = "", part: str = ""
    ) -> None:
        """Create the storage of a part; "" is the record of the whole state."""
        self._mesh, self._part = mesh, part
        self._key = make_segment_key(mesh.name, part)
        self.segment_owner, self.directory = segment_owner, directory
        self.stored_bytes = {Tier.MEMORY: 0, Tier.DISK: 0}  # bytes
        self._empty_tiers: set[Tier] = set()  # which have no copy of an earlier run either
        # by inode: to map a segment again costs more than to copy to it
        self._mapped: dict[int, MemorySegment] = {}

    def set_targets(self, segment_owner: str, directory: str) -> None:
        """Set the worker and directory if they are unset.

        Raises Refused if they differ from those of the worker that started this process.
        """
        for own, requested in ((self.segment_owner, segment_owner), (self.directory, directory)):
            if own and requested and requested != own:
                raise Refused(
                    f"the request sets {requested} as the offload target, but its worker uses "
                    f"{own}",
                    where=self._mesh.name,
                    fix="The request is not from its worker: run `meshrl hosts` to list the "
                    "admitted hosts",
                )
        self.segment_owner, self.directory = (
            self.segment_owner or segment_owner,
            self.directory or directory,
        )

    async def save(
        self,
        tier: Tier,
        metadata: Mapping[str, Any],
        source: OffloadSource,
        cancel: Cancellation | None = None,
    ) -> None:
        """Save a copy at a tier, which replaces an earlier one once it is complete.

        `cancel`, or a cancellation of the task, ends it between two chunks. Raises CopyCancelled,
        Refused or StorageFull, and then leaves the earlier copy at that tier.
        """
        size = offloaded_tensors.compute_size_bytes(metadata, source.sizes_bytes)
        async with self._create_medium(tier, size) as medium:
            await self._copy(offloaded_tensors.offload, medium, metadata, source, cancel=cancel)

    async def move(self, source: Tier, target: Tier, cancel: Cancellation | None = None) -> None:
        """Copy the offloaded state from one tier to another, and delete it at the first.

        Raises CorruptData if it has changed. CopyCancelled, Refused or StorageFull leave it at the
        first tier.
        """
        async with self._open_medium(source) as lying:
            if lying is None:
                raise CorruptData("no offloaded state is left", where=self._describe_tier(source))
            head = await self._run_to_end(offloaded_tensors.read_header, lying)
            async with self._create_medium(target, head.size_bytes) as medium:
                await self._copy(offloaded_tensors.copy_offload, lying, medium, cancel=cancel)
        with suppress(MeshError):  # the copy at the target is complete
            await self.drop(source)

    async def restore(
        self, tier: Tier, target: OffloadTarget, cancel: Cancellation | None = None
    ) -> None:
        """Restore the copy of a tier to `target`, and leave it at the tier.

        Raises CorruptData if it has changed, and quarantines it. After that, CopyCancelled or a
        cancellation of the task, `target` has no defined content.
        """
        async with self._open_medium(tier) as medium:
            if medium is None:
                raise CorruptData("no offloaded state is left", where=self._describe_tier(tier))
            try:
                await self._copy(_read_and_restore, medium, target, cancel=cancel)
                return
            except CorruptData as error:
                found = error
        await self._quarantine(tier, found)
        raise found

    async def find_copies(self) -> list[tuple[Tier, OffloadHeader]]:
        """Find the complete copies that an earlier run of this process has saved; remove incomplete
        ones.
        """
        found = []
        for tier in (Tier.MEMORY, Tier.DISK):
            try:
                async with self._open_medium(tier) as medium:
                    if medium is not None:
                        head = await self._run_to_end(offloaded_tensors.read_header, medium)
                        self.stored_bytes[tier] = medium.size_bytes
                        found.append((tier, head))
            except CorruptData as error:
                self._mesh.telemetry.log.warning("incomplete offloaded state", why=str(error))
                await self.drop(tier)
        return found

    async def drop(self, tier: Tier) -> None:
        """Delete the copy at a tier, if there is one."""
        self.stored_bytes[tier] = 0
        if tier in self._empty_tiers:
            return
        if tier == Tier.MEMORY and self.segment_owner:
            await self._worker.call(Worker.delete_segment, self._key)
        elif tier == Tier.DISK and self.directory:
            await self._run_to_end(_remove_files, self._file)
        else:
            return
        self._empty_tiers.add(tier)

    async def drop_all(self) -> None:
        """Delete all copies. An unavailable worker has released its copy, or does so later."""
        for tier in (Tier.MEMORY, Tier.DISK):
            with suppress(MeshError):
                await self.drop(tier)

    def unmap(self, inode: int) -> None:
        """Unmap a segment that is not in use any more, if it is mapped."""
        if (mapped := self._mapped.pop(inode, None)) is not None:
            mapped.close()

    @property
    def _worker(self) -> Any:
        return self._mesh.ref(self.segment_owner)

    @property
    def _file(self) -> Path:
        return make_offload_path(self.directory, self._mesh.name, self._part)

    def _describe_tier(self, tier: Tier) -> str:
        return str(self._file) if tier == Tier.DISK else self.segment_owner

    @asynccontextmanager
    async def _create_medium(self, tier: Tier, size: int) -> AsyncIterator[OffloadMedium]:
        """Reserve space of this size; release it if the block fails."""
        medium: MemorySegment | OffloadFile
        self._empty_tiers.discard(tier)
        if tier == Tier.MEMORY and self.segment_owner:
            request = CreateSegment(self._key, size)
            segment = await self._worker.call(Worker.create_segment, request)
            medium = self._map(segment)
        elif tier == Tier.DISK and self.directory:
            medium = OffloadFile(self._file, create=True)
        else:
            raise Refused(
                f"no location is set for the tier '{tier}'",
                where=self._mesh.name,
                fix="Its worker sets the location in SetTier",
            )
        try:
            if isinstance(medium, OffloadFile):
                await self._run_to_end(medium.reserve, size)
            yield medium
            if isinstance(medium, OffloadFile):
                await self._run_to_end(medium.commit)
            else:
                await self._worker.call(Worker.commit_segment, self._key)
            self.stored_bytes[tier] = medium.size_bytes
        except BaseException:
            if isinstance(medium, MemorySegment):
                with suppress(MeshError):
                    await self._worker.call(Worker.discard_segment, self._key)
            raise
        finally:
            if isinstance(medium, OffloadFile):
                medium.close()

    @asynccontextmanager
    async def _open_medium(self, tier: Tier) -> AsyncIterator[OffloadMedium | None]:
        """Open the copy at a tier; None if there is none."""
        medium: MemorySegment | OffloadFile | None = None
        if tier == Tier.MEMORY and self.segment_owner:
            segment = await self._worker.call(Worker.find_segment, self._key)
            medium = self._map(segment) if segment.path else None
        elif tier == Tier.DISK and self.directory:
            with suppress(FileNotFoundError):
                medium = OffloadFile(self._file)
        try:
            yield medium
        finally:
            if isinstance(medium, OffloadFile):
                medium.close()

    def _map(self, segment: SegmentLocation) -> MemorySegment:
        """Map a segment, or return its earlier mapping."""
        found = MemorySegment(segment.path, self._mesh.name)
        mapped = self._mapped.pop(found.inode, found)
        self._mapped[found.inode] = mapped  # the last one
        if len(self._mapped) > MAX_MAPPED:
            self._mapped.pop(next(iter(self._mapped))).close()
        return mapped

    async def _quarantine(self, tier: Tier, error: CorruptData) -> None:
        """Quarantine a corrupt copy and publish the event; its user continues from a checkpoint."""
        self._mesh.telemetry.log.error("damaged", path=error.where, why=error.message)
        if tier == Tier.MEMORY:
            await self.drop(tier)
            return
        quarantined = await self._run_to_end(
            corruption.quarantine, self._file, Path(self.directory)
        )
        self.stored_bytes[tier] = 0
        then = "quarantined; the process continues from the job's checkpoint"
        event_fields = corruption.make_event_fields(
            "kept", self._file, error.message, then, quarantined_path=quarantined
        )
        state = self._mesh.state
        await retry(
            self._mesh.clock,
            lambda: events.append(state, corruption.CORRUPTION_EVENT, event_fields),
        )

    async def _copy(self, work: Any, *args: Any, cancel: Cancellation | None) -> None:
        """Run a copy; a cancellation or an expired deadline ends it between two chunks."""
        cancel = cancel or Cancellation()
        try:
            await self._run_to_end(work, *args, cancel, on_cancel=cancel.request)
        except DeadlineExceeded:
            cancel.request()
            raise

    async def _run_to_end(
        self, work: Any, *args: Any, on_cancel: Callable[[], None] = lambda: None
    ) -> Any:
        """Run `work` and return its result; a cancellation waits for it, since it uses open
        files.
        """
        running = self._mesh.host.run_blocking(work, *args, deadline_s=COPY_TIMEOUT_S)
        task = asyncio.create_task(running)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            on_cancel()
            task.add_done_callback(consume_exception)
            await asyncio.wait([task])
            raise


def _read_and_restore(medium: OffloadMedium, target: OffloadTarget, cancel: Cancellation) -> None:
    offloaded_tensors.restore(medium, offloaded_tensors.read_header(medium), target, cancel)


def _remove_files(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.new").unlink(missing_ok=True)
