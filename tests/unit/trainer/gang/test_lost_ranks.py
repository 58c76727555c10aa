"""Lost ranks of a core: each loss is reported once, whatever Redis does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from meshrl.common.base.errors import Fenced, RankLost, StateUnavailable
from meshrl.common.base.random import Random
from meshrl.common.state import events, registry
from meshrl.common.state.redis.client import StateClient
from meshrl.services.trainer.core.core import MAX_RANK_LOSSES, RankLossCounter
from meshrl.sim.redis.simulated_state import open_simulated_state_as
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on

LOST = RankLost("rank 1 does not answer")


class FailingState(StateClient):
    """State client that is disconnected until some time, or loses its next answer to an event."""

    away_until = 0.0
    loses_an_answer = False

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        if self._monotonic() < self.away_until:
            raise StateUnavailable("Redis does not answer")
        answer = await super().run_script(script, keys, *args)
        if script == "append" and self.loses_an_answer:
            self.loses_an_answer = False
            raise StateUnavailable("the answer was lost")
        return answer


class Bench:
    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock = clock
        self.state = open_simulated_state_as(FailingState, clock)
        self.mesh = alone(
            "trainer/j", clock, random, SimulatedHost(clock, random.child("host")), state=self.state
        )
        self.losses = RankLossCounter(self.mesh, "j")

    async def told(self) -> list[dict[str, Any]]:
        return [e.fields for e in await events.read_all(self.state) if e.kind == "rank_lost"]


def on_bench(story: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.mesh.join(None)
        await story(bench)

    run_virtual(main, limit_s=3600.0)


@story_on(on_bench)
async def test_a_loss_is_told_of_after_an_outage_of_redis(bench: Bench) -> None:
    began = bench.clock.monotonic()
    bench.state.away_until = began + 4.0
    await bench.losses.record(LOST)
    assert bench.clock.monotonic() - began >= 4.0
    assert await bench.told() == [{"job": "j", "why": str(LOST)}]


@story_on(on_bench)
async def test_a_loss_whose_answer_was_lost_is_told_of_once(bench: Bench) -> None:
    bench.state.loses_an_answer = True
    await bench.losses.record(LOST)
    assert len(await bench.told()) == 1
    await bench.losses.record(LOST)
    assert len(await bench.told()) == 2


@story_on(on_bench)
async def test_a_core_whose_name_is_anothers_tells_of_nothing(bench: Bench) -> None:
    await registry.evict(bench.state, "trainer/j", bench.mesh.incarnation)
    entry = registry.RegistryEntry("trainer/j", "trainer", incarnation="another")
    await registry.register(bench.state, entry)
    with pytest.raises(Fenced):
        await bench.losses.record(LOST)
    assert await bench.told() == []


@story_on(on_bench)
async def test_losses_without_a_step_between_them_end_the_core(bench: Bench) -> None:
    for _ in range(MAX_RANK_LOSSES - 1):
        await bench.losses.record(LOST)
    bench.losses.consecutive = 0  # a step was done
    for _ in range(MAX_RANK_LOSSES - 1):
        await bench.losses.record(LOST)
    with pytest.raises(RankLost, match="rank 1"):
        await bench.losses.record(LOST)
    assert len(await bench.told()) == 2 * MAX_RANK_LOSSES - 1
