"""Training without engines on a real mesh of Redis, weight store, core, ranks and hybrids.

A test makes its groups from a seed and releases them at any time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from meshrl.common.api.transfer import bulk_permissions as bulk_api
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.encoding.blob import pack
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.host.settings import ACCELERATOR_ENV, DEVICE_ENV, SETTINGS_ENV, MeshSettings
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import events, groups, jobs, registry
from meshrl.common.state.hosts import credentials
from meshrl.common.state.pool.workers.rows import ExpertSplit
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.weights.bulk.port import BulkClient
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.job import bundle, job_reader
from tests.fork_server import TestForkServer
from tests.load import scaled
from tests.meshes import SECRET

ROOT = Path(__file__).parents[2]
JOB_FILE = Path(__file__).parent / "jobs/digits.toml"
RANK_MAIN = "meshrl.services.trainer"
SHARD = "rollout/job/0"
STEPS = 20
GROUPS = 2  # of a step
MEMBERS = 4
VOCABULARY = 64
WITHIN_S = 150.0  # processes start slowly on a shared machine

T = TypeVar("T")


class ElasticMesh:
    """Mesh that runs several jobs one after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = SystemHost()
        self.children: dict[str, SystemChild] = {}
        self._fork_server = TestForkServer()
        self.state: StateClient
        self.mesh: Mesh  # as a trainer, which may request weights
        self.worker: Mesh  # as a role that may request a drain
        self.token = 0

    async def open(self) -> None:
        server = embedded_server.prepare_server(self.directory / "r")
        self._spawn("redis", server.argv)
        self._fork_server.start()
        settings = MeshSettings(server.url, str(self.directory), host="here", secret=SECRET)
        settings.to_file(self.directory / "settings.json")
        there = self.directory / "there"  # a host that shares no directory with the first
        there.mkdir()
        replace(settings, host="there", run_root=str(there)).to_file(there / "settings.json")
        async with asyncio.timeout(scaled(WITHIN_S)):
            while True:
                try:
                    self.state = await StateClient.open(server.url, connect_timeout_s=scaled(1))
                    break
                except StateUnavailable:
                    await asyncio.sleep(0.05)
        for host in ("here", "there"):
            await credentials.admit_host(self.state, host)
        self.run("weights", "meshrl.services.weights", [])
        self.mesh = await Mesh.open("test", "trainer", settings)
        self.mesh.start()
        self.worker = await Mesh.open("worker/test", "worker", settings)
        self.bulk = BulkClient(self.mesh)
        entry = registry.RegistryEntry(SHARD, "rollout", incarnation=uuid.uuid4().hex)
        self.token = await registry.register(self.state, entry, 600_000)

    async def close(self) -> None:
        for child in reversed(self.children.values()):
            child.kill()
        for child in self.children.values():
            await child.wait(scaled(5.0))
        self._fork_server.close()
        await self.worker.leave()
        await self.mesh.leave()
        await self.state.close()

    # -- processes -------------------------------------------------------------------------------

    def _spawn(
        self, name: str, argv: list[str], host: str = "here", env: Mapping[str, str] = {}
    ) -> None:
        self.children[name] = self.host.spawn(
            argv, name=name, env={**self._environment(host), **env}, log=self._log(name)
        )

    def run(
        self, name: str, module: str, arguments: list[str], host: str = "here", device: str = ""
    ) -> None:
        """Start a module as a process of one of the two hosts, as a worker with the accelerator
        `device` would.
        """
        env = {DEVICE_ENV: device.partition(":")[0], ACCELERATOR_ENV: device} if device else {}
        self._spawn(name, [sys.executable, "-m", module, *arguments], host, env)

    def _environment(self, host: str) -> dict[str, str]:
        directory = self.directory / "there" if host == "there" else self.directory
        return {
            SETTINGS_ENV: str(directory / "settings.json"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name.replace('/', '-')}.log"

    def kill(self, name: str) -> None:
        self.children[name].kill()

    def has_ended(self, name: str) -> bool:
        return self.children[name].poll() is not None

    def is_stopped(self, name: str) -> bool:
        usage = self.children[name].read_usage()
        return usage is not None and usage.state == "T"

    def stop(self, name: str) -> None:
        """Stop the process by SIGSTOP."""
        os.kill(self.children[name].pid, signal.SIGSTOP)

    async def until(
        self, what: str, poll: Callable[[], Awaitable[T | None]], within_s: float = WITHIN_S
    ) -> T:
        """Wait until `poll` returns a true value, and return the value."""
        async with asyncio.timeout(scaled(within_s)):
            try:
                while not (found := await poll()):
                    await asyncio.sleep(0.02)
                return found
            except asyncio.CancelledError:
                raise AssertionError(f"not: {what}\n{self.logs()}") from None

    async def stats(self, name: str) -> dict[str, Any]:
        """Return the statistics that a live process publishes; an empty dict if it is absent."""
        entry = await registry.lookup(self.state, name)
        return entry.stats if entry is not None and entry.alive else {}

    def logs(self) -> str:
        files = sorted((self.directory / "logs").glob("*"))
        return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in files)

    async def events(self, kind: str) -> list[dict[str, Any]]:
        return [dict(e.fields) for e in await events.read_all(self.state) if e.kind == kind]


