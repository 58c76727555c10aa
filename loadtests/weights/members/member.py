"""Process that publishes or receives versions by orders over its channel.

Usage:

python -m loadtests.weights.members.member publisher trainer/JOB JOB
python -m loadtests.weights.members.member receiver engine/g0 JOB
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtests.weights import contents, models
from loadtests.weights.contents import Tensors, staged_whole
from loadtests.weights.members.orders import obey
from loadtests.weights.members.peers import download
from meshrl.common.api.calls.interface import ChangeHint, Interface
from meshrl.common.api.engine import Engine
from meshrl.common.api.trainer import RestageResult, Trainer
from meshrl.common.api.transfer.deltas import VersionRef
from meshrl.common.api.weights import STORE_NAME, Checkpoint, Weights
from meshrl.common.base.digest import compute_digest
from meshrl.common.job.config import JobConfig, RolloutConfig, TrainingConfig
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.records.checkpoints import format_checkpoint_name
from meshrl.common.state import jobs, registry, steps
from meshrl.common.weights import receiver
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.delta.sender import DeltaSender
from meshrl.common.weights.layout.version_image import load_tensor
from meshrl.common.weights.store.chunk_cache import serve_cache

PIECE_BYTES = 4 << 20  # that are copied together: no more than the smallest tensor has


class RestageCalls(Interface):
    """Calls of a trainer's interface about versions that the store lacks."""


RestageCalls.methods = {
    name: method for name, method in Trainer.methods.items() if name == "restage_version"
}


