"""Instances that share a worker, and one instance on several workers, as real processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.api.node import ExplainSlices, Worker
from meshrl.common.base.host.settings import SETTINGS_ENV
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import Gang, Instance, InstancePhase, Role
from meshrl.services.node.slices.slice_calls import SliceCallsMixin
from meshrl.services.node.slices.slice_queue import SliceLimits
from meshrl.services.node.slices.slice_scheduler import SliceScheduler
from tests.load import scaled
from tests.unit.node.smallmesh import ROOT, SOON_S, SmallMesh, has_exited
from tests.unit.node.time_slices.fully_resident import FullyResident
from tests.unit.node.time_slices.test_slice_scheduler import REST

FLOOR_S, HOUR_S = 3.0, 3600.0
GANG = Gang(
    "g0",
    ("w0",),
    1,
    (
        Instance("g0.0", "j", Role.ROLLOUT, time_sliced=True),
        Instance("g0.1", "j", Role.TRAINING, core=True, time_sliced=True),
    ),
)
COMPUTATIONS = 20  # computations of each process


async def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(SOON_S)
    while not holds():
        assert time.monotonic() < deadline, f"not {what}"
        await asyncio.sleep(0.02)


def read_computations(directory: Path, kind: str) -> list[tuple[float, float]]:
    note = directory / kind
    lines = note.read_text().splitlines() if note.exists() else []
    return [(float(a), float(b)) for a, b in map(str.split, lines)]


def find_overlaps(directory: Path) -> bool:
    pieces = sorted(
        read_computations(directory, "engine") + read_computations(directory, "trainer")
    )
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(pieces))


@pytest.mark.deep  # up to 11 CPU-s: stops a process until the stop falls into its time slice
async def test_engine_and_trainer_share_a_worker_and_a_stopped_slice_holder_is_killed(
    mesh: SmallMesh,
) -> None:
    children: dict[str, SystemChild] = {}

    def start(kind: str, instance: str) -> None:
        seat = Placement("g0", instance, "j", 1, time_sliced=True, slice_scheduler="worker/w0")
        children[instance] = mesh.host.spawn(
            [
                sys.executable,
                "-m",
                "tests.unit.node.time_slice_process",
                "--kind",
                kind,
                *seat.to_args(),
            ],
            name=kind,
            env={SETTINGS_ENV: str(mesh.directory / "settings.json"), "PYTHONPATH": str(ROOT)},
            log=mesh.directory / "agent.log",
        )

    async def kill(instance: str, generation: int, why: str) -> None:
        children[instance].kill()
        await children[instance].wait(scaled(SOON_S))
        scheduler.release_instance(instance)  # as a worker does when a process has exited

    # a time slice of a healthy process ends in time on a slow machine too
    leases = SliceLimits(factor=1.0, floor_s=scaled(FLOOR_S), cap_s=HOUR_S, default_s=HOUR_S)
    worker = await Mesh.open("worker/w0", "worker", mesh.settings)
    actor = type("OnlyTurns", (SliceCallsMixin,), {"interface": Worker, **REST})()
    actor.slice_scheduler = scheduler = SliceScheduler(worker, "w0", kill, FullyResident(), leases)
    scheduler.set_gang(GANG)
    await worker.join(actor)
    running = asyncio.create_task(scheduler.run())
    try:
        start("engine", "g0.0")
        start("trainer", "g0.1")
        both = ("engine", "trainer")
        await until(
            f"{COMPUTATIONS} pieces of both",
            lambda: all(
                len(read_computations(mesh.directory, kind)) >= COMPUTATIONS for kind in both
            ),
        )
        assert scheduler.killed_count == 0

        trainer = children["g0.1"].pid
        while True:  # until the stop falls into a time slice, not just after one
            await until("the trainer's turn", lambda: scheduler.stats().slice_holders == ["g0.1"])
            os.kill(trainer, signal.SIGSTOP)
            await asyncio.sleep(scaled(0.2))
            if scheduler.stats().slice_holders == ["g0.1"]:
                break
            os.kill(trainer, signal.SIGCONT)
        before = len(read_computations(mesh.directory, "engine"))
        await until(
            "more pieces of the engine",
            lambda: len(read_computations(mesh.directory, "engine")) >= before + COMPUTATIONS,
        )
        assert await has_exited(trainer), "its memory is free"
        assert scheduler.killed_count == 1
        slices = scheduler.explain(ExplainSlices(0.0)).slices
        [frozen] = [one for one in slices if one.end == "killed"]
        assert (frozen.instance, children["g0.1"].poll() is not None) == ("g0.1", True)
        assert leases.floor_s <= frozen.ended_s - frozen.granted_s < HOUR_S
        later = [one for one in slices if one.number > frozen.number]
        assert {one.instance for one in later} == {"g0.0"}
        assert later[0].granted_s >= frozen.ended_s, "not before its death"
        assert not find_overlaps(mesh.directory)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{mesh.logs()}") from error
    finally:
        running.cancel()
        for child in children.values():
            child.kill()
        await worker.leave()


@pytest.mark.rotating(2)
async def test_instance_is_ready_when_all_its_ranks_are(mesh: SmallMesh) -> None:
    mesh.start_agent(workers=3)
    await mesh.form("w2", "w0")
    await mesh.form("w1", gang="g1")
    await mesh.place("g0.0", Role.TRAINING, core=True, ranks=(0, 1))
    await mesh.place("g0.1", ranks=(1,))  # beside the second rank, which is on w0
    await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    core, rank = await mesh.await_pid("trainer/j"), await mesh.await_pid("rank/j/1")
    engine = await mesh.await_pid("engine/g0.1")

    os.kill(rank, signal.SIGKILL)  # its worker restarts it; the other ranks stay
    again = await mesh.await_pid("rank/j/1", other_than=rank)
    await mesh.until_settled("g0.0")
    assert [await mesh.await_pid(name) for name in ("trainer/j", "engine/g0.1")] == [core, engine]

    worker = await mesh.await_pid("worker/w0")
    os.kill(worker, signal.SIGKILL)  # the role processes of the worker die with it
    assert await has_exited(again) and await has_exited(engine)
    await mesh.await_pid("worker/w0", other_than=worker)
    await mesh.until_settled("g0.0")
    await mesh.until_settled("g0.1")
    assert await mesh.await_pid("trainer/j") == core

    await mesh.remove("g0.0")
    assert await has_exited(core)
    drained = (mesh.directory / "drained").read_text().splitlines()
    assert drained == ["g0.0 is not on record any more"] * len(drained) and drained


async def test_multi_worker_engine_has_one_process_on_its_first_worker(mesh: SmallMesh) -> None:
    mesh.start_agent(workers=2)
    await mesh.form("w1", "w0")
    await mesh.place("g0.0", job="slow", ranks=(1,))  # on w0; it drains for seconds
    await mesh.until_settled("g0.0")
    leaves = await mesh.await_pid("engine/g0.0")
    await mesh.remove("g0.0")
    await mesh.place("g0.1", ranks=(0, 1))
    engine = await mesh.await_pid("engine/g0.1")
    assert await has_exited(leaves), "it begins when nobody else is on the accelerators of its gang"
    found = await mesh.until_settled("g0.1")
    assert {report.phase for report in found.reports.values()} == {InstancePhase.READY}
    assert found.reports[1].token != found.reports[0].token

    worker = await mesh.await_pid("worker/w0")
    os.kill(worker, signal.SIGKILL)  # the worker reserves its accelerator again when it is back
    await mesh.await_pid("worker/w0", other_than=worker)
    token = found.reports[1].token
    await mesh.until("kept", "g0.1", lambda r: r.is_reconciled and r.reports[1].token != token)
    assert await mesh.await_pid("engine/g0.1") == engine
    await mesh.remove("g0.1")
    assert await has_exited(engine)
