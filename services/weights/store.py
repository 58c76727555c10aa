"""The weight store: versions and checkpoints as manifests over content-addressed chunks, and what
to keep of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from common.actor import Actor, call
from common.api.weights import Checkpoint, Fetch, Load, Manifest, Saved, Stage, Staged, Weights
from common.blob import pack, unpack
from common.bulk import ChunkStore
from common.checkpoints import checkpoint_name
from common.errors import MeshError, NotFound, Refused
from common.mesh import Mesh
from common.state import groups, jobs
from services.weights.retention import expired, pinned

SWEEP_S = 5.0
YOUNG_S = 60.0  # a chunk this young may belong to a manifest that is still being staged
IO_S = 30.0  # deadline of one file operation


class WeightStore(Actor):
    """Manifests in `chunks` beside what they name; checkpoints as JSON files under
    `<run>/checkpoints`.
    """

    interface = Weights

    def __init__(self, mesh: Mesh, chunks: ChunkStore) -> None:
        self.mesh, self.chunks = mesh, chunks
        self._manifests: dict[str, Manifest] = {}
        self._run_dirs: dict[str, Path] = {}

    def stats(self) -> dict[str, Any]:
        return {"manifests": len(self._manifests)}

    @call(Weights.stage)
    async def stage(self, request: Stage) -> Staged:
        """Makes a version's manifest durable; Refused when a chunk that it names is not there."""
        content = pack(request.manifest)
        self._touch(request.manifest)
        digest = await self.mesh.host.run_blocking(self.chunks.write, content, deadline_s=IO_S)
        self._manifests[digest] = request.manifest
        return Staged(digest)

    def _touch(self, manifest: Manifest) -> None:
        """Makes the chunks young, so that a sweep spares them; Refused when one is not there."""
        missing = [t.chunk for t in manifest.tensors if not self.chunks.touch(t.chunk)]
        if missing:
            raise Refused(
                f"version {manifest.version}: chunk {missing[0]} is not stored",
                where=self.mesh.name,
                fix="put the chunks before the manifest",
            )

    async def _keep(self, digest: str) -> None:
        manifest = await self._manifest(digest)
        if not self.chunks.touch(digest):
            raise Refused(f"manifest {digest} is not stored any more", where=self.mesh.name)
        self._touch(manifest)

    @call(Weights.manifest)
    async def manifest(self, request: Fetch) -> Manifest:
        return await self._manifest(request.digest)

    async def _manifest(self, digest: str) -> Manifest:
        if digest not in self._manifests:
            read = self.chunks.read
            content = await self.mesh.host.run_blocking(read, digest, deadline_s=IO_S)
            self._manifests[digest] = unpack(Manifest, content)
        return self._manifests[digest]

    @call(Weights.save)
    async def save(self, request: Checkpoint) -> Saved:
        """Writes a checkpoint's manifest; it counts once a step commit names it."""
        # Whoever writes it: a trainer that was replaced, and wakes, must not write over what its
        # successor has committed, so the name tells the weights too.
        name = checkpoint_name(request.lineage, request.step, request.weights)
        await self._keep(request.weights)
        path = await self._checkpoint_path(request.job, name)
        document = {
            "job": request.job,
            "lineage": request.lineage,
            "step": request.step,
            "weights": request.weights,
            "account": request.account,
        }
        content = json.dumps(document, indent=1).encode()
        await self.mesh.host.run_blocking(
            self.mesh.host.replace_file, path, content, deadline_s=IO_S
        )
        return Saved(name)

    @call(Weights.load)
    async def load(self, request: Load) -> Checkpoint:
        path = await self._checkpoint_path(request.job, request.name)
        try:
            content = await self.mesh.host.run_blocking(path.read_bytes, deadline_s=IO_S)
        except FileNotFoundError:
            raise NotFound(f"no checkpoint {request.name} of {request.job}") from None
        return Checkpoint(**json.loads(content))

    async def _checkpoint_path(self, job: str, name: str) -> Path:
        if job not in self._run_dirs:
            row = await jobs.job(self.mesh.state, job)
            if row is None:
                raise NotFound(f"no job is called {job}")
            directory = Path(row.run_dir) / "checkpoints"
            directory.mkdir(parents=True, exist_ok=True)
            self._run_dirs[job] = directory
        return self._run_dirs[job] / f"{name}.json"

    # -- retention -------------------------------------------------------------------------------

    async def sweep_forever(self) -> None:
        """Deletes what nothing can need again."""
        while True:
            await self.mesh.clock.sleep(SWEEP_S)
            try:
                await self._sweep()
            except MeshError as error:
                self.mesh.telemetry.log.warning("sweep", error=str(error))

    async def _sweep(self) -> None:
        live: set[str] = set()
        for row in await jobs.jobs(self.mesh.state):
            live |= await groups.digests(self.mesh.state, row.id)
            live |= await self._checkpoint_digests(row)
        old = await self.mesh.host.run_blocking(
            self.chunks.older_than, YOUNG_S, self.mesh.clock.wall(), deadline_s=IO_S
        )
        dead = [digest for digest in old if digest not in live]
        for digest in dead:
            self._manifests.pop(digest, None)
        await self.mesh.host.run_blocking(self.chunks.delete, dead, deadline_s=IO_S)

    async def _checkpoint_digests(self, row: jobs.JobRow) -> set[str]:
        """Manifests and chunks of the checkpoints to keep; deletes the manifests of the others."""
        directory = Path(row.run_dir) / "checkpoints"
        names = sorted(path.stem for path in directory.glob("step-*.json"))
        keep = int(row.document["training"]["keep_checkpoints"])
        live = pinned(row)
        for name in expired(names, row.checkpoint, keep):
            (directory / f"{name}.json").unlink(missing_ok=True)
            remove = self.mesh.host.run_blocking
            await remove(shutil.rmtree, directory / name, True, deadline_s=IO_S)
            names.remove(name)
        for name in names:
            checkpoint = await self.load(Load(row.id, name))
            live.add(checkpoint.weights)
        for digest in list(live):
            live |= {t.chunk for t in (await self._manifest(digest)).tensors}
        return live
