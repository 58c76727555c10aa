"""Load reports of a host: processors, memory, and a GPU driver that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.common.api.stats import HostLoadStats
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.random import Random
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.mesh.process.diagnosis.host_limits import FreeSpace
from meshrl.common.mesh.process.processor_usage import ProcessorUsage
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.services.node.agent import HostLoadSampler
from meshrl.services.node.gpus.watch import DRIVER_TIMEOUT_S, READ_S, GpuWatch
from meshrl.sim.virtual_loop import VirtualClock
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import virtual_test
from tests.unit.common.generation.engines_under_test import ManualClock


def test_busy_cores_are_a_mean_and_memory_is_the_remainder() -> None:
    clock = ManualClock()
    host = SimulatedHost(clock, Random(0))
    load = HostLoadSampler(alone("node/one", clock, Random(0), host), Path())
    host.left = FreeSpace(memory_bytes=7, disk_bytes=9)
    host.processors = ProcessorUsage(4, 1000.0)
    load.sample()
    assert load.stats == HostLoadStats(7, 9)
    busy_s = 1000.0
    for second in range(1, 21):
        busy_s += 3.0 if second <= 10 else 0.5
        clock.advance(1.0)
        host.processors = ProcessorUsage(4, busy_s)
        load.sample()
        if second in (1, 10):
            assert (load.stats.cores, load.stats.busy_cores) == (4, 3.0)
        if second == 12:
            assert load.stats.busy_cores == (3 * 3.0 + 2 * 0.5) / 5
    assert load.stats.busy_cores == 0.5


def test_unknown_processor_count_is_left_out() -> None:
    clock = ManualClock()
    load = HostLoadSampler(
        alone("node/one", clock, Random(0), SimulatedHost(clock, Random(0))), Path()
    )
    for _ in range(3):
        load.sample()
        clock.advance(1.0)
    assert load.stats.memory_left_bytes is not None and load.stats.cores is None


class HangingHost(SimulatedHost):
    """Host whose blocking calls never return, with a count of the calls."""

    call_count = 0

    async def run_blocking(self, fn: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
        self.call_count += 1
        await asyncio.sleep(deadline_s)
        raise DeadlineExceeded(f"it took longer than {deadline_s:g} s")


@virtual_test(limit_s=3600.0)
async def test_hanging_driver_is_reported_once_and_called_one_call_at_a_time(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []

    async def record_event(kind: str, fields: dict[str, Any]) -> None:
        events.append({"kind": kind, **fields})

    host = HangingHost(clock, random, {})
    settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
    mesh = alone("node/one", clock, random, host, settings=settings)
    watch = GpuWatch(mesh, {"w0": Device("GPU-a", "NVIDIA H100", 80, 0)}, record_event)
    running = asyncio.create_task(watch.run())
    await clock.sleep(3 * (DRIVER_TIMEOUT_S + READ_S) - 1)
    running.cancel()
    assert host.call_count == 3
    [event] = events
    assert (event["kind"], event["what"], event["worker"]) == ("gpu", "lost", "w0")
    assert event["why"] == "the driver has not answered for 30 s"
    assert watch.stats()["gpu_lost"] == {"w0": 1}
