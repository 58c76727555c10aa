"""A process that publishes versions or receives them, as it is told.

python -m loadtests.weights.members.member publisher trainer/JOB JOB
python -m loadtests.weights.members.member receiver engine/g0 JOB
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
from typing import Any

import numpy as np
import torch

from loadtests.weights import contents, models
from loadtests.weights.members.orders import obey
from loadtests.weights.members.peers import download
from loadtests.weights.members.product import Publishing, Receiving
from meshrl.common.base.digest import digest_of
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.weights.store.host_chunks import serve_cache

PIECE_BYTES = 4 << 20  # that are copied together: no more than the smallest tensor has


class Publisher:
    """Holds the tensors of a job, and stages them."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self.actor = self._publishing = Publishing(mesh, job)
        self.tensors: contents.Tensors = {}

    def make(self, size: int, dtype: str = "bfloat16", seed: int = 0) -> dict[str, Any]:
        """Tensors of `size` bytes together."""
        self.tensors = contents.drawn(size, contents.DTYPES[dtype], seed)
        return {"bytes": sum(tensor.nbytes for tensor in self.tensors.values())}

    def model(self, name: str, seed: int) -> None:
        """The weights of a model of `loadtests.weights.models`."""
        self.tensors = models.drawn(name, seed)

    async def submit(self, run_dir: str) -> None:
        """Puts the job on record."""
        await self._publishing.submit(run_dir)

    def resume(self, step: int) -> None:
        """Goes on after the version that another publisher has committed last."""
        self._publishing.step = step

    async def commit(self, digest: str) -> dict[str, Any]:
        """Makes a version the job's current one; when, and its number."""
        version = await self._publishing.commit(digest)
        return {"at": time.monotonic(), "version": version}

    def change(self, share: float, seed: int) -> dict[str, Any]:
        """Changes so large a share of all elements."""
        count = contents.change(self.tensors, share, seed)
        return {"share": count / sum(tensor.numel() for tensor in self.tensors.values())}

    async def stage(self, version: int, lineage: int = 0, deltas: bool = False) -> dict[str, Any]:
        """Makes what it has a version; its manifest's digest, and when it was staged. `deltas`:
        begins to make those to it.
        """
        began, used = time.monotonic(), time.process_time()
        digest = await self._publishing.stage(self.tensors, version, lineage)
        staged, cpu = time.monotonic(), time.process_time() - used
        if deltas:
            await self._publishing.deltas(digest, version, lineage)
        return {"digest": digest, "staged": staged, "took_s": staged - began, "cpu_s": cpu}

    def identity(self) -> str:
        """Of what it has."""
        return contents.identity_of(self.tensors)


class Receiver:
    """Holds tensors that versions are received into, as an engine does."""

    actor = None

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._receiving = Receiving(mesh, job)
        self.tensors: contents.Tensors = {}
        self._beside: contents.Tensors = {}

    def ready(self, size: int, dtype: str = "bfloat16") -> None:
        """Makes the tensors, whose pages are there then."""
        self.tensors = contents.empty(size, contents.DTYPES[dtype])

    def take(self, model: str) -> None:
        """Makes the tensors of a model of `loadtests.weights.models`."""
        self.tensors = {name: tensor.clone() for name, tensor in models.drawn(model, 0).items()}

    async def receive(self, digest: str, at: float = 0.0) -> dict[str, Any]:
        """Receives a version, from that time on if one is told. `ended`: by the clock that all
        processes share.
        """
        if at:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
        began, used = time.monotonic(), time.process_time()
        about = await self._receiving.receive(digest, self.tensors)
        ended = time.monotonic()
        cpu = time.process_time() - used
        return {"began": began, "ended": ended, "took_s": ended - began, "cpu_s": cpu} | about

    def identity(self) -> str:
        """Of what it has now."""
        return contents.identity_of(self.tensors)

    def spoil(self) -> None:
        """Puts something else into its tensors, so that the next one must bring all."""
        for tensor in self.tensors.values():
            tensor.fill_(1)

    def memcpy(self) -> dict[str, Any]:
        """Copies as many bytes, all in pages that are there."""
        if not self._beside:
            self._beside = {name: tensor.clone() for name, tensor in self.tensors.items()}
        began, used = time.monotonic(), time.process_time()
        for name, tensor in self.tensors.items():
            tensor.copy_(self._beside[name])
        return {"took_s": time.monotonic() - began, "cpu_s": time.process_time() - used}

    def download(self, port: int, name: str) -> dict[str, Any]:
        """A file from a stock server of HTTP."""
        return download(port, name, self.tensors)

    def parts(self, files: list[str]) -> dict[str, Any]:
        """CPU-seconds of hashing chunk files as they are mapped, by the mesh's digest and by
        SHA-256, and then of copying them into its own tensors.
        """
        mapped = [np.memmap(path, np.uint8, "r") for path in files]
        began, used = time.monotonic(), time.process_time()
        for content in mapped:
            digest_of(content.data)
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
            "took_s": time.monotonic() - began,
        }


class Agent:
    """Serves on what its host has received, as the host's agent does."""

    actor = None

    def __init__(self, mesh: Mesh, job: str) -> None:
        self.bulk = serve_cache(mesh)

    @property
    def address(self) -> str:
        """Of its bulk port."""
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
    await mesh.join(member.actor, bulk_address=getattr(member, "address", ""))
    await obey(member)
    os._exit(0)  # without a word to the mesh: whoever made it ends it


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
