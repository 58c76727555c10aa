"""A role process that an error ends: its job fails where no restart helps, and all is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError, PeerLost
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.supervision.ended import ended
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import events, jobs
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.workers.rows import Doing
from meshrl.services.node.residents.process import RoleProcess
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.node.standing import ENGINE, looking, role_process

DOCUMENT = {
    "algorithm": {"groups_per_step": 1, "group_size": 1, "max_staleness": 1},
    "budget": {"steps": 3},
}
Look = Callable[[JobRow, list[dict[str, Any]], SimulatedHost, RoleProcess], Awaitable[None]]


def with_program(
    error: Exception | None, tmp_path: Path, look: Look, for_s: float = 20.0, runs_s: float = 0.2
) -> None:
    """Runs an engine whose process ends by `error`, or with status 0, `runs_s` after its start."""

    async def fails(arguments: list[str], channel: SimulatedChannel) -> None:
        await asyncio.sleep(runs_s)
        if error is not None:
            raise error

    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"meshrl.services.engine": fails})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("worker/w0", clock, random, host, settings=settings)
        await jobs.submit(mesh.state, "calc", DOCUMENT, str(tmp_path), "submit")
        role = role_process(mesh, tmp_path, ENGINE)
        await role.start()
        await looking(role, for_s)
        told = [e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"]
        await look(await jobs.job(mesh.state, "calc"), told, host, role)
        assert (await ended(mesh.state))[0].times == len(told)
        await role.stop("done", leaving=True)

    run_virtual(main)


def test_an_error_in_the_job_ends_it_at_once_and_nothing_is_started_again(tmp_path: Path) -> None:
    async def look(
        row: JobRow, told: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed"
        assert "ConfigError: too long (at rollout.max_tokens). lower it" in row.error
        assert len(host.children) == 1 and [t["final"] for t in told] == [True]
        assert role.doing == Doing.FAILED and "too long" in role.detail

    error = ConfigError("too long", where="rollout.max_tokens", fix="lower it")
    with_program(error, tmp_path, look)


def test_an_unforeseen_error_is_tried_again_and_then_ends_the_job(tmp_path: Path) -> None:
    async def look(
        row: JobRow, told: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed" and "IndexError: beyond" in row.error
        assert [t["times"] for t in told] == list(range(1, len(told) + 1)) and len(told) >= 3
        assert told[0]["error"]["type"] == "IndexError"
        assert "test_failing_roles.py:" in told[0]["error"]["where"]

    with_program(IndexError("beyond"), tmp_path, look)


def test_a_lost_peer_is_told_and_the_job_goes_on(tmp_path: Path) -> None:
    async def look(
        row: JobRow, told: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "queued" and row.error == ""
        assert len(told) >= 3 and told[0]["error"]["text"] == "it went"

    with_program(PeerLost("it went"), tmp_path, look)


def test_a_peer_that_stays_lost_ends_the_job_with_its_name(tmp_path: Path) -> None:
    async def look(
        row: JobRow, told: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed" and "PeerLost: it went" in row.error
        assert "without a group, step or evaluation" in row.error

    with_program(PeerLost("it went"), tmp_path, look, for_s=700.0)


def test_a_role_that_ends_as_if_it_were_done_ends_the_job_too(tmp_path: Path) -> None:
    async def look(
        row: JobRow, told: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert row.phase == "failed" and "engine/g0.0 ended by exit status 0" in row.error

    with_program(None, tmp_path, look, for_s=300.0)


def test_a_role_that_comes_up_each_time_and_is_ended_does_not_end_its_job(tmp_path: Path) -> None:
    async def look(
        row: JobRow, told: list[dict[str, Any]], host: SimulatedHost, role: RoleProcess
    ) -> None:
        assert len(told) >= 7 and row.phase == "queued" and row.error == ""

    with_program(None, tmp_path, look, for_s=600.0, runs_s=40.0)


def test_a_process_of_a_job_that_nobody_knows_is_told_too(tmp_path: Path) -> None:
    async def fails(arguments: list[str], channel: SimulatedChannel) -> None:
        raise ConfigError("no job")

    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"meshrl.services.engine": fails})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("worker/w0", clock, random, host, settings=settings)
        role = role_process(mesh, tmp_path, replace(ENGINE, job="unknown"))
        await role.start()
        await clock.sleep(5.0)
        (end,) = await ended(mesh.state)
        assert end.told.startswith("ConfigError: no job") and end.job == "unknown"
        await role.stop("done", leaving=True)

    run_virtual(main)
