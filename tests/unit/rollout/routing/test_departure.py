"""Requests and caches that leave an engine whose host is about to end, for another engine."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from meshrl.common.api.calls.role import RoleControl
from meshrl.common.base.random import Random
from meshrl.services.engine import service as engine_service
from meshrl.services.engine.kv import departure
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.stories import story_on
from tests.unit.common.generation.test_builtin_engine import words
from tests.unit.rollout.routing.test_router import POLL_S, SLOTS, Bench

PROMPTS = (560, 600, 520)  # more tokens than an engine computes in a step
NEW = 60


class Computing(Bench):
    """Built-in engines, of which the first has a worker that ends it."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        super().__init__(clock, random)
        self.computes = True
        self.engine = self._engine("engine/g0")
        self.engines = {"engine/g0": self.engine}
        self.worker = self._mesh("worker/w0")

    async def start(self) -> None:
        await super().start()
        await self.worker.join(None)

    def run_turns(self) -> asyncio.Future[list[Trajectory]]:
        return asyncio.gather(
            *(
                self.generate(n, prompt=tuple(words(n + 1, length)), new=length - 3 + NEW)
                for n, length in enumerate(PROMPTS)
            )
        )

    async def drain(self, deadline_s: float) -> float:
        """Drain the first engine with this time for it; return how long that took."""
        began_s = self.clock.monotonic()
        ref = self.worker.ref("engine/g0")
        await ref.call(RoleControl.drain, "its host ends", deadline_s=deadline_s)
        del self.engines["engine/g0"]
        return self.clock.monotonic() - began_s


async def end_host(bench: Computing, deadline_s: float) -> tuple[list[Trajectory], int]:
    """Drain an engine while turns run; return these, and the tokens that came from its caches."""
    other = await bench.add("engine/g1")
    del bench.engines["engine/g1"]  # it serves later
    turns = bench.run_turns()
    await bench.clock.sleep(0.2)
    bench.engines["engine/g1"] = other
    await bench.clock.sleep(1.2 * POLL_S)
    assert bench.engine.engine.num_running == len(PROMPTS) <= SLOTS
    assert await bench.drain(deadline_s) < deadline_s
    found = await turns
    assert bench.router.continued_trajectories == len(PROMPTS)
    assert other.engine.tokens_generated >= len(PROMPTS)
    return found, other.cache_moves.received_tokens


@story_on(partial(run_virtual, limit_s=600.0), given=2)
async def test_caches_leave_within_the_time_the_most_valuable_first(
    clock: VirtualClock, random: Random
) -> None:
    bench, departures = Computing(clock, random), list[departure.Departure]()

    class Recorded(departure.Departure):
        async def run(self, left_s: float) -> None:
            departures.append(self)
            await super().run(left_s)

    await bench.start()
    expected = await bench.run_turns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_service, "Departure", Recorded)
        patch.setattr(departure, "MAX_LEAVING", 1)
        found, moved_tokens = await end_host(bench, 30.0)
    for there, here in zip(found, expected, strict=True):
        assert there.tokens.tolist() == here.tokens.tolist()
        np.testing.assert_allclose(there.logprobs, here.logprobs, atol=2e-4)
    [leaving] = departures
    assert [PROMPTS[session] for session in leaving.order] == sorted(PROMPTS, reverse=True)
    assert bench.router.cache_actions == {"move": len(PROMPTS)}
    assert moved_tokens > sum(PROMPTS) / 4, "the other engine computed the rest meanwhile"


@story_on(partial(run_virtual, limit_s=600.0), given=2)
async def test_engine_without_time_ends_its_requests_at_once(
    clock: VirtualClock, random: Random
) -> None:
    bench = Computing(clock, random)
    await bench.start()
    await end_host(bench, 5.0)
    assert not bench.engine.is_leaving and bench.engine.draining
