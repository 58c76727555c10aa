"""Agent, workers and role processes as real processes, under kills and stops."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from common.state import events
from tests.unit.node.smallmesh import SmallMesh, gone

OUTAGE_S = 7.5  # longer than a lease


async def test_a_gang_takes_the_role_that_is_decided_and_leaves_it_drained(
    mesh: SmallMesh,
) -> None:
    agent = mesh.start_agent()
    await mesh.until("idle", lambda g: g.actual_state == "idle")
    await mesh.until_ready(await mesh.decide("rollout"))
    engine = await mesh.pid_of("engine/g0")
    moved = await mesh.until_ready(await mesh.decide("training", core=True))
    assert moved.actual_role == "training"
    assert await gone(engine)
    trainer = await mesh.pid_of("trainer/j")
    idle = await mesh.until_ready(await mesh.decide("idle", job=""))
    assert idle.actual_state == "idle"
    assert await gone(trainer)
    drained = (mesh.directory / "drained").read_text().splitlines()
    assert drained == ["training from epoch 2", "idle from epoch 3"]
    told = [e.fields["status"] for e in await events.read(mesh.state) if e.kind == "actual"]
    assert told == [
        *["starting", "ready", "draining", "starting", "ready"],
        *["draining", "idle"],
    ]
    agent.terminate()
    assert await agent.wait(10) == 0
    assert mesh.processes() == []


async def test_a_role_process_that_is_killed_or_stopped_is_replaced(mesh: SmallMesh) -> None:
    mesh.start_agent()
    await mesh.until("there", lambda g: True)
    epoch = await mesh.decide("rollout")
    await mesh.until_ready(epoch)
    first = await mesh.pid_of("engine/g0")
    os.kill(first, signal.SIGKILL)
    second = await mesh.pid_of("engine/g0", other_than=first)
    await mesh.until_ready(epoch)
    os.kill(second, signal.SIGSTOP)
    await mesh.pid_of("engine/g0", other_than=second)
    await mesh.until_ready(epoch)
    assert await gone(second)


async def test_a_worker_outlives_an_outage_of_redis_that_outlasts_its_lease(
    mesh: SmallMesh,
) -> None:
    mesh.start_agent()
    await mesh.until("there", lambda g: True)
    epoch = await mesh.decide("rollout")
    await mesh.until_ready(epoch)
    worker, engine = await mesh.pid_of("worker/g0"), await mesh.pid_of("engine/g0")
    os.kill(mesh.redis.pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)  # so that there is something to report
    await asyncio.sleep(OUTAGE_S)
    os.kill(mesh.redis.pid, signal.SIGCONT)
    await mesh.pid_of("engine/g0", other_than=engine)
    await mesh.until_ready(epoch)
    assert await mesh.pid_of("worker/g0") == worker


async def test_a_role_process_that_does_not_stay_up_is_reported_failed(mesh: SmallMesh) -> None:
    mesh.start_agent()
    await mesh.until("there", lambda g: True)
    await mesh.decide("rollout", job="broken")
    failed = await mesh.until("failed", lambda g: g.actual_state == "failed")
    assert "exit status 9" in failed.detail and "engine-g0.log" in failed.detail
    await mesh.until_ready(await mesh.decide("rollout", job="good"))


async def test_a_killed_worker_takes_its_role_process_along_and_its_successor_starts_it_again(
    mesh: SmallMesh,
) -> None:
    mesh.start_agent()
    await mesh.until("there", lambda g: True)
    epoch = await mesh.decide("rollout")
    await mesh.until_ready(epoch)
    worker, engine = await mesh.pid_of("worker/g0"), await mesh.pid_of("engine/g0")
    os.kill(worker, signal.SIGKILL)
    assert await gone(engine)
    await mesh.pid_of("worker/g0", other_than=worker)
    await mesh.pid_of("engine/g0", other_than=engine)
    await mesh.until_ready(epoch)


async def test_workers_outlive_the_agent_and_the_next_one_adopts_them(mesh: SmallMesh) -> None:
    agent = mesh.start_agent(workers=2)
    await mesh.until("there", lambda g: True, "g0")
    await mesh.until("there", lambda g: True, "g1")
    epoch = await mesh.decide("rollout")
    await mesh.until_ready(epoch)
    names = ("worker/g0", "worker/g1", "engine/g0")
    before = [await mesh.pid_of(name) for name in names]
    agent.kill()
    await agent.wait(5)
    mesh.start_agent(workers=2)
    await mesh.pid_of("node/here", other_than=agent.pid)
    ups = await mesh.told("worker_up", 4)
    assert [(up["name"], up["pid"], up["how"]) for up in ups[2:]] == [
        ("worker/g0", before[0], "adopted"),
        ("worker/g1", before[1], "adopted"),
    ]
    assert [await mesh.pid_of(name) for name in names] == before
    os.kill(before[1], signal.SIGKILL)
    await mesh.pid_of("worker/g1", other_than=before[1])


@pytest.mark.parametrize("redis_too", [False, True])
async def test_without_an_agent_nothing_is_left_after_a_while(
    mesh: SmallMesh, redis_too: bool
) -> None:
    agent = mesh.start_agent("--orphan-s", "3")
    await mesh.until("there", lambda g: True)
    await mesh.until_ready(await mesh.decide("rollout"))
    worker, engine = await mesh.pid_of("worker/g0"), await mesh.pid_of("engine/g0")
    agent.kill()
    if redis_too:
        mesh.redis.kill()
    assert await gone(worker) and await gone(engine)
    assert mesh.processes() == []
