"""A host as a whole says by HTTP whether it lives, and why it is not ready."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.redis.client import State
from meshrl.common.state.registry import Entry, register
from meshrl.directory.places import MeshPlace
from meshrl.launch.outward.outward import outward
from meshrl.launch.outward.standing import OLD_S, Standing
from meshrl.launch.root import RootProcess
from meshrl.sim.redis.client import SimulatedRedis
from meshrl.sim.redis.state import simulated_state
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.metrics.mesh_gauges import HeadSnapshot
from tests.load import scaled

WITHIN_S = 30.0  # on a busy host; each comes within a second or two


@dataclass
class Root(RootProcess):
    """A root process that a test sets."""

    place: MeshPlace
    settings: MeshSettings
    clock: SystemClock = field(default_factory=SystemClock)
    host: SystemHost = field(default_factory=SystemHost)
    reached: tuple[State, MeshSettings] | None = None
    ready: bool = False
    hindered: str = ""
    planned: tuple[str, ...] = ("node/here",)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def reach(self) -> SimulatedRedis:
        state = simulated_state(self.clock)
        self.reached = (state, self.settings)
        assert isinstance(state.client, SimulatedRedis)
        return state.client

    async def registers(self, name: str) -> None:
        assert self.reached is not None
        entry = Entry(name, name.split("/")[0], host="here", incarnation=name)
        await register(self.reached[0], entry, 600_000)


@dataclass
class Asked:
    root: Root
    stop: asyncio.Event
    url: str

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(answer, self.url + path)

    async def until(self, path: str, words: str) -> str:
        end = time.monotonic() + scaled(WITHIN_S)
        while words not in (said := (await self.get(path))[1]):
            assert time.monotonic() < end, said
            await asyncio.sleep(0.02)
        return said

    async def well(self) -> SimulatedRedis:
        redis = self.root.reach()
        await self.root.registers("node/here")
        self.root.ready = True
        await self.until("/readyz", "ok\n")
        return redis


def answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=scaled(WITHIN_S)) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@asynccontextmanager
async def asked(tmp_path: Path, head: bool = False, stall_s: float = 30.0) -> AsyncIterator[Asked]:
    settings = MeshSettings(redis_url="", run_root=str(tmp_path), host="here")
    place = MeshPlace(tmp_path)
    place.directory.mkdir()
    settings.to_file(place.settings)
    root, stop = Root(place, settings), asyncio.Event()
    async with outward(root, stop, "127.0.0.1:*", head, stall_s=stall_s, look_s=0.1) as address:
        yield Asked(root, stop, address)


async def test_it_says_in_words_why_it_is_not_ready(tmp_path: Path) -> None:
    async with asked(tmp_path) as host:
        assert await host.get("/readyz") == (503, "it is starting\n")
        assert await host.get("/livez") == (200, "ok\n")
        host.root.ready = True
        await host.until("/readyz", "nobody has asked Redis yet")
        redis = host.root.reach()
        await host.until("/readyz", "node/here renews no lease")
        await host.root.registers("node/here")
        await host.until("/readyz", "ok\n")
        host.root.hindered = "weights is down"
        await host.until("/readyz", "weights is down")
        host.root.hindered = ""
        redis.server.faults.away = True
        await host.until("/readyz", "Redis does not answer")
        assert "meshrl_redis_up 0.0" in (await host.get("/metrics"))[1]
        redis.server.faults.away = False
        await host.until("/readyz", "ok\n")
        assert host.root.reached is not None
        await pool.mark_host(host.root.reached[0], "here", "asked by hand")
        await host.until("/readyz", "it is draining: asked by hand")
        host.stop.set()
        assert await host.get("/readyz") == (503, "it is ending\n")
        assert (await host.get("/livez"))[0] == 200


async def test_it_lives_no_more_once_its_loop_stands_still(tmp_path: Path) -> None:
    async with asked(tmp_path, stall_s=0.6) as host:
        await host.until("/livez", "ok\n")
        with ThreadPoolExecutor(1) as others:
            asking = others.submit(fails, host.url + "/livez")
            while not asking.done():  # which holds the loop
                time.sleep(0.05)  # noqa: ASYNC251
        assert "the event loop has not run for" in asking.result()
        await host.until("/livez", "ok\n")


def fails(url: str) -> str:
    end = time.monotonic() + scaled(WITHIN_S)
    while (found := answer(url))[0] != 503:
        assert time.monotonic() < end
    return found[1]


async def test_processes_that_should_be_there_are_down_and_others_up(tmp_path: Path) -> None:
    async with asked(tmp_path) as host:
        await host.well()
        host.root.planned = ("node/here", "planner/2")
        await host.until("/metrics", 'meshrl_up{job="",kind="planner",service="planner/2"} 0.0')
        page = await host.until("/metrics", "meshrl_redis_up 1.0")
        assert 'meshrl_up{job="",kind="node",service="node/here"} 1.0' in page
        assert 'meshrl_up{job="",kind="root",service="hosting"} 1.0' in page
        assert f'meshrl_disk_free_bytes{{path="{tmp_path}"}}' in page
        assert "meshrl_hosts" not in page


async def test_at_the_head_it_shows_the_mesh_and_leaves_it_out_while_redis_is_away(
    tmp_path: Path,
) -> None:
    async with asked(tmp_path, head=True) as host:
        redis = await host.well()
        await host.until("/metrics", 'meshrl_hosts{state="up"} 1.0')
        redis.server.faults.away = True
        await host.until("/readyz", "Redis does not answer")
        await host.until("/metrics", "meshrl_redis_up 0.0")
        assert "meshrl_hosts" not in (await host.get("/metrics"))[1]


class Ahead(SystemClock):
    """Its time can be put forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


async def test_a_row_that_cannot_be_read_is_told_and_looked_at_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clock, bad = Ahead(), False

    async def of_mesh(state: State) -> HeadSnapshot:
        if bad:
            raise KeyError("phase")
        return HeadSnapshot(MeshSnapshot())

    settings = MeshSettings(redis_url="", run_root=str(tmp_path), host="here")
    root = Root(MeshPlace(tmp_path), settings, clock, ready=True)
    root.reach()
    await root.registers("node/here")
    standing = Standing(root, asyncio.Event(), of_mesh, 1000.0, 0.01)
    ticking, looking = asyncio.create_task(standing.tick()), asyncio.create_task(standing.look())

    async def until(words: str) -> None:
        async with asyncio.timeout(scaled(WITHIN_S)):
            while not (said := standing.not_ready()).startswith(words) or bool(said) != bool(words):
                await asyncio.sleep(0.01)

    await until("")
    bad = True
    await until("what Redis holds cannot be read: KeyError('phase')")
    assert capfd.readouterr().err.count("KeyError: 'phase'") == 1
    bad = False
    await until("")
    looking.cancel()  # whatever ends it
    clock.ahead_s = OLD_S + 1.0
    assert standing.not_ready().startswith("nobody has asked Redis for 3")
    ticking.cancel()
    await asyncio.gather(ticking, looking, return_exceptions=True)


async def test_a_port_that_is_taken_is_told_by_the_option(tmp_path: Path) -> None:
    async with asked(tmp_path) as host:
        where = host.url.removeprefix("http://")
        with pytest.raises(ConfigError, match="no port") as told:
            async with outward(host.root, host.stop, where, head=False):
                pass
        assert "--health" in told.value.where
