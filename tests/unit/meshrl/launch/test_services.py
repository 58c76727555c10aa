"""What one host's services and tasks tell of their own end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.directory.places import MeshPlace
from meshrl.launch.services.services import Services
from tests.load import scaled


async def test_an_error_that_ends_a_task_is_why_a_host_cannot_go_on(tmp_path: Path) -> None:
    services = Services(SystemHost(), SystemClock(), MeshPlace(tmp_path))
    endless = asyncio.create_task(asyncio.Event().wait())
    services.watch(endless, "wait")
    endless.cancel()
    await asyncio.wait([endless])
    assert not services.failed.is_set(), "it was asked to end"

    async def damaged() -> None:
        raise OSError("the disk is gone")

    services.watch(asyncio.create_task(damaged()), "admit hosts")
    async with asyncio.timeout(scaled(20.0)):
        await services.failed.wait()
    assert services.why == "the task to admit hosts failed: OSError: the disk is gone"
