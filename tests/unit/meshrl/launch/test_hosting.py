"""A host that has joined: whom it believes that it is let in no more, and what ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import StateUnavailable
from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.places import MeshPlace, read_if_whole
from meshrl.launch.ending import STOP_S
from meshrl.launch.foreground import AGAIN, status_of
from meshrl.launch.hosts.hosting import Hosting, HostShape
from meshrl.sim.redis.state import simulated_state
from tests.contract.state.state_bench import binary_of, running_server
from tests.load import scaled

LONG_S = 600.0
WITHIN_S = 60.0


class Hurried(SystemClock):
    """On which a sleep is over at once, and has lasted `times` as long."""

    def __init__(self, times: float = 1.0) -> None:
        self.passed_s, self._times = 0.0, times

    def monotonic(self) -> float:
        return super().monotonic() + self.passed_s

    async def sleep(self, seconds: float) -> None:
        self.passed_s += self._times * seconds
        await asyncio.sleep(0)


def hosting_in(root: Path, url: str = "redis://127.0.0.1:1/0", drain_s: float = 0.0) -> Hosting:
    place = MeshPlace(root)
    place.directory.mkdir(mode=0o700)
    settings = MeshSettings(
        redis_url=url, run_root=str(root), host="gpu1-aa", secret="5e" * 32, joinable=True
    )
    settings.to_file(place.settings)
    HostShape().write(place)
    return Hosting(place, drain_s)


async def test_a_redis_that_knows_it_no_more_alone_expels_no_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosting = hosting_in(tmp_path)
    hosting.clock = clock = Hurried()
    hosting.state = simulated_state(SystemClock())
    watching = asyncio.create_task(hosting._watch())
    async with asyncio.timeout(scaled(WITHIN_S)):
        while clock.passed_s < LONG_S and not watching.done():
            await asyncio.sleep(0)
    assert not watching.done() and not hosting.failed.is_set() and not hosting.expelled
    assert capsys.readouterr().out.count("Redis does not let gpu1-aa in") == 1
    watching.cancel()


@pytest.mark.needs("redis-server")
async def test_a_start_that_redis_refuses_may_be_tried_again(tmp_path: Path) -> None:
    with running_server(binary_of("redis-server")) as server:
        hosting = hosting_in(tmp_path, server.url)
        hosting.clock = Hurried(times=20.0)
        async with asyncio.timeout(scaled(WITHIN_S)):
            with pytest.raises(StateUnavailable, match="cannot be reached") as caught:
                await hosting._reached()
    assert status_of(caught.value) == AGAIN


def test_it_tells_how_long_its_end_may_take_and_leaves_when_it_was_asked_to(tmp_path: Path) -> None:
    hosting = hosting_in(tmp_path, drain_s=300.0)
    hosting.place.leaving.touch()
    hosting._hold.take()
    try:
        assert not hosting.leaves, "that was asked of the one before"
        assert read_if_whole(hosting.place.launcher)["end_s"] == 300.0 + STOP_S
        hosting.place.leaving.touch()
        assert hosting.leaves
    finally:
        hosting._hold.give_back()
