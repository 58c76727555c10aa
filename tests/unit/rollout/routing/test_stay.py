"""A stay whose engines fail, refuse, move it and die: what counts, and what is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from meshrl.common.api.engine import Finish
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.job_clock import JobClock
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.base.random import Random
from meshrl.services.rollout.routing.stay import ATTEMPTS, PATIENCE_S, Stay
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.stories import story_on
from tests.unit.rollout.routing.test_router import LOOK_S, SLOTS, Bench

LIMIT = 1000


class ScriptedLink:
    """An engine that does with each request what its script says next."""

    name = "engine/g0"

    def __init__(self, script: list[Callable[[Stay], Finish]]) -> None:
        self.script = script
        self.ended: set[int] = set()
        self.failures = 0

    def take(self, stay: Stay) -> None: ...

    def free(self, stay: Stay) -> None: ...

    def failed(self) -> None:
        self.failures += 1

    async def generate(self, stay: Stay, max_new: int) -> Finish:
        await asyncio.sleep(0)
        return self.script.pop(0)(stay)


class OneEngine:
    """What a stay asks of a router that has one engine."""

    stop: frozenset[int] = frozenset()

    def __init__(self, clock: VirtualClock, link: ScriptedLink) -> None:
        self.clock, self.link = JobClock(clock), link
        self.spent = Occupancy(self.clock.monotonic)
        self.caches: Counter[str] = Counter()
        self.continued = self.moved = 0

    async def place(self, stay: Stay) -> None:
        stay.take(self.link)  # type: ignore[arg-type]

    def dispatch(self) -> None: ...

    def joined(self, stay: Stay) -> None: ...

    def parted(self, stay: Stay) -> None: ...

    def enqueue(self, stay: Stay) -> None: ...

    def unqueue(self, stay: Stay) -> None: ...

    def serves(self, link: object) -> bool:
        return True

    def sent_to(self, name: str, version: int) -> ScriptedLink:
        return self.link


def fails(stay: Stay) -> Finish:
    return Finish.ABORTED


def refuses(stay: Stay) -> Finish:
    return Finish.REFUSED


def brings_tokens_and_is_moved(stay: Stay) -> Finish:
    one = np.ones(5, np.int32)
    stay.trajectory.sampled(one, np.zeros(5, np.float32), one)
    stay.target = "engine/g0"
    return Finish.ABORTED


def ends(stay: Stay) -> Finish:
    return Finish.STOP


def scripted(*script: Callable[[Stay], Finish], turns: int = 1, pause_s: float = 0.0) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        t = Trajectory(0, 0, 0, 0, seed=1)
        t.begin([1, 2, 3])
        engines = OneEngine(clock, ScriptedLink(list(script)))
        async with Stay(engines, t) as stay:  # type: ignore[arg-type]
            for _ in range(turns):
                assert await stay.generate(LIMIT) is Finish.STOP
                await clock.sleep(pause_s)
        assert not engines.link.script

    run_virtual(main, limit_s=36_000.0)


def test_failures_before_a_token_do_not_count_after_it() -> None:
    some = [fails] * (ATTEMPTS - 1)
    scripted(*some, brings_tokens_and_is_moved, *some, ends)


def test_failures_in_a_row_end_it() -> None:
    with pytest.raises(ToolFailed, match=f"{ATTEMPTS} engines in a row failed"):
        scripted(*[fails] * ATTEMPTS)


def test_a_refusal_does_not_count_from_a_failure_of_an_earlier_turn() -> None:
    scripted(fails, ends, refuses, ends, turns=2, pause_s=2 * PATIENCE_S)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("tenths", range(0, 24))
@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_an_engine_may_die_at_any_time_and_turns_go_on_at_another(
    clock: VirtualClock, random: Random, tenths: int
) -> None:
    """Some turns are queued then, others come, run, or sit between two turns."""
    bench = Bench(clock, random)
    await bench.start()
    await clock.sleep(2 * LOOK_S)

    async def two_turns(member: int) -> int:
        t = Trajectory(0, member, 0, 0, seed=member)
        t.begin([1, 2, 3])
        async with bench.router.stay(t) as stay:
            await stay.generate(43)
            await clock.sleep(0.3)
            t.appended([4])
            await stay.generate(84)
        return t.length

    turns = [asyncio.create_task(two_turns(m)) for m in range(3 * SLOTS)]
    await clock.sleep(tenths / 10)
    await bench.engines.pop("engine/g0").mesh.transport.close()
    await bench.add("engine/g1")
    assert await asyncio.gather(*turns) == [84] * len(turns)
    await clock.sleep(2 * LOOK_S)
    (link,) = bench.router.links.values()
    assert (len(link.held), len(link.out), bench.router.waiting) == (0, 0, 0)
    assert bench.router.idle == SLOTS and not bench.router.stays
    assert bench.rollout.waits.published([]) == []
