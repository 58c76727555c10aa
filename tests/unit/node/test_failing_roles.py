"""Role processes and workers that fail, cannot be started, or die while asleep."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.base.errors import ConfigError, PeerLost
from meshrl.common.base.files import offloaded_tensors
from meshrl.common.base.files.offload_media import OffloadFile
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.supervision.exit_reports import read_last_exits
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.state import events, jobs, leader
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    FormGang,
    PlaceInstance,
    Rationale,
    RemoveInstance,
)
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import Instance, InstancePhase, Role, Tier
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.services.node.agent import TRY_AGAIN_S as WORKER_AGAIN_S
from meshrl.services.node.agent import NodeAgent
from meshrl.services.node.gpus.accelerators import list_cpu_slots
from meshrl.services.node.instances.role_process import TRY_AGAIN_S, RoleProcess
from meshrl.services.node.worker import build_parser, serve
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.stories import story_on, virtual_test
from tests.unit.node.virtual_role import ENGINE, poll_every_second, role_process

DOCUMENT = {
    "algorithm": {"groups_per_step": 1, "group_size": 1, "max_staleness": 1},
    "budget": {"steps": 3},
}
Look = Callable[[JobRow, list[dict[str, Any]], SimulatedHost, RoleProcess], Awaitable[None]]


def run_with_program(
    error: Exception | None, tmp_path: Path, check: Look, for_s: float = 20.0, runs_s: float = 0.2
) -> None:
    """Run an engine whose process exits with `error`, or with status 0, `runs_s` after its
    start.
    """

    async def fail(arguments: list[str], channel: SimulatedChannel) -> None:
        await asyncio.sleep(runs_s)
        if error is not None:
            raise error

    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"meshrl.services.engine": fail})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("worker/w0", clock, random, host, settings=settings)
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        role = role_process(mesh, tmp_path, ENGINE)
        await role.start()
        await poll_every_second(role, for_s)
        exits = [e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"]
        await check(await jobs.read_job(mesh.state, "calc"), exits, host, role)
        assert (await read_last_exits(mesh.state))[0].times == len(exits)
        await role.stop("done", worker_stops=True)

    run_virtual(main)


def test_error_in_the_job_fails_it_at_once_without_restarts(tmp_path: Path) -> None:
    async def check(
        row: JobRow, exits: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed"
        assert "ConfigError: too long (at rollout.max_tokens). lower it" in row.error
        assert len(host.children) == 1 and [e["final"] for e in exits] == [True]
        assert role.phase == InstancePhase.FAILED and "too long" in role.detail

    error = ConfigError("too long", where="rollout.max_tokens", fix="lower it")
    run_with_program(error, tmp_path, check)


def test_unexpected_error_is_retried_and_then_fails_the_job(tmp_path: Path) -> None:
    async def check(
        row: JobRow, exits: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed" and "IndexError: beyond" in row.error
        assert [e["times"] for e in exits] == list(range(1, len(exits) + 1)) and len(exits) >= 3
        assert exits[0]["error"]["type"] == "IndexError"
        assert "test_failing_roles.py:" in exits[0]["error"]["where"]

    run_with_program(IndexError("beyond"), tmp_path, check)


def test_lost_peer_is_reported_and_the_job_continues(tmp_path: Path) -> None:
    async def check(
        row: JobRow, exits: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "queued" and row.error == ""
        assert len(exits) >= 3 and exits[0]["error"]["text"] == "it went"

    run_with_program(PeerLost("it went"), tmp_path, check)


def test_peer_that_stays_lost_fails_the_job_with_its_name(tmp_path: Path) -> None:
    async def check(
        row: JobRow, exits: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed" and "PeerLost: it went" in row.error
        assert "without a group, step or evaluation" in row.error

    run_with_program(PeerLost("it went"), tmp_path, check, for_s=700.0)


def test_role_that_exits_with_status_0_fails_the_job(tmp_path: Path) -> None:
    async def check(
        row: JobRow, exits: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed" and "engine/g0.0 exited: exit status 0" in row.error

    run_with_program(None, tmp_path, check, for_s=300.0)


def test_role_that_dies_after_each_start_does_not_fail_its_job(tmp_path: Path) -> None:
    async def check(
        row: JobRow, exits: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert len(exits) >= 7 and row.phase == "queued" and row.error == ""

    run_with_program(None, tmp_path, check, for_s=600.0, runs_s=40.0)


@virtual_test()
async def test_error_of_a_process_of_an_unknown_job_is_reported(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    async def fail(arguments: list[str], channel: SimulatedChannel) -> None:
        raise ConfigError("no job")

    host = SimulatedHost(clock, random, {"meshrl.services.engine": fail})
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("worker/w0", clock, random, host, settings=settings)
    role = role_process(mesh, tmp_path, replace(ENGINE, job="unknown"))
    await role.start()
    await clock.sleep(5.0)
    (end,) = await read_last_exits(mesh.state)
    assert end.description.startswith("ConfigError: no job") and end.job == "unknown"
    await role.stop("done", worker_stops=True)


async def run_forever(arguments: list[str], channel: SimulatedChannel) -> None:
    await asyncio.Event().wait()


class FullHost(SimulatedHost):
    """Host that cannot start a process while `full` is set."""

    full = True

    def spawn(self, argv: list[str], **options: Any) -> Any:
        if self.full:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return super().spawn(argv, **options)


def full_host(clock: VirtualClock, random: Random, root: Path) -> tuple[FullHost, Mesh]:
    host = FullHost(
        clock,
        random,
        {"meshrl.services.engine": run_forever, "meshrl.services.node.worker": run_forever},
    )
    settings = MeshSettings(redis_url="simulated", run_root=str(root), host="one")
    return host, alone("worker/w0", clock, random, host, settings=settings)


def poll_phase(role: RoleProcess) -> InstancePhase:
    return role.phase


def list_live_processes(host: FullHost) -> list[str]:
    return [child.name for child in host.children.values() if child.poll() is None]


@virtual_test(limit_s=3600.0)
async def test_unstartable_role_reports_the_reason_and_starts_later(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    host, mesh = full_host(clock, random, tmp_path)
    role = role_process(mesh, tmp_path, ENGINE)
    await role.start()
    assert role.phase == InstancePhase.FAILED and "temporarily unavailable" in role.detail
    await clock.sleep(TRY_AGAIN_S + 1)
    await role.poll()
    assert role.phase == InstancePhase.FAILED
    host.full = False
    await clock.sleep(TRY_AGAIN_S + 1)
    await role.poll()
    assert poll_phase(role) == InstancePhase.STARTING and role.pid
    await role.stop("the test ends")
    assert poll_phase(role) == InstancePhase.GONE and not list_live_processes(host)


@virtual_test(limit_s=3600.0)
async def test_stopping_a_role_that_never_started_raises_no_error(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    _, mesh = full_host(clock, random, tmp_path)
    role = role_process(mesh, tmp_path, ENGINE)
    await role.start()
    await role.stop("the worker exits", worker_stops=True)
    assert role.phase == InstancePhase.GONE and not role.pid


@virtual_test(limit_s=3600.0)
async def test_worker_with_exhausted_restart_budget_starts_when_the_host_can(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    host, mesh = full_host(clock, random, tmp_path)
    (tmp_path / "mesh").mkdir()
    agent = NodeAgent(mesh, list_cpu_slots(1), [], "w")
    host.full = False
    await agent.start()
    host.full = True
    host.children[1].kill()
    await clock.sleep(900.0)  # the restart budget is exhausted
    assert not list_live_processes(host)
    host.full = False
    await clock.sleep(WORKER_AGAIN_S + 5.0)
    assert list_live_processes(host) == ["worker/w0"]
    await agent.shut_down()


WHY = Rationale("test")
NAME = "trainer/j"
CORE: dict[str, Any] = {"job": "j", "role": Role.TRAINING, "core": True}


class Tensor:
    """Tensor source with the smallest content that can be offloaded."""

    piece_bytes = 8

    @property
    def sizes_bytes(self) -> dict[str, int]:
        return {"weights": 8}

    def read_into(self, name: str, start: int, out: NDArray[np.uint8]) -> None:
        out[:] = np.arange(start, start + len(out), dtype=np.uint8)


class World:
    """Worker in a gang of its own."""

    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        async def program(arguments: list[str], channel: Any) -> None:
            self.running += 1
            self.starts += 1
            try:
                await clock.sleep(1e9)
            finally:
                self.running -= 1

        self.clock, self.running, self.starts = clock, 0, 0
        host = SimulatedHost(clock, random.child("host"), {"meshrl.services.trainer": program})
        settings = MeshSettings(redis_url="simulated", run_root=str(root), host="here")
        self.mesh = alone("worker/w0", clock, random, host, settings=settings)
        self.state = self.mesh.state
        self.file = make_offload_path(settings.make_offload_directory("worker/w0"), NAME)
        self._token = self._written = 0

    async def write(self, *decisions: Decision) -> None:
        if not self._token:
            self._token = await leader.campaign(self.state, PLANNER_ELECTION, "test", 1_000_000)
        self._written += 1
        refused = await pool.write_decisions(
            self.state, self._token, f"d{self._written}", decisions, None
        )
        assert not refused, refused

    async def place(self, id: str = "g0.0", **about: Any) -> None:
        await self.write(PlaceInstance("g0", Instance(id, **(CORE | about)), WHY))
        await self.clock.sleep(10.0)

    async def read_instance(self, id: str = "g0.0") -> Instance:
        found = await pool.read_gang(self.state, "g0")
        assert found is not None
        return next(one for one in found.instances if one.id == id)

    def write_offloaded_state(self) -> None:
        """Write the files that a process leaves when it sleeps on disk."""
        medium = OffloadFile(self.file, create=True)
        offloaded_tensors.offload(medium, {}, Tensor())
        medium.commit()
        medium.close()


def in_world(root: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        world = World(clock, random, root)
        options = build_parser().parse_args(["--worker", "w0", "--orphan-s", "0"])
        worker = asyncio.create_task(serve(world.mesh, options))
        await clock.sleep(1.0)
        await world.write(FormGang("g0", ("w0",), WHY))
        await story(world)
        worker.cancel()
        await asyncio.wait([worker])

    run_virtual(main)


@story_on(in_world, "tmp_path")
async def test_sleeping_instance_waits_without_a_process(world: World) -> None:
    await world.place()
    assert world.running == 1
    world.write_offloaded_state()
    # the process was killed while it slept, so none is running
    await world.place(tier=Tier.DISK, epoch=2)
    assert world.running == 0, "it would compute beside whoever has the accelerator"
    asleep = await world.read_instance()
    assert asleep.is_reconciled and asleep.phase == InstancePhase.READY
    assert asleep.reports[0].tier == Tier.DISK
    assert asleep.reports[0].usage.disk == world.file.stat().st_size
    await world.place(epoch=3)
    assert (world.running, world.starts) == (1, 2) and world.file.exists()


@story_on(in_world, "tmp_path")
async def test_incomplete_offload_counts_as_absent(world: World) -> None:
    await world.place()
    world.file.parent.mkdir(parents=True, exist_ok=True)
    world.file.write_bytes(b"half")
    await world.place(tier=Tier.DISK, epoch=2)
    asleep = await world.read_instance()
    assert asleep.is_reconciled and asleep.phase == InstancePhase.GONE and world.running == 0
    assert asleep.reports[0].tier == Tier.ABSENT
    await world.place(epoch=3)
    assert not (await world.read_instance()).is_reconciled and world.running == 1


@story_on(in_world, "tmp_path")
async def test_saved_state_is_removed_with_its_instance(world: World) -> None:
    await world.place(tier=Tier.DISK)
    world.write_offloaded_state()
    await world.write(RemoveInstance("g0", "g0.0", WHY))
    await world.clock.sleep(10.0)
    assert not world.file.exists() and world.starts == 0


@story_on(in_world, "tmp_path")
async def test_second_instance_of_one_role_name_fails(world: World) -> None:
    await world.place()
    await world.place("g0.1")
    first, second = await world.read_instance("g0.0"), await world.read_instance("g0.1")
    assert first.phase == InstancePhase.STARTING and world.starts == 1
    assert second.phase == InstancePhase.FAILED
    assert "trainer/j already belongs to g0.0" in second.detail and "g0.1" in second.detail
    await world.write(RemoveInstance("g0", "g0.0", WHY))
    await world.clock.sleep(10.0)
    assert (await world.read_instance("g0.1")).phase == InstancePhase.STARTING
    assert (world.running, world.starts) == (1, 2)
