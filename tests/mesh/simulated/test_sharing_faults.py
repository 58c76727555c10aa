"""Faults in every phase of a switch between instances that share a gang."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from meshrl.common.base.host.settings import make_offload_path
from meshrl.common.state.pool.scheduling.decisions import RemoveInstance
from meshrl.common.state.pool.workers.rows import Tier
from tests.mesh.simulated.shared_gang import FLOATS, INSTANCES, PHASES, WHY, SharedGang, SharedRole
from tests.mesh.simulated.virtual_meshes import run_on_kind

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
    truncate_copies(role.mesh.settings.make_offload_directory(role.worker), role.name)


def truncate_copies(directory: str, name: str) -> None:
    for kind in FLOATS:
        if (file := make_offload_path(directory, name, kind)).exists():
            file.write_bytes(file.read_bytes()[:-1])


async def fill_disk(gang: SharedGang, role: SharedRole) -> None:
    gang.machine.disk.max_file_bytes = 0
    await gang.clock.sleep(30.0)
    gang.machine.disk.clear_faults()


class Expectation(NamedTuple):
    """Consequences of a fault for an instance and for the others."""

    within_s: float = 30.0  # until the others have computed three more steps
    keeps_own: bool = False  # the failing instance loses no tensor either
    keeps_others: bool = True
    memory_bytes: int = 0  # of the workers; 0: no limit


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
    tear_copies: Expectation(memory_bytes=1),  # all copies are on disk
    fill_disk: Expectation(memory_bytes=1, keeps_own=True),
}
CASES = [
    (phase, fault, PROCESSES[(row + column) % 4])
    for row, phase in enumerate(PHASES)
    for column, fault in enumerate(FAULTS)
    if (phase, FAULTS[fault].memory_bytes) != ("write_back", 1)  # which needs room in memory
]


@pytest.mark.rotating(58)
@pytest.mark.parametrize(
    ("phase", "fault", "target"), CASES, ids=lambda it: getattr(it, "__name__", it)
)
def test_other_instances_continue_and_no_step_is_lost(
    phase: str,
    fault: Callable[[SharedGang, SharedRole], Awaitable[None]],
    target: str,
    tmp_path: Path,
) -> None:
    if (phase, target) == ("granted", "rank/cores/1"):
        target = "trainer/cores"  # it has the slice of both ranks
    if (phase, target) == ("write_back", "engine/g0.0"):
        target = "trainer/cores"  # which is needed later on that worker, and so is written back

    async def story(gang: SharedGang) -> None:
        expected = FAULTS[fault]
        await gang.start(expected.memory_bytes)
        role = await gang.until_phase(phase, target)
        restores = gang.restores.copy()
        await fault(gang, role)
        await gang.until_steps(3, expected.within_s, INSTANCES.keys() - {role.seat.job})
        await gang.until_steps(3, 120.0)
        lost = (gang.restores - restores).keys()
        assert not expected.keeps_own or role.seat.job not in lost
        assert not expected.keeps_others or lost <= {role.seat.job}
        assert not gang.machine.failures

    run_on_kind(SharedGang, tmp_path, story)
