"""Seeding windows: engines on the core's workers hand their requests over within a step."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.stats import EngineStats
from meshrl.common.base.random import Random
from meshrl.services.rollout.routing.engine_link import EngineSnapshot
from meshrl.services.rollout.routing.load_balancer import EngineTotalLoad
from meshrl.services.rollout.routing.seeding import (
    PRECISION_S,
    SeedingEngine,
    choose_targets,
    compute_wait_s,
    list_closed,
)
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.stories import story_on
from tests.unit.rollout.routing.test_router import LONG, POLL_S, SLOTS, Bench, run_on_bench

engines = st.lists(
    st.builds(
        SeedingEngine,
        st.uuids().map(str),
        st.booleans(),
        st.integers(-1, 3),
        st.floats(0, 10),
    ),
    max_size=6,
)


@given(engines, st.none() | st.floats(0, 10))
def test_version_always_has_an_open_engine(
    found: list[SeedingEngine], seed_s: float | None
) -> None:
    closed = list_closed(found, seed_s)
    newest = max((e.version for e in found), default=-1)
    still = [e for e in found if e.name not in closed and e.version >= 0]
    assert newest < 0 or any(e.version == newest for e in still)
    assert all(e.takes_slices for e in found if e.name in closed)


@given(engines, st.floats(0, 10))
def test_window_ends_after_the_computed_wait(found: list[SeedingEngine], seed_s: float) -> None:
    wait_s = compute_wait_s(found, seed_s)
    left = [seed_s - e.loaded_s for e in found if e.takes_slices and e.version >= 0]
    assert wait_s == min((s for s in left if s >= PRECISION_S), default=None)
    if wait_s is not None:
        other = SeedingEngine("other", False, 3, 0.0)
        later = [replace(e, loaded_s=e.loaded_s + wait_s) for e in found]
        assert list_closed([*later, other], seed_s) > list_closed([*found, other], seed_s)


@given(st.integers(0, 40), st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_requests_go_to_the_least_full_batches(count: int, running: list[int]) -> None:
    loads = [EngineTotalLoad(f"e{i}", 8, n, 0, 0, 1) for i, n in enumerate(running)]
    after = Counter(dict(zip((e.name for e in loads), running, strict=True)))
    after.update(targets := choose_targets(count, loads))
    assert len(targets) == count
    for name in set(targets):
        assert after[name] - 1 <= min(after.values())


class SeedingBench(Bench):
    """Engine g0 shares the core's workers."""

    def publish(self) -> None:
        for router in self.routers:
            router.update_engines(
                {
                    name: EngineSnapshot(
                        "",
                        EngineStats(
                            requests=service.shard_streams.request_counts,
                            cache_bytes_per_token=service.engine.cache_bytes_per_token,
                            time_sliced=name == "engine/g0",
                        ),
                    )
                    for name, service in self.engines.items()
                }
            )

    async def _poll_engines(self) -> None:
        while True:
            self.publish()
            await self.clock.sleep(POLL_S)


def run_seeding(story: object) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = SeedingBench(clock, random)
        await bench.start()
        await story(bench)  # type: ignore[operator]

    run_virtual(main, limit_s=3600.0)


@story_on(run_seeding)
async def test_seeding_engine_hands_all_requests_over(bench: SeedingBench) -> None:
    seeding, other = bench.engine, await bench.add("engine/g1")
    await bench.generate(0)  # both links are connected
    await bench.clock.sleep(2 * POLL_S)
    before = [one.engine.tokens_generated for one in (seeding, other)]
    version = seeding.weights.version + 1
    for engine in (seeding, other):
        await engine.weights.update_weights({}, version, f"m0.{version}", lineage=0)
    bench.router.set_seeding(1.0)
    running = asyncio.gather(*(bench.generate(m, new=LONG) for m in range(SLOTS)))
    await bench.clock.sleep(0.5)
    assert seeding.engine.num_running and other.engine.num_running
    await bench.clock.sleep(0.7)
    assert (seeding.engine.num_running, seeding.engine.num_waiting) == (0, 0)
    assert other.engine.num_running == SLOTS
    stats = bench.router.stats
    assert stats.handovers == 1 and 0 < stats.handover_s < 0.5
    await running
    assert bench.router.continued_trajectories == 0, "no engine counts as failed"
    generated = [one.engine.tokens_generated for one in (seeding, other)]
    assert sum(generated) - sum(before) == SLOTS * LONG, "no token is sampled again"
    seeded = seeding.engine.tokens_generated
    await bench.generate(9)
    assert seeding.engine.tokens_generated == seeded, "it stays closed until the next version"
    await seeding.weights.update_weights({}, version + 1, f"m0.{version + 1}", lineage=0)
    await other.weights.update_weights({}, version + 1, f"m0.{version + 1}", lineage=0)
    await asyncio.gather(*(bench.generate(m) for m in range(10, 14)))
    assert seeding.engine.tokens_generated > seeded


@story_on(run_seeding)
async def test_closed_engine_opens_when_all_others_vanish(bench: SeedingBench) -> None:
    seeding = bench.engine
    await bench.add("engine/g1")
    await bench.generate(0)
    await bench.clock.sleep(2 * POLL_S)
    bench.router.set_seeding(0.0)
    assert bench.router.links["engine/g0"].is_closed
    running = asyncio.gather(*(bench.generate(m, new=LONG) for m in range(SLOTS)))
    await bench.clock.sleep(0.5)
    assert not seeding.engine.num_running
    del bench.engines["engine/g1"]
    await running
    assert seeding.engine.tokens_generated > 0


@story_on(run_seeding)
async def test_only_engine_is_never_closed(bench: SeedingBench) -> None:
    await bench.generate(0)
    bench.router.set_seeding(0.0)
    await asyncio.gather(*(bench.generate(m) for m in range(1, 5)))
    assert not bench.router.links["engine/g0"].is_closed and not bench.router.handovers


@story_on(run_on_bench)
async def test_engine_with_its_own_workers_has_no_window(bench: Bench) -> None:
    await bench.add("engine/g1")
    await bench.clock.sleep(2 * POLL_S)
    bench.router.set_seeding(0.0)
    assert not any(link.is_closed for link in bench.router.links.values())
