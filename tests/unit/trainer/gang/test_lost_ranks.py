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

    unreachable_until = 0.0
    loses_answer = False

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        if self._monotonic() < self.unreachable_until:
            raise StateUnavailable("Redis does not answer")
        answer = await super().run_script(script, keys, *args)
        if script == "append" and self.loses_answer:
            self.loses_answer = False
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

    async def read_losses(self) -> list[dict[str, Any]]:
        return [e.fields for e in await events.read_all(self.state) if e.kind == "rank_lost"]


def run_on_bench(story: Callable[[Bench], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.mesh.join(None)
        await story(bench)

    run_virtual(main, limit_s=3600.0)


@story_on(run_on_bench)
async def test_loss_is_reported_after_a_redis_outage(bench: Bench) -> None:
    began = bench.clock.monotonic()
    bench.state.unreachable_until = began + 4.0
    await bench.losses.record(LOST)
    assert bench.clock.monotonic() - began >= 4.0
    assert await bench.read_losses() == [{"job": "j", "why": str(LOST)}]


@story_on(run_on_bench)
async def test_loss_with_a_lost_answer_is_reported_once(bench: Bench) -> None:
    bench.state.loses_answer = True
    await bench.losses.record(LOST)
    assert len(await bench.read_losses()) == 1
    await bench.losses.record(LOST)
    assert len(await bench.read_losses()) == 2


@story_on(run_on_bench)
async def test_core_without_its_name_lease_reports_no_loss(bench: Bench) -> None:
    await registry.evict(bench.state, "trainer/j", bench.mesh.incarnation)
    entry = registry.RegistryEntry("trainer/j", "trainer", incarnation="another")
    await registry.register(bench.state, entry)
    with pytest.raises(Fenced):
        await bench.losses.record(LOST)
    assert await bench.read_losses() == []


@story_on(run_on_bench)
async def test_consecutive_losses_without_a_step_end_the_core(bench: Bench) -> None:
    for _ in range(MAX_RANK_LOSSES - 1):
        await bench.losses.record(LOST)
    bench.losses.consecutive = 0  # a step was done
    for _ in range(MAX_RANK_LOSSES - 1):
        await bench.losses.record(LOST)
    with pytest.raises(RankLost, match="rank 1"):
        await bench.losses.record(LOST)
    assert len(await bench.read_losses()) == 2 * MAX_RANK_LOSSES - 1