class Publisher(Actor):
    """Holds the tensors of a job, stages and commits them, as a trainer does."""

    interface = RestageCalls

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job, self._bulk = mesh, job, BulkClient(mesh)
        self._deltas = DeltaSender(mesh, self._bulk, job, TrainingConfig())
        self._staged: tuple[str, Tensors, int, int] = ("", {}, 0, 0)  # last, and its manifest
        self._step = -1
        self.tensors: Tensors = {}

    def make(self, size: int, dtype: str = "bfloat16", seed: int = 0) -> dict[str, Any]:
        self.tensors = contents.drawn(size, contents.DTYPES[dtype], seed)
        return {"bytes": sum(tensor.nbytes for tensor in self.tensors.values())}

    def model(self, name: str, seed: int) -> None:
        self.tensors = models.drawn(name, seed)

    async def submit(self, run_dir: str) -> None:
        document = JobConfig(
            name=self._job, rollout=RolloutConfig(kv_on_update="keep")
        ).to_document()
        await jobs.submit(self._mesh.state, self._job, document, run_dir, f"submit {self._job}")
        self._step = -1

    def resume(self, step: int) -> None:
        """Continue after the version that another publisher has committed last."""
        self._step = step

    async def commit(self, digest: str) -> dict[str, Any]:
        """Make a staged version the job's current one; return when, and its number."""
        mesh, store = self._mesh, self._mesh.ref(STORE_NAME)
        step = self._step + 1
        asked = Checkpoint(self._job, 0, step, digest, {"version": step}, {})
        name = format_checkpoint_name(0, step, digest)
        run_dir = Path((await jobs.read_job(mesh.state, self._job)).run_dir)
        (run_dir / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        names = steps.VersionReferences(digest, await store.call(Weights.save_checkpoint, asked))
        begun = (mesh.state, self._job, mesh.name, mesh.token, 0)
        if step:
            done = steps.StepCommit(step, [], [], names, {}, {}, checkpointed_version=step)
            await steps.commit_step(*begun, done)
        else:
            await steps.commit_initial(*begun, names)
        self._step = step
        for entry in await registry.list_entries(mesh.state, "engine"):
            if entry.alive and entry.name.startswith("engine/"):
                await mesh.ref(entry.name).cast(Engine.notify_change, ChangeHint("version"))
        return {"at": time.monotonic(), "version": step}

    def change(self, share: float, seed: int) -> dict[str, Any]:
        count = contents.change(self.tensors, share, seed)
        return {"share": count / sum(tensor.numel() for tensor in self.tensors.values())}

    async def stage(self, version: int, lineage: int = 0, deltas: bool = False) -> dict[str, Any]:
        """Stage the tensors as a version; start its deltas if requested."""
        started_s, used = time.monotonic(), time.process_time()
        digest = await self._write(self.tensors, version, lineage)
        staged, cpu = time.monotonic(), time.process_time() - used
        if deltas:
            await self._deltas.start(VersionRef(lineage, version, digest))
        return {"digest": digest, "staged": staged, "took_s": staged - started_s, "cpu_s": cpu}

    async def _write(self, tensors: Tensors, version: int, lineage: int) -> str:
        digest = await staged_whole(self._mesh, self._bulk, self._job, lineage, version, tensors)
        self._staged = (digest, tensors, version, lineage)
        return digest

    @call(Trainer.restage_version)
    async def restage(self, manifest: str) -> RestageResult:
        digest, tensors, version, lineage = self._staged
        if digest != manifest:
            return RestageResult(False)
        return RestageResult(await self._write(tensors, version, lineage) == digest)

    def identity(self) -> str:
        return contents.identity_of(self.tensors)


class Receiver:
    """Holds tensors that versions are received into, as an engine does."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._receiver = receiver.WeightReceiver(mesh, BulkClient(mesh), wants_deltas=True)
        self.tensors: Tensors = {}
        self._beside: Tensors = {}

    def ready(self, size: int, dtype: str = "bfloat16") -> None:
        self.tensors = contents.empty(size, contents.DTYPES[dtype])

    def take(self, model: str) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in models.drawn(model, 0).items()}

    async def receive(self, digest: str, at: float = 0.0) -> dict[str, Any]:
        """Receive a version, at a time of the clock that all processes share if one is given."""
        if at:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
        started_s, used = time.monotonic(), time.process_time()
        image = await self._receiver.receive(digest)
        for name, target in self.tensors.items():
            load_tensor(image.tensors, name, target)
        ended = time.monotonic()
        return {
            "began": started_s,
            "ended": ended,
            "took_s": ended - started_s,
            "cpu_s": time.process_time() - used,
            "copies_per_byte": image.copied_bytes / max(1, image.size_bytes),
        }

    def identity(self) -> str:
        return contents.identity_of(self.tensors)

    def spoil(self) -> None:
        """Overwrite the tensors, so that the next version must be fetched in full."""
        for tensor in self.tensors.values():
            tensor.fill_(1)

    def memcpy(self) -> dict[str, Any]:
        """Copy as many bytes between resident pages."""
        if not self._beside:
            self._beside = {name: tensor.clone() for name, tensor in self.tensors.items()}
        started_s, used = time.monotonic(), time.process_time()
        for name, tensor in self.tensors.items():
            tensor.copy_(self._beside[name])
        return {"took_s": time.monotonic() - started_s, "cpu_s": time.process_time() - used}

    def download(self, port: int, name: str) -> dict[str, Any]:
        return download(port, name, self.tensors)

    def parts(self, files: list[str]) -> dict[str, Any]:
        """Return the CPU-seconds of hashing and copying mapped chunk files.

        They are hashed by the mesh's digest and by SHA-256, and then copied into the process's own
        tensors.
        """
        mapped = [np.memmap(path, np.uint8, "r") for path in files]
        started_s, used = time.monotonic(), time.process_time()
        for content in mapped:
            compute_digest(content.data)
        hashed = time.process_time()
        for content in mapped:
            hashlib.sha256(content.data).digest()
        sha256 = time.process_time()
        room = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in self.tensors.values()]
        pieces = (
            (c[at : at + PIECE_BYTES]) for c in mapped for at in range(0, len(c), PIECE_BYTES)
        )
        for number, piece in enumerate(pieces):
            target = room[number % len(room)]
            np.copyto(target[: len(piece)], piece)
        copied = time.process_time()
        return {
            "hash_s": hashed - used,
            "sha256_s": sha256 - hashed,
            "copy_s": copied - sha256,
            "cpu_s": copied - used,
            "took_s": time.monotonic() - started_s,
        }


class Agent:
    """Server of the versions that its host has received, like the host's agent."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self.bulk = serve_cache(mesh)

    @property
    def address(self) -> str:
        return self.bulk.address if self.bulk is not None else ""


Kind = type[Publisher] | type[Receiver] | type[Agent]
KINDS: dict[str, tuple[Kind, str]] = {
    "publisher": (Publisher, "trainer"),
    "receiver": (Receiver, "engine"),
    "agent": (Agent, "node"),
}


async def main(which: str, name: str, job: str) -> None:
    torch.set_num_threads(1)
    make, kind = KINDS[which]
    mesh = await Mesh.open(name, kind, MeshSettings.from_env(), job)
    member = make(mesh, job)
    actor = member if isinstance(member, Actor) else None
    await mesh.join(actor, bulk_address=getattr(member, "address", ""))
    await obey(member)
    os._exit(0)  # exits without deregistering: the parent process ends it


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
