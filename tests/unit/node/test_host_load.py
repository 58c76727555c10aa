"""What an agent says of its host's processors and memory."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.api.stats import HostLoadStats
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.cores import Cores
from meshrl.common.mesh.process.ends.limits import Room
from meshrl.services.node.agent import HostLoad
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.unit.common.generation.engines_under_test import StandingClock


def test_busy_cores_are_the_mean_of_the_last_seconds_and_memory_is_what_is_left() -> None:
    clock = StandingClock()
    host = SimulatedHost(clock, Random(0))
    load = HostLoad(alone("node/one", clock, Random(0), host), Path())
    host.left = Room(memory=7, disk=9)
    host.processors = Cores(4, 1000.0)
    load.look()
    assert load.stats == HostLoadStats(7, 9)
    busy_s = 1000.0
    for second in range(1, 21):
        busy_s += 3.0 if second <= 10 else 0.5
        clock.pass_(1.0)
        host.processors = Cores(4, busy_s)
        load.look()
        if second in (1, 10):
            assert (load.stats.cores, load.stats.busy_cores) == (4, 3.0)
        if second == 12:
            assert load.stats.busy_cores == (3 * 3.0 + 2 * 0.5) / 5
    assert load.stats.busy_cores == 0.5


def test_a_host_that_does_not_know_its_processors_says_nothing_of_them() -> None:
    clock = StandingClock()
    load = HostLoad(alone("node/one", clock, Random(0), SimulatedHost(clock, Random(0))), Path())
    for _ in range(3):
        load.look()
        clock.pass_(1.0)
    assert load.stats.memory_left_bytes is not None and load.stats.cores is None
