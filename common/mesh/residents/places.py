"""Where a role process keeps its tensors while it sleeps: in a segment that its worker owns, or in
a file. Both outlive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from meshrl.common.api.node import MakeSegment, Worker
from meshrl.common.base.errors import Damaged, MeshError, Refused
from meshrl.common.base.files import damage, kept
from meshrl.common.base.files.kept import Content, File, Head, Mapped, Medium, Resumable
from meshrl.common.base.host.settings import kept_file
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.mesh.runtime.serial_executor import looked_at
from meshrl.common.state import events
from meshrl.common.state.pool.workers.rows import Tier

COPY_S = 900.0  # tensors of some 100 GB to a disk


class Places:
    """What a process has kept; `segments` is its worker, `files` a directory, empty where it was
    told none.
    """

    def __init__(self, mesh: Mesh, segments: str = "", files: str = "") -> None:
        self._mesh = mesh
        self.segments, self.files = segments, files
        self.held = {Tier.MEMORY: 0, Tier.DISK: 0}  # bytes

    def told(self, segments: str, files: str) -> None:
        """Takes in what a worker says, where it was told nothing before. Refused: these are other
        places than those of the worker that has started this process.
        """
        for own, said in ((self.segments, segments), (self.files, files)):
            if own and said and said != own:
                raise Refused(
                    f"it is to keep its tensors at {said}, and its worker's place is {own}",
                    where=self._mesh.name,
                    fix="Who says so is not its worker: `meshrl hosts` lists who may belong here",
                )
        self.segments, self.files = self.segments or segments, self.files or files

    async def keep(self, tier: Tier, about: Mapping[str, Any], content: Content) -> None:
        """Keeps a copy at a tier. Refused or StorageFull when there is no room, and there is none
        at that tier then.
        """
        size = kept.room_for(about, content.sizes)
        async with self._fresh(tier, size) as medium:
            await self._run(kept.keep, medium, about, content)

    async def move(self, source: Tier, target: Tier) -> None:
        """Copies what is kept from one tier to another, and drops it at the first. Damaged when it
        is not what was kept; Refused or StorageFull leave it there.
        """
        async with self._opened(source) as lying:
            if lying is None:
                raise Damaged("nothing is kept there any more", where=self._named(source))
            head = await self._run(kept.head_of, lying)
            size = kept.room_for(head.about, head.sizes)
            async with self._fresh(target, size) as medium:
                await self._run(kept.moved, lying, medium)
        await self.drop(source)

    async def take(self, tier: Tier, content: Resumable) -> None:
        """Puts what is kept at a tier back to `content`, and leaves it there. Damaged when it is
        not what was kept; it is set aside then.
        """
        async with self._opened(tier) as medium:
            if medium is None:
                raise Damaged("nothing is kept there any more", where=self._named(tier))
            try:
                head = await self._run(kept.head_of, medium)
                await self._run(kept.take, medium, head, content)
                return
            except Damaged as error:
                found = error
        await self._set_aside(tier, found)
        raise found

    async def found(self) -> tuple[Tier, Head] | None:
        """What an earlier start of this process has kept and is whole; what is not is removed."""
        for tier in (Tier.MEMORY, Tier.DISK):
            try:
                async with self._opened(tier) as medium:
                    if medium is not None:
                        head = await self._run(kept.head_of, medium)
                        self.held[tier] = medium.size
                        return tier, head
            except Damaged as error:
                self._mesh.telemetry.log.warning("half kept", why=str(error))
                await self.drop(tier)
        return None

    async def drop(self, tier: Tier) -> None:
        """Gives up what is kept at a tier, if anything is."""
        self.held[tier] = 0
        if tier == Tier.MEMORY and self.segments:
            await self._worker.call(Worker.drop_segment, self._mesh.name)
        elif tier == Tier.DISK and self.files:
            await self._run(_remove, self._file)

    async def forget(self) -> None:
        """Gives up all that is kept. A worker that is away has let go of it, or does so later."""
        for tier in (Tier.MEMORY, Tier.DISK):
            with suppress(MeshError):
                await self.drop(tier)

    @property
    def _worker(self) -> Any:
        return self._mesh.ref(self.segments)

    @property
    def _file(self) -> Path:
        return kept_file(self.files, self._mesh.name)

    def _named(self, tier: Tier) -> str:
        return str(self._file) if tier == Tier.DISK else self.segments

    @asynccontextmanager
    async def _fresh(self, tier: Tier, size: int) -> AsyncIterator[Medium]:
        """Room for so much; it is gone again unless all goes well inside."""
        medium: Mapped | File
        if tier == Tier.MEMORY and self.segments:
            request = MakeSegment(self._mesh.name, size)
            segment = await self._worker.call(Worker.make_segment, request)
            medium = Mapped(segment.path, self._mesh.name)
        elif tier == Tier.DISK and self.files:
            medium = File(self._file, fresh=True)
        else:
            raise Refused(
                f"it was told no place of the tier '{tier}'",
                where=self._mesh.name,
                fix="its worker names one in Settle",
            )
        try:
            yield medium
            if isinstance(medium, File):
                await self._run(medium.finished)
        except BaseException:
            medium.close()
            if tier == Tier.MEMORY:
                with suppress(MeshError):
                    await self.drop(tier)
            raise
        medium.close()
        self.held[tier] = size

    @asynccontextmanager
    async def _opened(self, tier: Tier) -> AsyncIterator[Medium | None]:
        """What is kept at a tier; None: nothing is."""
        medium: Mapped | File | None = None
        if tier == Tier.MEMORY and self.segments:
            segment = await self._worker.call(Worker.find_segment, self._mesh.name)
            medium = Mapped(segment.path, self._mesh.name) if segment.path else None
        elif tier == Tier.DISK and self.files:
            with suppress(FileNotFoundError):
                medium = File(self._file)
        try:
            yield medium
        finally:
            if medium is not None:
                medium.close()

    async def _set_aside(self, tier: Tier, error: Damaged) -> None:
        """Out of the way, and told: whoever needs it goes on from a checkpoint."""
        self._mesh.telemetry.log.error("damaged", path=error.where, why=error.message)
        if tier == Tier.MEMORY:
            await self.drop(tier)
            return
        aside = await self._run(damage.set_aside, self._file, Path(self.files))
        self.held[tier] = 0
        then = "set aside; it goes on from the job's checkpoint"
        told = damage.fields("kept", self._file, error.message, then, aside=aside)
        state = self._mesh.state
        await patiently(self._mesh.clock, lambda: events.append(state, damage.EVENT, told))

    async def _run(self, work: Any, *args: Any) -> Any:
        """What `work` returns; a cancellation waits for it, since it holds what is open."""
        running = self._mesh.host.run_blocking(work, *args, deadline_s=COPY_S)
        task = asyncio.create_task(running)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(looked_at)
            await asyncio.wait([task])
            raise


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.new").unlink(missing_ok=True)
