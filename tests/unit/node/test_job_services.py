"""Shards and sandboxes of jobs: those that are on record for a host run there, and no others."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.loading import digest_of, load_request
from meshrl.common.job.config import EnvironmentConfig, JobConfig
from meshrl.common.mesh.process.supervision.ended import ended
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import jobs, leader
from meshrl.common.state.pool.placing.decisions import Serve
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.redis.keys import PLANNER
from meshrl.services.node.agent import NodeAgent
from meshrl.services.node.gpus.accelerators import cpu_slots
from meshrl.services.node.job_services import CHANGED_S
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.load import scaled
from tests.meshes import alone
from tests.simulated_host import SimulatedChannel, SimulatedHost
from tests.unit.node.smallmesh import WHY, SmallMesh, gone
from tests.unit.node.test_failing_roles import DOCUMENT


@pytest.mark.deep
async def test_services_on_record_run_are_adopted_and_end_when_they_are_no_longer(
    mesh: SmallMesh,
) -> None:
    agent = mesh.start_agent(workers=0)
    names = ("sandbox/a/0", "sandbox/b/0", "sandbox/changed/0")
    await mesh.write(Serve("here", names, WHY))
    before = [await mesh.pid_of(name) for name in names]
    agent.kill()
    await agent.wait(scaled(5))
    document = DOCUMENT | {"bundle": {"dir": "/gone", "digest": "d", "files": {}}}
    await jobs.submit(mesh.state, "changed", document, "/gone", "submit")
    before_it, agent = agent, mesh.start_agent(workers=0)
    await mesh.pid_of("node/here", other_than=before_it.pid)
    await mesh.publishes("node/here", "adopted_services", 3)
    await mesh.pid_of(names[2], other_than=before[2])  # it would refuse what its job says now
    os.kill(before[0], signal.SIGKILL)
    again = await mesh.pid_of(names[0], other_than=before[0])
    [end] = await mesh.told("process_ended", 1)
    assert (end["name"], end["job"], end["why"]) == (names[0], "a", "signal 9")
    assert await mesh.pid_of(names[1]) == before[1], "it was adopted"

    await mesh.write(Serve("here", names[:1], WHY))
    assert await gone(before[1])
    assert await mesh.pid_of(names[0]) == again
    agent.terminate()
    assert await agent.wait(scaled(30)) == 0
    assert await gone(again)
    assert mesh.processes() == []


def test_a_shard_that_cannot_run_fails_its_own_job_and_holds_up_no_other(tmp_path: Path) -> None:
    started: list[str] = []

    async def shard(arguments: list[str], channel: SimulatedChannel) -> None:
        job = arguments[arguments.index("--job") + 1]
        started.append(job)
        if job == "bad":
            raise ConfigError("no environment of that name")
        await asyncio.Event().wait()

    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"meshrl.services.rollout": shard})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("node/one", clock, random, host, settings=settings)
        (tmp_path / "mesh").mkdir()
        for job in ("bad", "good"):
            await jobs.submit(mesh.state, job, DOCUMENT, str(tmp_path), job)
        led = await leader.campaign(mesh.state, PLANNER, "test", 1_000_000)
        wanted = ("rollout/bad/0", "rollout/good/0", "rollout/good/1")
        await pool.write(mesh.state, led, "serve", [Serve("one", wanted, WHY)], None)
        agent = NodeAgent(mesh, cpu_slots(0), [], "w")
        await agent.start()
        await clock.sleep(5.0)
        assert (await jobs.job(mesh.state, "bad")).phase == "failed"
        assert "no environment of that name" in (await jobs.job(mesh.state, "bad")).error
        assert (await jobs.job(mesh.state, "good")).phase == "queued"
        assert started == ["bad", "good", "good"]
        assert [end.job for end in await ended(mesh.state)] == ["bad"]
        assert agent.stats().services == 2
        await agent.leave()
        assert not any(child.poll() is None for child in host.children.values())

    run_virtual(main, limit_s=3600.0)


def test_a_sandbox_is_told_what_its_job_may_have_loaded_by_who_starts_it(tmp_path: Path) -> None:
    started: list[list[str]] = []

    async def sandbox(arguments: list[str], channel: SimulatedChannel) -> None:
        started.append(arguments)
        await asyncio.Event().wait()

    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"meshrl.services.sandbox": sandbox})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("node/one", clock, random, host, settings=settings)
        (tmp_path / "mesh").mkdir()
        bundle = {"dir": str(tmp_path / "bundle"), "digest": "d1", "files": {}}
        config = JobConfig(name="a", environment=EnvironmentConfig(tools={"add": "mine:add"}))
        document = config.document() | {"bundle": bundle}
        await jobs.submit(mesh.state, "a", document, str(tmp_path), "a")
        led = await leader.campaign(mesh.state, PLANNER, "test", 1_000_000)
        wanted = ("sandbox/a/0", "sandbox/gone/0")
        await pool.write(mesh.state, led, "serve", [Serve("one", wanted, WHY)], None)
        agent = NodeAgent(mesh, cpu_slots(0), [], "w")
        await agent.start()
        await clock.sleep(10.0)
        # A shard's view of the job, on another host and whatever its worker is.
        shard = JobData.of("a", document, str(tmp_path)).on("cuda")
        shard = shard.elsewhere(tmp_path / "fetched", tmp_path / "own")
        told = {args[args.index("--name") + 1]: args for args in started}
        digest = digest_of(load_request(shard))
        assert told["sandbox/a/0"][-2:] == ["--load", digest]
        assert told["sandbox/gone/0"][-2:] == ["--load", "none"], "nothing at all"
        # Its job goes on with other limits of what it runs.
        document["sandbox"] = document["sandbox"] | {"wall_s": 77.0}
        await jobs.change(mesh.state, "a", document, {}, "change")
        await clock.sleep(2 * CHANGED_S)
        changed = digest_of(load_request(JobData.of("a", document, str(tmp_path))))
        [*_, last] = [args for args in started if "sandbox/a/0" in args]
        assert last[-2:] == ["--load", changed] and changed != digest
        assert sum("sandbox/gone/0" in args for args in started) == 1, "nothing is new there"
        await agent.leave()

    run_virtual(main, limit_s=3600.0)


def test_one_that_is_slow_to_end_holds_up_nobody(tmp_path: Path) -> None:
    alive: list[str] = []

    async def shard(arguments: list[str], channel: SimulatedChannel) -> None:
        name = arguments[arguments.index("--job") + 1]
        alive.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(6.0)
            alive.remove(name)

    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"meshrl.services.rollout": shard})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("node/one", clock, random, host, settings=settings)
        led = await leader.campaign(mesh.state, PLANNER, "test", 1_000_000)
        (tmp_path / "mesh").mkdir()

        async def serve(*jobs: str) -> None:
            wanted = tuple(f"rollout/{job}/0" for job in jobs)
            decided = [Serve("one", wanted, WHY)]
            await pool.write(mesh.state, led, random.token(), decided, None)

        agent = NodeAgent(mesh, cpu_slots(0), [], "w")
        await agent.start()
        await serve("a", "b")
        await clock.sleep(2.0)
        await serve("b", "c")
        await clock.sleep(2.0)
        assert alive == ["a", "b", "c"]
        await serve("a", "b", "c")  # wanted again while it ends: another one, and not before
        await clock.sleep(2.0)
        assert alive == ["a", "b", "c"]
        await clock.sleep(6.0)
        assert alive == ["b", "c", "a"]
        await agent.leave()
        assert alive == []

    run_virtual(main, limit_s=3600.0)
