"""The weight store: versions and checkpoints as manifests over content-addressed chunks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from common.api.weights import (
    Checkpoint,
    Examine,
    Examined,
    Fetch,
    Load,
    Manifest,
    Saved,
    Stage,
    Staged,
    Weights,
)
from common.errors import AlreadyCommitted, Damaged, NotFound, Refused
from common.records import damage
from common.records.checkpoints import checkpoint_name, manifest_of
from common.records.damage import FATES
from common.records.sealed import sealed
from common.runtime.actor import Actor, call
from common.runtime.mesh import Mesh
from common.state import jobs
from common.wire.blob import pack, unpack
from common.wire.bulk import ChunkStore
from common.wire.chunks import digest_of, failure
from common.wire.weight_store import WHY
from services.weights.records import IO_S, JobRecords
from services.weights.retention import Number
from services.weights.sweeping import Sweeper
from services.weights.untold import Untold


class WeightStore(Actor):
    """Manifests in `chunks` beside what they name; checkpoints as JSON files under
    `<run>/checkpoints`; what must stay on record in `chunks`' directory `jobs`.
    """

    interface = Weights

    def __init__(self, mesh: Mesh, chunks: ChunkStore) -> None:
        self.mesh, self.chunks = mesh, chunks
        self._manifests: dict[str, Manifest] = {}
        self._records = JobRecords(mesh.host, chunks.directory / "jobs")
        self._untold = Untold(mesh)
        self.sweeper = Sweeper(
            mesh, chunks, self._records, self._untold, self._manifest, self._forget
        )

    def stats(self) -> dict[str, Any]:
        return {"manifests": len(self._manifests)}

    async def start(self) -> None:
        for lost in await self._records.open():
            then = "made again from Redis and the checkpoints; until then nothing is swept"
            told = damage.fields(
                "versions", lost.path, lost.why, then, job=lost.job, aside=lost.aside
            )
            await self._untold.tell(told)

    async def sweep_forever(self) -> None:
        """Deletes what nothing can need again."""
        await self.sweeper.forever()

    @call(Weights.stage)
    async def stage(self, request: Stage) -> Staged:
        """Makes a version's manifest durable, and keeps it until the job's commits have passed it;
        Refused when a chunk that it names is not there, AlreadyCommitted when the lineage has
        other weights of that version.
        """
        manifest = request.manifest
        content = pack(manifest)
        digest = digest_of(content)
        await self._refuse_a_second(manifest, digest)
        versions = self._records.of(manifest.job).versions
        # A sweep that runs meanwhile knows the version from here on.
        self._manifests[digest] = manifest
        versions[digest] = Number(manifest.lineage, manifest.version)
        try:
            await self.mesh.host.run_blocking(self._touch, manifest, deadline_s=IO_S)
        except Refused:
            del versions[digest]
            self._forget(digest)
            raise
        await self.mesh.host.run_blocking(self.chunks.write, content, deadline_s=IO_S)
        await self._records.save(manifest.job)
        return Staged(digest)

    async def _refuse_a_second(self, manifest: Manifest, digest: str) -> None:
        """A version is committed once in its lineage, also when Redis has forgotten that it was."""
        record = self._records.of(manifest.job)
        with suppress(NotFound):  # a job that Redis has lost tells nothing
            row = await jobs.job(self.mesh.state, manifest.job)
            record.saw_commit(Number(row.lineage, row.version), row.manifest)
        number = Number(manifest.lineage, manifest.version)
        if other := record.conflict(number, digest):
            raise AlreadyCommitted(
                f"version {number.version} of lineage {number.lineage} of {manifest.job} is "
                f"committed as {other}, and {digest} is offered for it",
                where=self.mesh.name,
                fix="Redis may be older than it was: `meshrl resume RUN` opens a new lineage",
            )

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
        return await self._manifest(request.digest)

    async def _manifest(self, digest: str) -> Manifest:
        if digest not in self._manifests:
            read = self.chunks.read
            try:
                content = await self.mesh.host.run_blocking(read, digest, deadline_s=IO_S)
            except Damaged:
                await self._examined(digest, "weights", "")
                raise
            self._manifests[digest] = unpack(Manifest, content)
        return self._manifests[digest]

    @call(Weights.examine)
    async def examine(self, request: Examine) -> Examined:
        """A chunk that is not what was written is set aside, and whoever has its bytes writes it
        again.
        """
        return Examined(await self._examined(request.digest, request.kind, request.job))

    async def _examined(self, digest: str, kind: str, job: str) -> bool:
        look = self.chunks.examine
        whole, aside = await self.mesh.host.run_blocking(look, digest, deadline_s=IO_S)
        if aside is not None:
            path = self.chunks.path(digest)
            told = damage.fields(kind, path, WHY, FATES[kind].then, job=job, aside=aside)
            await self._untold.tell(told)
        return whole

    def _forget(self, digest: str) -> None:
        self._manifests.pop(digest, None)

    # -- checkpoints -----------------------------------------------------------------------------

    @call(Weights.save)
    async def save(self, request: Checkpoint) -> Saved:
        """Writes a checkpoint's manifest; it counts once a step commit names it."""
        # Whoever writes it: a trainer that was replaced, and wakes, must not write over what its
        # successor has committed, so the name tells the weights too.
        name = checkpoint_name(request.lineage, request.step, request.weights)
        await self._still_stored(request.weights)
        row = await jobs.job(self.mesh.state, request.job)
        record = self._records.of(request.job)
        if record.run_dir != row.run_dir:
            record.run_dir = row.run_dir
            await self._records.save(request.job)
        document = {
            "job": request.job,
            "lineage": request.lineage,
            "step": request.step,
            "weights": request.weights,
            "account": request.account,
            "files": request.files,
        }
        content = sealed(document)
        path = _path(row, name)
        await self.mesh.host.run_blocking(self._write, path, content, deadline_s=IO_S)
        return Saved(name)

    async def _still_stored(self, digest: str) -> None:
        manifest = await self._manifest(digest)
        touched = await self.mesh.host.run_blocking(self.chunks.touch, digest, deadline_s=IO_S)
        if not touched:
            raise Refused(f"manifest {digest} is not stored any more", where=self.mesh.name)
        await self.mesh.host.run_blocking(self._touch, manifest, deadline_s=IO_S)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.mesh.host.replace_file(path, content)
        except OSError as error:
            raise failure(error, path) from error

    @call(Weights.load)
    async def load(self, request: Load) -> Checkpoint:
        """NotFound, or Damaged when its manifest is not what was written."""
        path = _path(await jobs.job(self.mesh.state, request.job), request.name)
        held = await self.mesh.host.run_blocking(manifest_of, path, deadline_s=IO_S)
        return Checkpoint(**held)


def _path(row: jobs.JobRow, name: str) -> Path:
    return Path(row.run_dir) / "checkpoints" / f"{name}.json"
