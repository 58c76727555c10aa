"""Agent, workers and role processes as real processes, under kills and stops."""

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
from tests.unit.node.smallmesh import WHY, SmallMesh, gone, until

OUTAGE_S = 7.5  # longer than a lease


async def test_residents_of_two_jobs_share_a_worker_and_none_hears_of_anothers_changes(
    mesh: SmallMesh,
) -> None:
    agent = mesh.start_agent()
    await mesh.form("w0")
    await mesh.place("g0.0")
    await mesh.place("g0.1", Role.TRAINING, "k", core=True)
    await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    engine, trainer = await mesh.pid_of("engine/g0.0"), await mesh.pid_of("trainer/k")

    asleep = await mesh.settle("g0.1", Role.TRAINING, "k", core=True, tier=Tier.MEMORY, epoch=2)
    assert asleep.reports[0].usage.memory and not asleep.reports[0].usage.accelerator
    assert await mesh.pid_of("trainer/k") == trainer, "another wish is no other process"

    await mesh.place("g0.0", generation=2, epoch=2)
    again = await mesh.pid_of("engine/g0.0", other_than=engine)
    await mesh.until_settled("g0.0")
    assert await gone(engine) and again != engine

    await mesh.remove("g0.1")
    assert await gone(trainer)
    assert await mesh.pid_of("engine/g0.0") == again
    drained = (mesh.directory / "drained").read_text().splitlines()
    assert drained == [
        "g0.0 is wished in generation 2 after 1",
        "g0.1 is gone from the record",
    ]
    told = [
        (e.fields["status"], e.fields["tier"], e.fields["epoch"])
        for e in await events.read_page(mesh.state)
        if e.kind == "actual" and e.fields["resident"] == "g0.1"
    ]
    assert told[0] == ("starting", "absent", 1) and told[-1] == ("ready", "memory", 2)
    agent.terminate()
    assert await agent.wait(scaled(20)) == 0
    assert mesh.processes() == []


@pytest.mark.deep
async def test_a_slow_or_failing_resident_does_not_hold_up_another(mesh: SmallMesh) -> None:
    mesh.start_agent()
    await mesh.form("w0")
    await mesh.settle("g0.0", job="slow")
    await mesh.place("g0.1", job="broken")
    slow = await mesh.pid_of("engine/g0.0")
    await mesh.remove("g0.0")
    await mesh.place("g0.2")
    await mesh.until("started", "g0.2", lambda r: 0 in r.reports)
    assert read_start_time(slow), "it drains for seconds"
    await mesh.until_settled("g0.2")
    failed = await mesh.until("failed", "g0.1", lambda r: r.phase == InstancePhase.FAILED)
    assert "exit status 9" in failed.detail and "engine-g0.1.log" in failed.detail
    assert (await mesh.resident("g0.2")).is_reconciled
    assert await gone(slow)


async def test_a_role_process_that_is_killed_or_stopped_is_replaced(mesh: SmallMesh) -> None:
    await mesh.begin()
    first = await mesh.pid_of("engine/g0.0")
    os.kill(first, signal.SIGKILL)
    second = await mesh.pid_of("engine/g0.0", other_than=first)
    await mesh.until_settled("g0.0")
    os.kill(second, signal.SIGSTOP)
    await mesh.pid_of("engine/g0.0", other_than=second)
    await mesh.until_settled("g0.0")
    assert await gone(second)


async def test_a_worker_outlives_an_outage_of_redis_that_outlasts_its_lease(
    mesh: SmallMesh,
) -> None:
    await mesh.begin()
    worker, engine = await mesh.pid_of("worker/w0"), await mesh.pid_of("engine/g0.0")
    os.kill(mesh.redis.pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)  # so that there is something to report
    await asyncio.sleep(OUTAGE_S)
    os.kill(mesh.redis.pid, signal.SIGCONT)
    await mesh.pid_of("engine/g0.0", other_than=engine)
    await mesh.until_settled("g0.0")
    assert await mesh.pid_of("worker/w0") == worker


async def test_a_killed_worker_takes_its_role_processes_along_and_its_successor_starts_them_again(
    mesh: SmallMesh,
) -> None:
    mesh.start_agent()
    await mesh.form("w0")
    await mesh.place("g0.0")
    await mesh.place("g0.1", Role.TRAINING, "k", core=True)
    before = await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    worker, engine = await mesh.pid_of("worker/w0"), await mesh.pid_of("engine/g0.0")
    trainer = await mesh.pid_of("trainer/k")
    os.kill(worker, signal.SIGKILL)
    assert await gone(engine) and await gone(trainer)
    await mesh.pid_of("worker/w0", other_than=worker)
    await mesh.pid_of("trainer/k", other_than=trainer)
    await mesh.pid_of("engine/g0.0", other_than=engine)
    after = await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    assert after.reports[0].token > before.reports[0].token


