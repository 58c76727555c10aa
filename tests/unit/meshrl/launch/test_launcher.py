"""A mesh of real processes: it comes up, mends itself, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from common.errors import Refused
from common.process.handle import start_time
from common.state import events, registry
from common.state.registry import Entry
from meshrl.commands import diagnosis
from meshrl.launch import leftovers
from meshrl.launch.launcher import Launcher, Shape
from meshrl.launch.places import MeshPlace
from meshrl.launch.redis import guard

pytestmark = pytest.mark.timeout(240)
PATIENCE_S = 60.0


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Launcher]:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    launcher = Launcher(MeshPlace(tmp_path), Shape(workers=2))
    await launcher.start()
    yield launcher
    await launcher.stop()
    assert leftovers.belonging_to(launcher.place.settings.resolve()) == []


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.1)


async def alive(mesh: Launcher) -> dict[str, Entry]:
    return {e.name: e for e in await registry.entries(mesh.state) if e.alive}


async def replaced(mesh: Launcher, name: str, incarnation: str) -> Entry:
    """The entry of the next incarnation of `name`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            entry = (await alive(mesh)).get(name)
            if entry is not None and entry.incarnation != incarnation:
                return entry
            await asyncio.sleep(0.1)


async def restarted(mesh: Launcher, redis: int) -> bool:
    return start_time(redis) == 0 and await guard.answers(mesh.settings.redis_url)


async def all_back(mesh: Launcher, names: set[str]) -> bool:
    return names == set(await alive(mesh))


async def test_services_that_die_or_stop_come_back(mesh: Launcher) -> None:
    before = await alive(mesh)
    assert {"planner/0", "planner/1", "weights", "sandbox/0", "rollout/0"} <= set(before)
    assert sum(e.kind == "worker" for e in before.values()) == 2
    os.kill(before["weights"].pid, signal.SIGKILL)
    os.kill(before["planner/1"].pid, signal.SIGSTOP)
    assert (await replaced(mesh, "weights", before["weights"].incarnation)).pid
    assert (await replaced(mesh, "planner/1", before["planner/1"].incarnation)).pid
    ended = [e.fields for e in await events.read_all(mesh.state) if e.kind == "process_ended"]
    assert {"weights", "planner/1"} <= {fields["name"] for fields in ended}
    after = await alive(mesh)
    assert after["rollout/0"].incarnation == before["rollout/0"].incarnation


async def test_a_silent_redis_is_named_and_restarted_with_its_data(mesh: Launcher) -> None:
    before = await alive(mesh)
    (redis,) = [pid for pid, name in mesh.pids.items() if name == "redis"]
    await events.append(mesh.state, "note", {"text": "kept"})
    os.kill(redis, signal.SIGSTOP)
    (stall,) = (await asyncio.to_thread(diagnosis, mesh.place))[0]
    assert (stall.waiter, stall.culprit) == ("everyone", "redis")
    await until(lambda: restarted(mesh, redis))
    assert "note" in {e.kind for e in await events.read_all(mesh.state)}
    await until(lambda: all_back(mesh, set(before)))


async def test_a_second_launcher_in_one_place_is_refused(mesh: Launcher) -> None:
    with pytest.raises(Refused, match="meshrl down"):
        await Launcher(mesh.place, Shape(workers=2)).start()
    assert await alive(mesh)