class Training:
    """Job of STEPS steps, whose step n trains the same groups in every run."""

    def __init__(
        self,
        elastic: ElasticMesh,
        job: str,
        ranks: int = 1,
        others: str = RANK_MAIN,
        host: str = "here",
    ) -> None:
        """Create the job; `others` is the module that ranks beside the first run, on `host`."""
        self.elastic, self.job, self.ranks, self._others = elastic, job, ranks, others
        self.host = host
        self.apart: ExpertSplit | None = (
            None  # division of a mixture by ranks that start from now on
        )
        self.rank_deadline_s = scaled(
            10.0
        )  # a deadline that a healthy rank meets, on a slow machine too
        self.accelerators = [""] * ranks  # their accelerators
        self._admitted: list[groups.AdmittedGroup] = []
        self._released = 0

    async def start(self, **settings: Any) -> None:
        """Start the job and wait until the core is ready to train its first step."""
        elastic = self.elastic
        values = {
            "training.ranks": self.ranks,
            "training.bin_tokens": 40,  # about seven bins a step
            "training.checkpoint_every": 1,
            "training.rank_deadline_s": self.rank_deadline_s,
            "mesh.workers": self.ranks + 1,
            "budget.steps": STEPS,
            "algorithm.max_staleness": STEPS,
        } | {key.replace("__", "."): value for key, value in settings.items()}
        config, base = job_reader.load_config(JOB_FILE, [f"{k}={v}" for k, v in values.items()])
        run_dir = elastic.directory / self.job
        _, document = bundle.pack_bundle(config, base, run_dir)
        await jobs.submit(elastic.state, self.job, document, str(run_dir), uuid.uuid4().hex)
        await self.start_core()
        for rank in range(1, self.ranks):
            await self.start_rank(rank)
        await elastic.until(f"{self.job} has begun", self._start_job)
        await jobs.set_phase(elastic.state, self.job, jobs.Phase.TRAINING, elastic.token, SHARD)
        self._admitted = await groups.admit_groups(
            elastic.state, self.job, SHARD, elastic.token, STEPS * GROUPS, uuid.uuid4().hex
        )
        assert len(self._admitted) == STEPS * GROUPS

    async def start_core(self) -> None:
        name, device = f"trainer/{self.job}", self.accelerators[0]
        await self._rank_main(name, "--core", *self._of_ranks(0), device=device)

    async def start_rank(self, rank: int) -> None:
        arguments = ["--core", *self._of_ranks(rank)]
        name = f"rank/{self.job}/{rank}"
        about = {"module": self._others, "host": self.host, "device": self.accelerators[rank]}
        await self._rank_main(name, *arguments, **about)

    async def start_hybrid(self, gang: str, module: str = RANK_MAIN, host: str = "here") -> None:
        await self._rank_main(f"hybrid/{gang}", gang=gang, module=module, host=host)

    def _of_ranks(self, rank: int) -> list[str]:
        apart = [] if self.apart is None else ["--expert-split", json.dumps(self.apart.to_list())]
        return ["--rank", str(rank), "--ranks", str(self.ranks), *apart]

    async def _rank_main(
        self,
        name: str,
        *more: str,
        gang: str = "g0",
        module: str = RANK_MAIN,
        host: str = "here",
        device: str = "",
    ) -> None:
        place = ["--gang", gang, "--instance", gang, "--job", self.job, "--generation", "1"]
        self.elastic.run(name, module, [*place, *more], host, device)

    async def _start_job(self) -> bool:
        row = await jobs.read_job(self.elastic.state, self.job)
        core = await self.elastic.stats(f"trainer/{self.job}")
        return row.version == 0 and row.phase == "baseline" and core.get("ready") is True

    # -- steps -----------------------------------------------------------------------------------

    async def release(self, steps: int) -> None:
        """Mark the groups of so many further steps ready."""
        elastic = self.elastic
        start, self._released = self._released, self._released + steps * GROUPS
        for admitted in self._admitted[start : self._released]:
            content = pack(group(admitted.group))
            digest = await put_chunk(
                elastic.mesh, elastic.bulk, content, "a group", space=bulk_api.GROUPS
            )
            await groups.mark_group_ready(
                elastic.state,
                self.job,
                SHARD,
                elastic.token,
                groups.FinishedGroup(admitted.group, digest, len(content), 0, MEMBERS),
                uuid.uuid4().hex,
            )

    async def count_committed_steps(self) -> int:
        return (await jobs.read_job(self.elastic.state, self.job)).steps_done

    async def train(self, steps: int) -> None:
        """Release so many further steps and wait until they are committed."""
        await self.release(steps)
        await self.wait_for_released_steps()

    async def wait_for_released_steps(self) -> None:
        """Wait until all released steps are committed."""
        wanted = self._released // GROUPS

        async def committed() -> bool:
            return await self.count_committed_steps() >= wanted

        await self.elastic.until(f"step {wanted} of {self.job}", committed)

    async def wait_for_hybrid(self, gang: str) -> None:
        """Wait until a hybrid is ready for the next step, which waits for groups."""
        wanted = self._released // GROUPS

        async def there() -> bool:
            stats = await self.elastic.stats(f"trainer/{self.job}")
            stage = stats.get("hybrids", {}).get(gang)
            return stats.get("step") == wanted and stage in ("ready", "active")

        await self.elastic.until(f"{gang} waits for step {wanted + 1}", there)

    async def list_computing_gangs(self) -> set[str]:
        """Return the gangs that computed rounds of committed steps."""
        mine = [s for s in await self.elastic.events("step") if s["job"] == self.job]
        return {gang for step in mine for gang in step["metrics"]["workers"]}

    async def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the current version."""
        row = await jobs.read_job(self.elastic.state, self.job)
        mesh, bulk = self.elastic.mesh, self.elastic.bulk
        return (await WeightReceiver(mesh, bulk).receive(row.manifest)).tensors


def group(number: int) -> TrajectoryGroup:
    """Return four trajectories and their rewards, which depend on the number alone."""
    random = np.random.default_rng(number)
    lengths = random.integers(12, 40, MEMBERS).astype(np.int32)
    prompt = 4
    own = np.concatenate([np.arange(length) >= prompt for length in lengths])
    noise = 0.1 * random.standard_normal(len(own))
    return TrajectoryGroup(
        group=number,
        prompt=number,
        lengths=lengths,
        tokens=random.integers(0, VOCABULARY, len(own)).astype(np.int32),
        logprobs=np.where(own, -np.log(VOCABULARY) + noise, 0.0).astype(np.float32),
        versions=np.where(own, 0, -1).astype(np.int32),
        rewards=random.uniform(0.0, 1.0, MEMBERS).astype(np.float32),
    )