async def test_workers_outlive_the_agent_and_the_next_one_adopts_them(mesh: SmallMesh) -> None:
    agent = await mesh.begin(workers=2)
    names = ("worker/w0", "worker/w1", "engine/g0.0")
    before = [await mesh.pid_of(name) for name in names]
    agent.kill()
    await agent.wait(scaled(5))
    mesh.start_agent(workers=2)
    await mesh.pid_of("node/here", other_than=agent.pid)
    ups = await mesh.told("worker_up", 4)
    assert [(up["name"], up["pid"], up["how"]) for up in ups[2:]] == [
        ("worker/w0", before[0], "adopted"),
        ("worker/w1", before[1], "adopted"),
    ]
    assert [await mesh.pid_of(name) for name in names] == before
    os.kill(before[1], signal.SIGKILL)
    await mesh.pid_of("worker/w1", other_than=before[1])


@pytest.mark.rotating(2)
@pytest.mark.parametrize("redis_too", [False, True])
async def test_without_an_agent_nothing_is_left_after_a_while(
    mesh: SmallMesh, redis_too: bool
) -> None:
    agent = await mesh.begin("--orphan-s", "3")
    await mesh.write(AssignServices("here", ("sandbox/j/0",), WHY))
    names = ("worker/w0", "engine/g0.0", "sandbox/j/0")
    pids = [await mesh.pid_of(name) for name in names]
    agent.kill()
    if redis_too:
        mesh.redis.kill()
    for pid in pids:
        assert await gone(pid)
    assert mesh.processes() == []


async def test_a_move_without_room_is_refused_by_its_numbers_and_the_process_stays(
    mesh: SmallMesh,
) -> None:
    await mesh.begin("--memory-bytes", "999", "--accelerator-bytes", "1500")
    engine = await mesh.pid_of("engine/g0.0")
    await mesh.place("g0.0", tier=Tier.MEMORY, epoch=2)
    refused = await mesh.until("refused", "g0.0", lambda r: r.phase == InstancePhase.FAILED)
    assert "would take 1000 bytes of memory, and others have 0 of 999" in refused.detail
    assert refused.reports[0].tier == Tier.ACCELERATOR and refused.reports[0].epoch == 2

    await mesh.place("g0.1", job="k")
    larger = await mesh.until("refused", "g0.1", lambda r: r.phase == InstancePhase.FAILED)
    assert "which makes 2000 of 1500" in larger.detail
    assert (await mesh.resident("g0.0")).phase == InstancePhase.FAILED

    await mesh.settle("g0.0", tier=Tier.DISK, epoch=3)
    assert await mesh.pid_of("engine/g0.0") == engine


async def test_what_is_reported_for_an_earlier_wish_is_refused_and_the_later_one_is_read(
    mesh: SmallMesh,
) -> None:
    mesh.start_agent()
    await mesh.form("w0")
    settled = await mesh.settle("g0.0")
    report = settled.reports[0]
    await mesh.place("g0.0", tier=Tier.MEMORY, epoch=2)
    assert not await pool.report_instance(mesh.state, "w0", "g0", "g0.0", report)
    asleep = await mesh.until_settled("g0.0")
    assert asleep.reports[0].tier == Tier.MEMORY


async def test_what_a_resident_has_kept_on_disk_goes_with_it_and_not_with_its_worker(
    mesh: SmallMesh,
) -> None:
    kept = Path(mesh.settings.make_offload_directory("worker/w0"))
    mine, others, half = (
        kept / name for name in ("engine-g0.0.kept", "trainer-x.kept", "engine-g9.0.kept.new")
    )
    await mesh.begin()
    await mesh.settle("g0.0", tier=Tier.DISK, epoch=2)
    os.makedirs(kept, exist_ok=True)
    for file in (mine, others, half):
        file.write_bytes(b"tensors")
    os.kill(await mesh.pid_of("worker/w0"), signal.SIGKILL)
    await until(lambda: os.listdir(kept) == [mine.name])
    await mesh.until("asleep", "g0.0", lambda r: r.phase == InstancePhase.GONE and r.is_reconciled)
    await mesh.remove("g0.0")
    await until(lambda: not mine.exists())
