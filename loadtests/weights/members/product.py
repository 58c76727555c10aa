"""What is measured: how the processes of a mesh publish and receive versions. The only module here
that knows their functions.
"""

from __future__ import annotations

from typing import Any

from loadtests.weights.contents import Tensors
from loadtests.weights.whole import staged_whole
from meshrl.common.api.calls.interface import Interface, Look
from meshrl.common.api.engine import Engine
from meshrl.common.api.trainer import Restaged, Trainer
from meshrl.common.api.transfer.deltas import Base
from meshrl.common.api.weights import STORE, Checkpoint, Weights
from meshrl.common.job.config import JobConfig, RolloutConfig, TrainingConfig
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import jobs, registry, steps
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.delta.sending import DeltaSender
from meshrl.common.weights.layout.images import load_tensor
from meshrl.common.weights.receive import Receiver


class RestageCalls(Interface):
    """What of a trainer's interface is about versions that the store lacks."""


RestageCalls.methods = {
    name: method for name, method in Trainer.methods.items() if name == "restage"
}


class Publishing(Actor):
    """A trainer's side."""

    interface = RestageCalls

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job, self._bulk = mesh, job, BulkClient(mesh)
        self._staged: tuple[str, Tensors, int, int] = ("", {}, 0, 0)  # last, and its manifest
        self._deltas = DeltaSender(mesh, self._bulk, job, TrainingConfig())
        self.step = -1

    async def deltas(self, digest: str, version: int, lineage: int) -> None:
        """Begins to make the deltas to a version that was staged."""
        await self._deltas.begin(Base(lineage, version, digest))

    async def stage(self, tensors: Tensors, version: int, lineage: int) -> str:
        """Makes a version durable; the digest of its manifest."""
        digest = await staged_whole(self._mesh, self._bulk, self._job, lineage, version, tensors)
        self._staged = (digest, tensors, version, lineage)
        return digest

    @call(Trainer.restage)
    async def restage(self, manifest: str) -> Restaged:
        """Writes the last version again."""
        digest, tensors, version, lineage = self._staged
        if digest != manifest:
            return Restaged(False)
        return Restaged(await self.stage(tensors, version, lineage) == digest)

    async def submit(self, run_dir: str) -> None:
        """Puts the job on record."""
        document = JobConfig(name=self._job, rollout=RolloutConfig(kv_on_update="keep")).document()
        await jobs.submit(self._mesh.state, self._job, document, run_dir, f"submit {self._job}")
        self.step = -1

    async def commit(self, digest: str) -> int:
        """Makes a staged version the job's current one; its number."""
        mesh, store = self._mesh, self._mesh.ref(STORE)
        step = self.step + 1
        asked = Checkpoint(self._job, 0, step, digest, {"version": step}, {})
        saved = await store.call(Weights.save, asked)
        begun = (mesh.state, self._job, mesh.name, mesh.token, 0)
        if step:
            await steps.commit_step(
                *begun,
                steps.StepCommit(
                    step, [], [], steps.VersionNames(digest, saved), {}, {}, covered=step
                ),
            )
        else:
            await steps.commit_initial(*begun, steps.VersionNames(digest, saved))
        self.step = step
        for entry in await registry.entries(mesh.state, "engine"):
            if entry.alive and entry.name.startswith("engine/"):
                await mesh.ref(entry.name).cast(Engine.look, Look("version"))
        return step


class Receiving:
    """An engine's side."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._receiver = Receiver(mesh, BulkClient(mesh), follows=True)

    async def receive(self, digest: str, into: Tensors) -> dict[str, Any]:
        """Puts the version's tensors into those that are there, as an engine does between steps."""
        image = await self._receiver.receive(digest)
        for name, target in into.items():
            load_tensor(image.tensors, name, target)
        return {"copies_per_byte": image.copied_bytes / max(1, image.bytes)}
