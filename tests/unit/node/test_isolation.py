"""Of several hosts each finds out which isolation it has, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.isolation import containment
from meshrl.common.job.isolation.containment import IsolationTiers
from meshrl.common.job.isolation.isolation import ORDER
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.services.node.isolation import AGAIN_S, RARELY_S, SOON_S, OwnIsolation


class Tried(SystemHost):
    """A host whose probes find, one after another, what a test says."""

    def __init__(self, *found: IsolationTiers | DeadlineExceeded) -> None:
        super().__init__()
        self.left = [*found]

    async def run_blocking(self, fn: Callable[..., Any], *args: Any, deadline_s: float) -> Any:
        assert fn is containment.tiers
        found = self.left.pop(0)
        if isinstance(found, DeadlineExceeded):
            raise found
        return found


class Naps(SystemClock):
    """What is told before each nap; the last of them is for ever."""

    def __init__(self, host: Tried) -> None:
        self.host, self.told = host, list[tuple[list[str], float]]()
        self.own: OwnIsolation | None = None
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert self.own is not None
        self.told.append((self.own.tiers or [], seconds))
        if not self.host.left:
            self.over.set()
            await asyncio.Event().wait()


async def told(*found: IsolationTiers | DeadlineExceeded) -> list[tuple[list[str], float]]:
    """What a host says whose probes find this, and for how long it then waits; 0: it is done."""
    host = Tried(*found)
    clock = Naps(host)
    mesh = surroundings(joinable=True)
    mesh.host, mesh.clock = host, clock
    clock.own = OwnIsolation(mesh, ["sandboxes"])
    finding, over = asyncio.create_task(clock.own.run()), asyncio.create_task(clock.over.wait())
    await asyncio.wait((finding, over), return_when=asyncio.FIRST_COMPLETED)
    done = [(clock.own.tiers or [], 0.0)] if finding.done() else []
    for task in (finding, over):
        task.cancel()
    await asyncio.gather(finding, over, return_exceptions=True)
    return clock.told + done


def surroundings(**settings: Any) -> Any:
    return SimpleNamespace(
        settings=MeshSettings(redis_url="", run_root="", host="here", **settings),
        host=SystemHost(),
        clock=SystemClock(),
        telemetry=Telemetry("node/here"),
    )


async def test_a_host_that_takes_sandboxes_says_what_it_has_once_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no bwrap there, and no runsc
    found = await asyncio.to_thread(containment.tiers)
    assert found.known and set(found.tiers) < {*ORDER} - {"bwrap", "cgroup", "runner"}
    own = OwnIsolation(surroundings(joinable=True), ["shards", "sandboxes"])
    assert own.tiers == ["trying"]
    said = await told(*[found] * 3)
    assert said[-1][0] == list(found.tiers) and said[-1][1] >= AGAIN_S, "tried again all the same"


async def test_a_better_tier_that_failed_is_tried_again_and_told_once_it_works() -> None:
    busy = IsolationTiers(("landlock",), sure=False)
    assert await told(busy, IsolationTiers(("cgroup",))) == [
        (["landlock", "trying"], SOON_S),
        (["cgroup"], 0.0),
    ]
    assert await told(busy, busy, busy, IsolationTiers(("bwrap",))) == [
        *[(["landlock", "trying"], SOON_S)] * 2,
        (["landlock"], AGAIN_S),
        (["bwrap"], 0.0),
    ]


async def test_a_probe_that_fails_itself_says_nothing_of_the_host_and_takes_nothing_away() -> None:
    late = DeadlineExceeded("late")
    assert await told(
        late, late, IsolationTiers((), sure=False, known=False), IsolationTiers(("bwrap",))
    ) == [
        *[(["trying"], AGAIN_S)] * 3,
        (["bwrap"], 0.0),
    ]
    lost = await told(
        IsolationTiers(("bwrap", "runner"), sure=False), *[IsolationTiers((), sure=False)] * 2
    )
    assert lost[-1] == (["bwrap", "runner"], AGAIN_S)


async def test_what_only_another_setting_of_the_host_gives_is_looked_for_rarely() -> None:
    assert await told(IsolationTiers(("landlock",))) == [(["landlock"], RARELY_S)]
    assert await told(IsolationTiers(())) == [([], AGAIN_S)]


async def test_nothing_is_tried_on_the_only_host_nor_where_no_sandbox_comes() -> None:
    for own in (
        OwnIsolation(surroundings(), ["sandboxes"]),
        OwnIsolation(surroundings(joinable=True), ["shards"]),
    ):
        await own.run()
        assert own.tiers is None
