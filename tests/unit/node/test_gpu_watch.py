"""A driver that hangs with its GPU is told once, and asked again when it has come to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.random import Random
from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.services.node.gpus.watch import ANSWER_S, READ_S, GpuWatch
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost


class HangingHost(SimulatedHost):
    """What blocks here does not return; how often it was asked for."""

    asked = 0

    async def run_blocking(self, fn: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
        self.asked += 1
        await asyncio.sleep(deadline_s)
        raise DeadlineExceeded(f"it took longer than {deadline_s:g} s")


def test_a_driver_that_hangs_is_told_once_and_asked_one_call_at_a_time(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    async def tell(kind: str, fields: dict[str, Any]) -> None:
        told.append({"kind": kind, **fields})

    async def main(clock: VirtualClock, random: Random) -> None:
        host = HangingHost(clock, random, {})
        settings = MeshSettings(redis_url="simulated", run_root=str(tmp_path), host="one")
        mesh = alone("node/one", clock, random, host, settings=settings)
        watch = GpuWatch(mesh, {"w0": Device("GPU-a", "NVIDIA H100", 80, 0)}, tell)
        running = asyncio.create_task(watch.run())
        await clock.sleep(3 * (ANSWER_S + READ_S) - 1)
        running.cancel()
        assert host.asked == 3
        [event] = told
        assert (event["kind"], event["what"], event["worker"]) == ("gpu", "lost", "w0")
        assert event["why"] == "the driver does not answer for 30 s"
        assert watch.stats()["gpu_lost"] == {"w0": 1}

    run_virtual(main, limit_s=3600.0)
