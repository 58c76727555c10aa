"""The weight store: versions and checkpoints as manifests over content-addressed chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api.transfer.bulk import SPACES
from meshrl.common.api.weights import (
    Checkpoint,
    CheckpointName,
    Clear,
    Examine,
    Fetch,
    KeepLines,
    LayOut,
    Manifest,
    Names,
    Publish,
    Published,
    Seek,
    SetAside,
    Sources,
    Weights,
)
from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import (
    AlreadyCommitted,
    BadMessage,
    Damaged,
    DeadlineExceeded,
    NotFound,
    Refused,
)
from meshrl.common.base.files import damage
from meshrl.common.base.files.damage import FATES
from meshrl.common.base.files.sealed import sealed
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.checkpoints import (
    NAME,
    check_paths,
    checkpoint_name,
    manifest_of,
    older,
    set_aside,
)
from meshrl.common.state import jobs
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.chunks.chunks import WHY, failure
from meshrl.common.weights.layout.manifest import joined, packed, unpacked
from meshrl.services.weights import home
from meshrl.services.weights.deltas import DeltaSets, WithDeltas
from meshrl.services.weights.home import Errands, TaskProgress
from meshrl.services.weights.keeping.records import IO_S, JOBS, JobRecords
from meshrl.services.weights.keeping.retention import Number
from meshrl.services.weights.keeping.sweeping import Sweeper, SweepPace, Untold
from meshrl.services.weights.relaying import Tracker

T = TypeVar("T")
HOME_S = 900.0  # to rename and remove files at a run's home; see the deadlines of the calls
SHARDS = 1024  # whose last lines are known: more files than are written at a time


class WeightStore(WithDeltas):
    """Manifests in `chunks` beside what they name; checkpoints as JSON files under
    `<run>/checkpoints`; what must stay on record in `chunks`' directory `jobs`.
    """

    interface = Weights

    def __init__(
        self,
        mesh: Mesh,
        chunks: ChunkStore,
        errands: Errands | None = None,
        pace: SweepPace = SweepPace(),  # noqa: B008 (it does not change)
    ) -> None:
        self.mesh, self.chunks = mesh, chunks
        self._manifests: dict[str, Manifest] = {}
        # The last operation of a shard with samples, the last shards that had one.
        self._kept: dict[tuple[str, int, str], str] = {}
        self.records = JobRecords(mesh.host, chunks.directory / JOBS)
        self._untold = Untold(mesh, chunks.untold)
        self._errands = errands or Errands(mesh)
        self._tracker = Tracker(mesh.clock, mesh.name)
        self.deltas = DeltaSets(mesh)
        self.sweeper = Sweeper(
            mesh,
            chunks,
            self.records,
            self._untold,
            self.deltas,
            self._manifest,
            self._manifests,
            pace,
        )

    def stats(self) -> dict[str, Any]:
        held = {"manifests": len(self._manifests), "sweeps": self.sweeper.sweeps}
        held |= self._tracker.stats()
        return held | self.sweeper.quotas.stats() | self.deltas.stats()

    async def start(self) -> None:
        for lost in await self.records.open():
            then = "made again from Redis and the checkpoints; until then nothing is swept"
            told = damage.fields(
                "versions", lost.path, lost.why, then, job=lost.job, aside=lost.aside
            )
            await self._untold.tell(told)

    async def stop(self) -> None:
        await self._errands.stop()

    async def sweep_forever(self) -> None:
        await self.sweeper.forever()

    @call(Weights.stage)
    async def stage(self, manifest: Manifest) -> str:
        """Makes a version's manifest durable, and keeps it until the job's commits have passed it;
        Refused when a chunk that it names is not there, AlreadyCommitted when the lineage has
        other weights of that version, QuotaExceeded.
        """
        content = packed(manifest)
        digest = digest_of(content)
        await self._refuse_what_may_not(manifest, digest)
        versions = self.records.of(manifest.job).versions
        # A sweep that runs meanwhile knows the version from here on.
        self._manifests[digest] = manifest
        versions[digest] = Number(manifest.lineage, manifest.version)
        try:
            await self._touch_base(manifest)
            await self.mesh.host.run_blocking(self._touch, manifest, deadline_s=IO_S)
        except (Refused, NotFound, Damaged):
            del versions[digest]
            self._manifests.pop(digest, None)
            raise
        await self.mesh.host.run_blocking(self.chunks.write, content, deadline_s=IO_S)
        await self.records.save(manifest.job)
        return digest

    async def _refuse_what_may_not(self, manifest: Manifest, digest: str) -> None:
        """A version is committed once in its lineage, also when Redis has forgotten that it was;
        and a job's versions have no more bytes than its quota.
        """
        record, row = self.records.of(manifest.job), None
        with suppress(NotFound):  # a job that Redis has lost tells nothing
            row = await jobs.job(self.mesh.state, manifest.job)
            record.saw_commit(Number(row.lineage, row.version), row.manifest)
        number = Number(manifest.lineage, manifest.version)
        if other := record.conflict(number, digest):  # no room would mend that
            raise AlreadyCommitted(
                f"version {number.version} of lineage {number.lineage} of {manifest.job} is "
                f"committed as {other}, and {digest} is offered for it",
                where=self.mesh.name,
                fix="Redis may be older than it was: `meshrl resume RUN` opens a new lineage",
            )
        if row is not None and digest not in record.versions:  # those take their room already
            await self.sweeper.quotas.refuse(row, manifest)

    def _touch(self, manifest: Manifest) -> None:
        """Refused when one of the chunks is not there; the others count as written now."""
        chunks = {tensor.chunk for tensor in manifest.tensors}
        missing = [chunk for chunk in sorted(chunks) if not self.chunks.touch(chunk)]
        if missing:
            raise Refused(
                f"version {manifest.version}: chunk {missing[0]} is not stored",
                where=self.mesh.name,
                fix="put the chunks before the manifest",
            )

    @call(Weights.manifest)
    async def manifest(self, request: Fetch) -> Manifest:
        found = await self._manifest(request.digest)
        if request.alone or found.base is None:
            return found
        return joined(found, await self._manifest(found.base.digest))

    async def _manifest(self, digest: str) -> Manifest:
        if digest not in self._manifests:
            read = self.chunks.read
            try:
                content = await self.mesh.host.run_blocking(read, digest, deadline_s=IO_S)
            except Damaged:
                await self._examined(self.chunks, digest, "weights", "")
                raise
            self._manifests[digest] = unpacked(content, str(self.chunks.path(digest)))
        return self._manifests[digest]

    @call(Weights.sources)
    def sources(self, request: Seek) -> Sources:
        return self._tracker.answer(request)

    @call(Weights.examine)
    async def examine(self, request: Examine) -> bool:
        """A chunk that is not what was written is set aside, and whoever has its bytes writes it
        again.
        """
        if request.space not in SPACES or request.kind not in FATES:
            raise BadMessage(f"no chunks of {request.kind!r:.40} in {request.space!r:.40}")
        chunks = self.chunks.space(request.space)
        return await self._examined(chunks, request.digest, request.kind, request.job)

    async def _examined(self, chunks: ChunkStore, digest: str, kind: str, job: str) -> bool:
        def look() -> bool:
            whole, aside = chunks.examine(digest)
            if aside is not None:
                path, then = chunks.path(digest), FATES[kind]
                self._untold.add(damage.fields(kind, path, WHY, then, job=job, aside=aside))
            return whole

        whole = await self.mesh.host.run_blocking(look, deadline_s=IO_S)
        await self._untold.tell_all()
        return whole

    # -- checkpoints -----------------------------------------------------------------------------

    @call(Weights.save)
    async def save(self, request: Checkpoint) -> str:
        """Writes a checkpoint's manifest; it counts once a step commit names it."""
        # Whoever writes it: a trainer that was replaced, and wakes, must not write over what its
        # successor has committed, so the name tells the weights too.
        name = checkpoint_name(request.lineage, request.step, request.weights)
        check_paths(request.files)
        manifest, run = await self._manifest(request.weights), self.mesh.host.run_blocking
        await self._touch_manifest(request.weights)
        await self._touch_base(manifest)
        await run(self._touch, manifest, deadline_s=IO_S)
        row = await jobs.job(self.mesh.state, request.job)
        record = self.records.of(request.job)
        if record.run_dir != row.run_dir:
            record.run_dir = row.run_dir
            await self.records.save(request.job)
        await run(self._write, _path(row, name), sealed(asdict(request)), deadline_s=IO_S)
        return name

    async def _touch_base(self, manifest: Manifest) -> None:
        """Of what adapters are added to only that counts which is not theirs."""
        if manifest.base is None:
            return
        whole = joined(manifest, await self._manifest(manifest.base.digest))
        await self._touch_manifest(manifest.base.digest)
        shared = whole.tensors[: len(whole.tensors) - len(manifest.tensors)]
        others = replace(manifest, tensors=shared)
        await self.mesh.host.run_blocking(self._touch, others, deadline_s=IO_S)

    async def _touch_manifest(self, digest: str) -> None:
        if not await self.mesh.host.run_blocking(self.chunks.touch, digest, deadline_s=IO_S):
            raise Refused(f"manifest {digest} is not stored any more", where=self.mesh.name)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.mesh.host.replace_file(path, content)
        except OSError as error:
            raise failure(error, path) from error

    @call(Weights.lay_out)
    async def lay_out(self, request: LayOut) -> bool:
        """Refused when one of its files is no chunk any more: put them again."""
        row = await jobs.job(self.mesh.state, request.job)
        path = _path(row, request.name)

        def lay_out(moved: TaskProgress) -> bool:
            home.lay_out(self.chunks, path, request.files, moved)
            return True

        key = "lay out", str(path), *sorted(request.files.items())
        what = f"checkpoint {request.name} of {row.id}"
        return await self._errands.joined(key, lay_out, what) or False

    @call(Weights.older)
    async def older(self, request: CheckpointName) -> Names:
        row = await jobs.job(self.mesh.state, request.job)
        return Names(await self._home(older, Path(row.run_dir), request.name))

    @call(Weights.set_aside)
    async def set_aside(self, request: SetAside) -> str:
        path = _path(await jobs.job(self.mesh.state, request.job), request.name)

        def put_aside() -> Path | None:
            aside = set_aside(path)
            if aside is not None:
                self._untold.add({**request.told, "aside": str(aside)}, request.op)
            return aside

        aside = await self._home(put_aside)
        await self._untold.tell_all()
        return str(aside or "")

    @call(Weights.clear)
    async def clear(self, request: Clear) -> None:
        """An older checkpoint without its manifest is damaged, and set aside."""
        row = await jobs.job(self.mesh.state, request.job)

        def tell(path: Path, aside: Path) -> None:
            then = "what is left of it is set aside; the other kept ones are there"
            why = "it is missing"
            self._untold.add(
                damage.fields("checkpoint", path, why, then, job=request.job, aside=aside)
            )

        directory = Path(row.run_dir) / "checkpoints"
        await self._home(home.clear, directory, request.committed, tell)
        await self._untold.tell_all()

    @call(Weights.publish)
    async def publish(self, request: Publish) -> Published:
        """NotFound, or Damaged when a checkpoint's manifest is not what was written."""
        row = await jobs.job(self.mesh.state, request.job)
        if request.checkpoint:
            _path(row, request.checkpoint)
        chunks, checkpoint, below = self.chunks, request.checkpoint, request.below

        def publish(moved: TaskProgress) -> Published:
            return Published(home.publish(chunks, row, checkpoint, below, moved))

        key = "publish", row.run_dir, row.since_ms, checkpoint, *below
        what = f"the files of {checkpoint or 'the bundle of'} {row.id}"
        return await self._errands.joined(key, publish, what) or Published({}, whole=False)

    @call(Weights.keep_lines)
    async def keep_lines(self, request: KeepLines) -> None:
        """StorageFull: they are left out. BadMessage: there is no such file."""
        row, lines = await jobs.job(self.mesh.state, request.job), request.lines.encode()
        key = request.job, row.since_ms, request.file

        def keep(_: TaskProgress) -> bool:
            if self._kept.get(key) != request.op:
                home.keep_lines(self.mesh.host, row, request.file, lines)
                self._kept.pop(key, None)
                self._kept[key] = request.op
                while len(self._kept) > SHARDS:
                    del self._kept[next(iter(self._kept))]
            return True

        # Who asks again while the first writes waits for that.
        if not await self._errands.joined((*key, request.op), keep, f"{request.file} of {row.id}"):
            raise DeadlineExceeded("the disk takes no lines", where=row.run_dir)

    async def _home(self, work: Callable[..., T], *args: Any) -> T:
        return await self.mesh.host.run_blocking(work, *args, deadline_s=HOME_S)

    @call(Weights.load)
    async def load(self, request: CheckpointName) -> Checkpoint:
        path = _path(await jobs.job(self.mesh.state, request.job), request.name)
        held = await self.mesh.host.run_blocking(manifest_of, path, deadline_s=IO_S)
        return Checkpoint(**held)


def _path(row: jobs.JobRow, name: str) -> Path:
    """Of a checkpoint's manifest; BadMessage for what is no name of one."""
    if not NAME.fullmatch(name):
        raise BadMessage(f"{name!r:.80} is no name of a checkpoint")
    return Path(row.run_dir) / "checkpoints" / f"{name}.json"
