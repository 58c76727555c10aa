"""Faults in every phase of a switch between instances that share a gang."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from meshrl.common.api.node import CreateSegment, SegmentLocation
from meshrl.common.base.files.offload_media import make_segment_key
from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.common.state.pool.scheduling.decisions import RemoveInstance
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from tests.mesh.simulated.shared_gang import FLOATS, INSTANCES, PHASES, WHY, SharedGang, SharedRole
from tests.mesh.simulated.sharing.invariants import list_account_errors
from tests.mesh.simulated.virtual_meshes import run_on_kind

MEMORY_BUDGET = 1_000_000  # bytes of all copies on a worker, and as much again
COPY_ROOM = 230_000  # bytes of the two largest copies; the others are on disk
PROCESSES = ("trainer/cores", "rank/cores/1", "engine/g0.0", "engine/g0.2")


async def kill(gang: SharedGang, role: SharedRole) -> None:
    role.process.kill()


async def hang(gang: SharedGang, role: SharedRole) -> None:
    role.process.stop()


async def slow_down(gang: SharedGang, role: SharedRole) -> None:
    role.extra_s = 8.0


async def kill_own_worker(gang: SharedGang, role: SharedRole) -> None:
    gang.find(role.worker).kill()


async def kill_scheduler(gang: SharedGang, role: SharedRole) -> None:
    gang.find("worker/w0").kill()


async def kill_agent(gang: SharedGang, role: SharedRole) -> None:
    gang.find("node/one").kill()
    await gang.clock.sleep(5.0)
    gang.start_agent()


async def lose_redis(gang: SharedGang, role: SharedRole) -> None:
    gang.redis.is_unreachable = True
    await gang.until_steps(3, 50.0)  # no slice needs it
    await gang.clock.sleep(30.0)
    gang.redis.clear_faults()


async def replace_instance(gang: SharedGang, role: SharedRole) -> None:
    await gang.place(replace(INSTANCES[role.seat.job], generation=2))


async def remove_instance(gang: SharedGang, role: SharedRole) -> None:
    instance = INSTANCES[role.seat.job]
    await gang.write(RemoveInstance("g0", instance.id, WHY))
    await gang.clock.sleep(5.0)
    await gang.place(replace(instance, id="g0.3"))


async def sleep_and_wake(gang: SharedGang, role: SharedRole) -> None:
    asleep = replace(INSTANCES[role.seat.job], tier=Tier.MEMORY, epoch=2)
    await gang.place(asleep)
    await gang.clock.sleep(20.0)
    await gang.place(replace(asleep, tier=Tier.ACCELERATOR, epoch=3))


async def tear_copies(gang: SharedGang, role: SharedRole) -> None:
    directory = role.mesh.settings.make_offload_directory(role.worker)
    segments = gang.find_worker(role.worker).segments
    for kind in FLOATS:
        in_memory = segments.find(make_segment_key(role.name, kind))
        tear_copy(make_offload_path(directory, role.name, kind), in_memory)


def tear_copy(file: Path, in_memory: SegmentLocation) -> None:
    if file.exists():
        file.write_bytes(file.read_bytes()[:-1])
    if in_memory.path:
        half = in_memory.size_bytes // 2
        with open(in_memory.path, "r+b") as segment:
            segment.seek(half)
            segment.write(bytes(in_memory.size_bytes - half))


async def fill_disk(gang: SharedGang, role: SharedRole) -> None:
    gang.machine.disk.max_file_bytes = 0
    await gang.clock.sleep(30.0)
    gang.machine.disk.clear_faults()


async def fill_memory(gang: SharedGang, role: SharedRole) -> None:
    gang.machine.free_space = FreeSpace(memory_bytes=0, disk_bytes=1 << 40)
    role.process.kill()  # which frees its memory: that of the next process has to leave for a disk
    await gang.until_steps(3, 60.0)
    assert any(one.kinds.stored_bytes[Tier.DISK] for one in gang.list_roles(role.worker))
    gang.machine.free_space = None


async def fill_memory_budget(gang: SharedGang, role: SharedRole) -> None:
    sleeper = "engine/asleep"
    workers = [gang.find_worker(f"worker/{name}") for name in ("w0", "w1")]
    for worker in workers:
        size_bytes = MEMORY_BUDGET - worker.segments.total_bytes
        worker._budgets.record_usage(sleeper, TierBytes(memory=size_bytes))
        worker.segments.create(CreateSegment(make_segment_key(sleeper), size_bytes))
    asleep = replace(INSTANCES[role.seat.job], tier=Tier.MEMORY, epoch=2)
    await gang.place(asleep)
    await gang.until_steps(3, 60.0, INSTANCES.keys() - {role.seat.job})
    assert not role.kinds.is_asleep
    for worker in workers:
        worker.segments.delete_process(sleeper)
        worker._budgets.remove(sleeper)
    await gang.clock.sleep(20.0)
    assert role.kinds.is_asleep
    await gang.place(replace(asleep, tier=Tier.ACCELERATOR, epoch=3))


class Expectation(NamedTuple):
    """Consequences of a fault for an instance and for the others."""

    within_s: float = 30.0  # until the others have computed three more steps
    keeps_own: bool = False  # the failing instance loses no tensor either
    keeps_others: bool = True
    memory_bytes: int = 0  # of the workers; 0: no limit. 1: all copies are on disk


FAULTS: dict[Callable[[SharedGang, SharedRole], Awaitable[None]], Expectation] = {
    kill: Expectation(),
    hang: Expectation(60.0),
    slow_down: Expectation(40.0, keeps_own=True),
    kill_own_worker: Expectation(60.0, keeps_others=False),
    kill_scheduler: Expectation(60.0, keeps_others=False),
    kill_agent: Expectation(keeps_own=True),
    lose_redis: Expectation(keeps_own=True),
    replace_instance: Expectation(),
    remove_instance: Expectation(),
    sleep_and_wake: Expectation(keeps_own=True),
    tear_copies: Expectation(memory_bytes=1),
    fill_disk: Expectation(memory_bytes=1, keeps_own=True),
    fill_memory: Expectation(),
    fill_memory_budget: Expectation(keeps_own=True, memory_bytes=MEMORY_BUDGET),
}


def choose_target(phase: str, number: int, has_memory: bool) -> str:
    """Choose a process that enters the phase."""
    match phase, PROCESSES[number % len(PROCESSES)]:
        case "granted", "rank/cores/1":
            return "trainer/cores"  # it has the slice of both ranks
        case "write_back", name:  # on its worker the core is needed last
            return name if name != "engine/g0.0" and has_memory else "trainer/cores"
        case "prefetch", name:  # the core leaves for the others
            return name if name == "rank/cores/1" and has_memory else "trainer/cores"
        case _, name:
            return name


CASES = [
    (phase, fault, choose_target(phase, row + column, FAULTS[fault].memory_bytes != 1))
    for row, phase in enumerate(PHASES)
    for column, fault in enumerate(FAULTS)
]


@pytest.mark.rotating(len(CASES))  # one a day
@pytest.mark.parametrize(
    ("phase", "fault", "target"), CASES, ids=lambda it: getattr(it, "__name__", it)
)
def test_other_instances_continue_and_no_step_is_lost(
    phase: str,
    fault: Callable[[SharedGang, SharedRole], Awaitable[None]],
    target: str,
    tmp_path: Path,
) -> None:
    async def story(gang: SharedGang) -> None:
        expected = FAULTS[fault]
        memory_bytes = expected.memory_bytes
        if phase in ("prefetch", "write_back") and memory_bytes == 1:  # they need some memory
            memory_bytes = COPY_ROOM
        await gang.start(memory_bytes, prefetches=phase == "prefetch")
        role = await gang.until_phase(phase, target)
        restores = gang.restores.copy()
        await fault(gang, role)
        await gang.until_steps(3, expected.within_s, INSTANCES.keys() - {role.seat.job})
        await gang.until_steps(3, 120.0)
        await gang.until_committed(1, 30.0)
        lost = (gang.restores - restores).keys()
        assert not expected.keeps_own or role.seat.job not in lost
        assert not expected.keeps_others or lost <= {role.seat.job}
        gang.stop()
        assert not await list_account_errors(gang.state, INSTANCES)
        assert not gang.machine.failures

    run_on_kind(SharedGang, tmp_path, story)
