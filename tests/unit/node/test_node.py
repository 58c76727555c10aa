"""Agent, workers and role processes as real processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.state import events
from meshrl.common.state.pool.scheduling.decisions import AssignServices
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.workers.rows import InstancePhase, Role, Tier
from tests.load import scaled
from tests.unit.node.smallmesh import WHY, SmallMesh, has_exited, until

OUTAGE_S = 7.5  # longer than a lease


async def test_instances_of_two_jobs_share_a_worker_independently(
    mesh: SmallMesh,
) -> None:
    agent = mesh.start_agent()
    await mesh.form("w0")
    await mesh.place("g0.0")
    await mesh.place("g0.1", Role.TRAINING, "k", core=True)
    await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    engine, trainer = await mesh.await_pid("engine/g0.0"), await mesh.await_pid("trainer/k")

    asleep = await mesh.place_and_wait(
        "g0.1", Role.TRAINING, "k", core=True, tier=Tier.MEMORY, epoch=2
    )
    assert asleep.reports[0].usage.memory and not asleep.reports[0].usage.accelerator
    assert await mesh.await_pid("trainer/k") == trainer, "another wish is no other process"

    await mesh.place("g0.0", generation=2, epoch=2)
    again = await mesh.await_pid("engine/g0.0", other_than=engine)
    await mesh.until_settled("g0.0")
    assert await has_exited(engine) and again != engine

    await mesh.remove("g0.1")
    assert await has_exited(trainer)
    assert await mesh.await_pid("engine/g0.0") == again
    drained = (mesh.directory / "drained").read_text().splitlines()
    assert drained == [
        "g0.0 is desired in generation 2 after 1",
        "g0.1 is not on record any more",
    ]
    states = [
        (e.fields["status"], e.fields["tier"], e.fields["epoch"])
        for e in await events.read_page(mesh.state)
        if e.kind == "actual" and e.fields["resident"] == "g0.1"
    ]
    assert states[0] == ("starting", "absent", 1) and states[-1] == ("ready", "memory", 2)
    agent.terminate()
    assert await agent.wait(scaled(20)) == 0
    assert mesh.processes() == []


@pytest.mark.deep
async def test_slow_or_failing_instance_does_not_delay_another(mesh: SmallMesh) -> None:
    mesh.start_agent()
    await mesh.form("w0")
    await mesh.place_and_wait("g0.0", job="slow")
    await mesh.place("g0.1", job="broken")
    slow = await mesh.await_pid("engine/g0.0")
    await mesh.remove("g0.0")
    await mesh.place("g0.2")
    await mesh.until("started", "g0.2", lambda r: 0 in r.reports)
    assert read_start_time(slow), "it drains for seconds"
    await mesh.until_settled("g0.2")
    failed = await mesh.until("failed", "g0.1", lambda r: r.phase == InstancePhase.FAILED)
    assert "exit status 9" in failed.detail and "engine-g0.1.log" in failed.detail
    assert (await mesh.read_instance("g0.2")).is_reconciled
    assert await has_exited(slow)


async def test_killed_or_stopped_role_process_is_replaced(mesh: SmallMesh) -> None:
    await mesh.begin()
    first = await mesh.await_pid("engine/g0.0")
    os.kill(first, signal.SIGKILL)
    second = await mesh.await_pid("engine/g0.0", other_than=first)
    await mesh.until_settled("g0.0")
    os.kill(second, signal.SIGSTOP)
    await mesh.await_pid("engine/g0.0", other_than=second)
    await mesh.until_settled("g0.0")
    assert await has_exited(second)


async def test_worker_survives_a_redis_outage_longer_than_its_lease(
    mesh: SmallMesh,
) -> None:
    await mesh.begin()
    worker, engine = await mesh.await_pid("worker/w0"), await mesh.await_pid("engine/g0.0")
    os.kill(mesh.redis.pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)  # gives the worker an exit to report
    await asyncio.sleep(OUTAGE_S)
    os.kill(mesh.redis.pid, signal.SIGCONT)
    await mesh.await_pid("engine/g0.0", other_than=engine)
    await mesh.until_settled("g0.0")
    assert await mesh.await_pid("worker/w0") == worker


async def test_role_processes_die_with_their_worker_and_are_restarted(
    mesh: SmallMesh,
) -> None:
    mesh.start_agent()
    await mesh.form("w0")
    await mesh.place("g0.0")
    await mesh.place("g0.1", Role.TRAINING, "k", core=True)
    before = await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    worker, engine = await mesh.await_pid("worker/w0"), await mesh.await_pid("engine/g0.0")
    trainer = await mesh.await_pid("trainer/k")
    os.kill(worker, signal.SIGKILL)
    assert await has_exited(engine) and await has_exited(trainer)
    await mesh.await_pid("worker/w0", other_than=worker)
    await mesh.await_pid("trainer/k", other_than=trainer)
    await mesh.await_pid("engine/g0.0", other_than=engine)
    after = await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    assert after.reports[0].token > before.reports[0].token


async def test_workers_survive_their_agent_and_are_adopted(mesh: SmallMesh) -> None:
    agent = await mesh.begin(workers=2)
    names = ("worker/w0", "worker/w1", "engine/g0.0")
    before = [await mesh.await_pid(name) for name in names]
    agent.kill()
    await agent.wait(scaled(5))
    mesh.start_agent(workers=2)
    await mesh.await_pid("node/here", other_than=agent.pid)
    ups = await mesh.await_events("worker_up", 4)
    assert [(up["name"], up["pid"], up["how"]) for up in ups[2:]] == [
        ("worker/w0", before[0], "adopted"),
        ("worker/w1", before[1], "adopted"),
    ]
    assert [await mesh.await_pid(name) for name in names] == before
    os.kill(before[1], signal.SIGKILL)
    await mesh.await_pid("worker/w1", other_than=before[1])


@pytest.mark.rotating(2)
@pytest.mark.parametrize("redis_too", [False, True])
async def test_all_processes_exit_without_an_agent(mesh: SmallMesh, redis_too: bool) -> None:
    agent = await mesh.begin("--orphan-s", "3")
    await mesh.write(AssignServices("here", ("sandbox/j/0",), WHY))
    names = ("worker/w0", "engine/g0.0", "sandbox/j/0")
    pids = [await mesh.await_pid(name) for name in names]
    agent.kill()
    if redis_too:
        mesh.redis.kill()
    for pid in pids:
        assert await has_exited(pid)
    assert mesh.processes() == []


async def test_move_without_memory_is_rejected_with_figures_and_keeps_the_process(
    mesh: SmallMesh,
) -> None:
    await mesh.begin("--memory-bytes", "999", "--accelerator-bytes", "1500")
    engine = await mesh.await_pid("engine/g0.0")
    await mesh.place("g0.0", tier=Tier.MEMORY, epoch=2)
    refused = await mesh.until("refused", "g0.0", lambda r: r.phase == InstancePhase.FAILED)
    assert "needs 1000 bytes of memory, and other instances use 0 of 999" in refused.detail
    assert refused.reports[0].tier == Tier.ACCELERATOR and refused.reports[0].epoch == 2

    await mesh.place("g0.1", job="k")
    larger = await mesh.until("refused", "g0.1", lambda r: r.phase == InstancePhase.FAILED)
    assert "which makes 2000 of 1500" in larger.detail
    assert (await mesh.read_instance("g0.0")).phase == InstancePhase.FAILED

    await mesh.place_and_wait("g0.0", tier=Tier.DISK, epoch=3)
    assert await mesh.await_pid("engine/g0.0") == engine


async def test_report_for_an_older_desired_state_is_rejected(
    mesh: SmallMesh,
) -> None:
    mesh.start_agent()
    await mesh.form("w0")
    settled = await mesh.place_and_wait("g0.0")
    report = settled.reports[0]
    await mesh.place("g0.0", tier=Tier.MEMORY, epoch=2)
    assert not await pool.report_instance(mesh.state, "w0", "g0", "g0.0", report)
    asleep = await mesh.until_settled("g0.0")
    assert asleep.reports[0].tier == Tier.MEMORY


async def test_files_of_an_instance_are_removed_with_it_not_with_the_worker(
    mesh: SmallMesh,
) -> None:
    kept = Path(mesh.settings.make_offload_directory("worker/w0"))
    mine, others, half = (
        kept / name for name in ("engine-g0.0.kept", "trainer-x.kept", "engine-g9.0.kept.new")
    )
    await mesh.begin()
    await mesh.place_and_wait("g0.0", tier=Tier.DISK, epoch=2)
    os.makedirs(kept, exist_ok=True)
    for file in (mine, others, half):
        file.write_bytes(b"tensors")
    os.kill(await mesh.await_pid("worker/w0"), signal.SIGKILL)
    await until(lambda: os.listdir(kept) == [mine.name])
    await mesh.until("asleep", "g0.0", lambda r: r.phase == InstancePhase.GONE and r.is_reconciled)
    await mesh.remove("g0.0")
    await until(lambda: not mine.exists())
