"""Turns on engines that refuse, fail, come and go: what waits, what moves, what fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from meshrl.common.api.engine import FinishReason, SamplingParams
from meshrl.common.api.stats import EngineStats
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.random import Random
from meshrl.common.generation.engine_contract import TokenEngine
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.token_records import TokenRows
from meshrl.services.engine.service import EngineService
from meshrl.services.rollout.record.group_commit import GroupCommit
from meshrl.services.rollout.routing.assignment import MAX_ATTEMPTS, MAX_REJECTION_S
from meshrl.services.rollout.routing.cmlfq import BucketScheduler
from meshrl.services.rollout.routing.engine_link import TURN_TIMEOUT_S, EngineSnapshot
from meshrl.services.rollout.routing.length_trees import LengthTrees, PastTrajectory
from meshrl.services.rollout.routing.queue_policy import LengthBucket
from meshrl.services.rollout.routing.router import Router
from meshrl.services.rollout.trajectories.trajectory import Trajectory, Turn
from meshrl.sim.engines.simulated_engine import SimulatedEngine
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.generation.engines_under_test import built_in
from tests.unit.common.generation.test_torch_engine import words

SLOTS = 4
PROMPT = 700  # more than an engine computes in a step: what it computed goes after it
NEW = 20  # tokens of a turn
LOOK_S = 0.5


class Forgetful:
    """A token sink for what needs no ledger."""

    async def write_tokens(self, rows: TokenRows) -> None:
        return None


class Bench:
    """A router and simulated engines, one of them in service, under virtual time."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.computes = False  # engines are the built-in one, not simulated
        self.buckets = [LengthBucket(1 << 30, SLOTS)]
        self.past: list[PastTrajectory] = []
        self.degrees: dict[str, int] = {}  # of engines, where they are not 1
        self.follows = False  # buckets are those of the engines
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state = open_simulated_state(clock)
        self.routers: list[Router] = []
        self.router = self.shard("rollout/0")
        self.engine = self._engine("engine/g0")
        self.engines = {"engine/g0": self.engine}
        self.plateau = 0  # that engines publish
        self.tasks: list[asyncio.Task[None]] = []

    def shard(self, name: str) -> Router:
        """The router of another rollout shard."""
        self.rollout = self._mesh(name)
        self.routers.append(self._router())
        return self.routers[-1]

    def _router(self) -> Router:
        commits = GroupCommit(self.rollout, Forgetful())
        scheduler = BucketScheduler(self.buckets, 1, LengthTrees(self.past), self.follows)
        return Router(self.rollout, commits, SamplingParams([], []), SLOTS, scheduler)

    def _engine(self, name: str) -> EngineService:
        engine: TokenEngine = SimulatedEngine(self.clock, SLOTS, 100.0)
        if self.computes:
            engine = built_in("eager", SLOTS, 1024, clock=self.clock)
        return EngineService(self._mesh(name), engine, lambda action: action())

    def _mesh(self, name: str) -> Mesh:
        return Mesh(
            name,
            name.partition("/")[0],
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem://{name}"),
                clock=self.clock,
                random=self.random.child(name),
                host=SimulatedHost(self.clock, self.random.child("host " + name)),
            ),
        )

    async def start(self) -> None:
        await self.engine.mesh.join(self.engine)
        await self.rollout.join(None)
        self.tasks.append(asyncio.create_task(self._drive(self.engine)))
        self.tasks.append(asyncio.create_task(self._look()))

    async def add(self, name: str) -> EngineService:
        """Another engine comes into service."""
        engine = self._engine(name)
        await engine.mesh.join(engine)
        self.tasks.append(asyncio.create_task(self._drive(engine)))
        self.engines[name] = engine
        return engine

    async def _drive(self, engine: EngineService) -> None:
        while True:
            engine.run_once()
            await self.clock.sleep(0.02)

    async def _look(self) -> None:
        while True:
            alive = {
                name: EngineSnapshot(
                    "",
                    EngineStats(
                        requests=service.shard_streams.request_counts,
                        plateau=self.plateau,
                        cache_bytes_per_token=service.engine.cache_bytes_per_token,
                        tensor_parallel=self.degrees.get(name, 1),
                    ),
                )
                for name, service in self.engines.items()
            }
            for router in self.routers:
                router.update_engines(alive)
            await self.clock.sleep(LOOK_S)

    def begin(self, member: int) -> asyncio.Task[Trajectory]:
        return asyncio.create_task(self.generate(member))

    async def generate(
        self,
        member: int,
        prompt: tuple[int, ...] = (1, 2, 3),
        new: int = NEW,
        router: Router | None = None,
    ) -> Trajectory:
        router = router or self.router
        t = Trajectory(0, member, 0, 0, seed=member)
        t.set_prompt(list(prompt))
        async with router.create_assignment(t) as stay:
            finish = await stay.generate(3 + new)
        assert (finish, t.length) == (FinishReason.LENGTH, 3 + new)
        return t


def on_bench(story: Callable[[Bench], object]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.start()
        await story(bench)  # type: ignore[misc]

    run_virtual(main, limit_s=3600.0)


@story_on(on_bench)
async def test_an_engine_that_refuses_for_a_while_costs_no_trajectory(bench: Bench) -> None:
    await bench.generate(0)
    bench.engine.draining = True
    later = asyncio.gather(*(bench.generate(member) for member in range(1, 9)))
    await bench.clock.sleep(MAX_REJECTION_S / 2)
    assert not later.done()
    bench.engine.draining = False
    await later


@story_on(on_bench)
async def test_a_trajectory_that_no_engine_ever_serves_fails_by_type(bench: Bench) -> None:
    await bench.generate(0)
    bench.engine.draining = True
    began = bench.clock.monotonic()
    with pytest.raises(ToolFailed, match="engines have refused trajectory"):
        await bench.generate(1)
    assert bench.clock.monotonic() - began > MAX_REJECTION_S


@story_on(on_bench)
async def test_a_request_that_five_engines_fail_fails_by_type(bench: Bench) -> None:
    began = bench.clock.monotonic()
    with pytest.raises(ToolFailed, match=f"{MAX_ATTEMPTS} engines in a row failed trajectory"):
        await bench.generate(0, prompt=(1, 9999, 3))  # outside of the vocabulary
    assert bench.clock.monotonic() - began < MAX_REJECTION_S
    assert bench.router.continued_trajectories == MAX_ATTEMPTS


LONG = 400  # tokens of a turn that outlasts a few looks


@story_on(on_bench)
async def test_what_waits_at_a_busy_engine_moves_to_one_that_is_free(bench: Bench) -> None:
    other = bench.shard("rollout/1")
    await bench.rollout.join(None)
    await bench.generate(0)
    await bench.generate(0, router=other)
    before = bench.engine.engine.tokens_generated
    first = [bench.generate(member, new=LONG) for member in range(SLOTS)]
    second = [bench.generate(member, new=LONG, router=other) for member in range(SLOTS)]
    everything = asyncio.gather(*first, *second)
    await bench.clock.sleep(0.3)
    assert bench.engine.engine.num_waiting == SLOTS
    added = await bench.add("engine/g1")
    await everything
    assert bench.router.rebalanced_trajectories + other.rebalanced_trajectories == SLOTS
    generated = bench.engine.engine.tokens_generated + added.engine.tokens_generated
    assert generated - before == 2 * SLOTS * LONG  # none was generated again


@story_on(on_bench)
async def test_an_idle_engine_takes_what_is_above_the_plateau_without_loss(bench: Bench) -> None:
    bench.plateau = 1
    everything = asyncio.gather(*(bench.generate(m, new=LONG) for m in range(SLOTS)))
    await bench.clock.sleep(0.3)
    added = await bench.add("engine/g1")
    await everything
    assert bench.router.rebalanced_trajectories == SLOTS // 2
    assert bench.router.continued_trajectories == 0
    generated = bench.engine.engine.tokens_generated + added.engine.tokens_generated
    assert generated == SLOTS * LONG


class TwoBuckets(Bench):
    """Built-in engines, one for what is short and one for what follows a failure."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        super().__init__(clock, random)
        self.computes = True
        self.buckets = [LengthBucket(20, SLOTS), LengthBucket(1 << 30, SLOTS)]
        failure = ("run", "small", "failure")
        self.past = [PastTrajectory(0, ((failure, 5),), 100)] * 5
        self.routers = []
        self.router = self.shard("rollout/0")
        self.engine = self._engine("engine/g0")
        self.engines = {"engine/g0": self.engine}

    async def two_turns(self, router: Router) -> Trajectory:
        t = Trajectory(0, 1, 0, 0, seed=1)
        t.set_prompt(words(1, PROMPT))
        async with router.create_assignment(t) as stay:
            await stay.generate(PROMPT + 30)
            t.open_turn = Turn("", 30, "run", None, "error: no", has_tool_value=True)
            router.on_tool_return(stay)
            t.append([4, 5])
            await stay.generate(PROMPT + 52)
        return t


@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_a_trajectory_that_turns_out_long_changes_engine_and_takes_its_cache_along(
    clock: VirtualClock, random: Random
) -> None:
    bench = TwoBuckets(clock, random)
    await bench.start()
    stayed = await bench.two_turns(bench.router)  # there is one engine
    other = await bench.add("engine/g1")
    await clock.sleep(2 * LOOK_S)
    moved = await bench.two_turns(bench.router)
    assert bench.router.cache_actions == {"move": 1}
    assert other.engine.tokens_generated == 20
    assert other.engine.tokens_computed <= PROMPT + 52  # what did not come
    assert moved.tokens.tolist() == stayed.tokens.tolist()
    np.testing.assert_allclose(moved.logprobs, stayed.logprobs, atol=2e-4)
    assert bench.router.links["engine/g0"].ended_sessions == {1}, "it is let go of where it was"


class Following(TwoBuckets):
    """Engines of one worker, and of two where the test says so; buckets follow them."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        super().__init__(clock, random)
        self.buckets, self.follows = [LengthBucket(100, SLOTS)], True
        failure = ("run", "small", "failure")
        self.past = [PastTrajectory(0, ((failure, 5),), 100)] * 20 + [
            PastTrajectory(0, (), 1)
        ] * 1200
        self.routers = []
        self.router = self.shard("rollout/0")


@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_an_engine_of_two_workers_takes_the_long_ones_when_it_comes_until_it_goes(
    clock: VirtualClock, random: Random
) -> None:
    bench = Following(clock, random)
    await bench.start()
    await bench.two_turns(bench.router)
    assert len(bench.router.scheduler.buckets) == 1
    bench.degrees = {"engine/g1": 2}
    large = await bench.add("engine/g1")
    await clock.sleep(2 * LOOK_S)
    assert bench.router.stats.buckets == {"engine/g0": 0, "engine/g1": 1}
    assert (await bench.two_turns(bench.router)).length == PROMPT + 52
    assert large.engine.tokens_generated == 20, "the turn after the failure"
    del bench.engines["engine/g1"]
    await clock.sleep(2 * LOOK_S)
    assert len(bench.router.scheduler.buckets) == 1
    assert (await bench.two_turns(bench.router)).length == PROMPT + 52


@story_on(on_bench)
async def test_time_without_any_engine_is_no_refusal(bench: Bench) -> None:
    await bench.generate(0)
    bench.engine.draining = True
    waits = [bench.begin(member) for member in range(1, 4)]
    await bench.clock.sleep(2 * LOOK_S)  # they were refused
    del bench.engines["engine/g0"]
    await bench.clock.sleep(2 * MAX_REJECTION_S)
    late = await bench.add("engine/g1")
    late.draining = True
    await bench.clock.sleep(2 * LOOK_S)
    late.draining = False
    for wait in waits:
        await wait


@story_on(on_bench)
async def test_a_new_lineage_is_served_by_engines_that_have_its_weights_alone(bench: Bench) -> None:
    engine = bench.engine
    await engine.weights.update_weights({}, 15, "m0.15", lineage=0)
    assert (await bench.generate(0)).versions[-1] == 15
    bench.router.enter_lineage(1)  # it begins at version 8
    waits = bench.begin(1)
    await bench.clock.sleep(20.0)
    assert not waits.done(), "15 is a version of the abandoned lineage"
    later = await bench.add("engine/g1")
    await later.weights.update_weights({}, 8, "m0.8", lineage=1)
    assert (await waits).versions[-1] == 8
    await engine.weights.update_weights({}, 8, "m0.8", lineage=1)
    await bench.clock.sleep(2 * LOOK_S)
    assert bench.router.links["engine/g0"].version == 8


@story_on(on_bench)
async def test_a_lineage_that_begins_with_loaded_weights_is_served_by_them(bench: Bench) -> None:
    await bench.engine.weights.update_weights({}, 8, "m0.8", lineage=0)
    bench.router.enter_lineage(1)
    waits = bench.begin(0)
    await bench.clock.sleep(2.0)
    assert not waits.done()
    bench.engine.weights.enter_lineage(1)
    assert (await waits).versions[-1] == 8


def waits(bench: Bench) -> list[tuple[str, str]]:
    return [
        (w["on"], w["what"]) for w in bench.rollout.waits.list_longest([]) if w["what"] != "tokens"
    ]


@story_on(on_bench)
async def test_a_version_that_no_engine_has_is_waited_for_by_name(bench: Bench) -> None:
    await bench.generate(0)
    t = Trajectory(0, 1, 0, version=5, seed=1)
    t.set_prompt([1, 2, 3])
    ahead = asyncio.create_task(bench.router.create_assignment(t).generate(3 + NEW))
    await bench.clock.sleep(30.0)
    assert waits(bench) == [("engine/g0", "an engine at version 5")]
    del bench.engines["engine/g0"]
    await bench.clock.sleep(2 * LOOK_S)
    assert waits(bench) == [("an engine", "an engine at version 5")]
    late = await bench.add("engine/g1")
    await late.weights.update_weights({}, 5, "fifth")
    assert await ahead == FinishReason.LENGTH
    await bench.clock.sleep(2 * LOOK_S)
    assert waits(bench) == []


@pytest.mark.deep
@story_on(on_bench)
async def test_to_wait_for_room_is_no_news(bench: Bench) -> None:
    everything = asyncio.gather(*(bench.generate(m, new=10 * LONG) for m in range(3 * SLOTS)))
    await bench.clock.sleep(30.0)
    assert bench.router.queue_length == 2 * SLOTS and waits(bench) == []
    await everything


@pytest.mark.deep
@story_on(on_bench)
async def test_two_shards_divide_what_moves_and_it_comes_to_rest(bench: Bench) -> None:
    other = bench.shard("rollout/1")
    await bench.rollout.join(None)
    bench.plateau = 2
    mine = [bench.generate(member, new=10 * LONG) for member in range(SLOTS // 2)]
    theirs = [bench.generate(m, new=10 * LONG, router=other) for m in range(SLOTS // 2)]
    everything = asyncio.gather(*mine, *theirs)
    await bench.clock.sleep(0.3)
    await bench.add("engine/g1")
    await bench.clock.sleep(20.0)
    assert bench.router.rebalanced_trajectories + other.rebalanced_trajectories == SLOTS // 2
    await everything


@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_a_bucket_without_an_engine_is_not_last(clock: VirtualClock, random: Random) -> None:
    bench = TwoBuckets(clock, random)  # one engine: the long bucket has none
    await bench.start()
    t = await bench.two_turns(bench.router)
    assert t.length == PROMPT + 52
    assert bench.router.cache_actions == {}  # it had no reason to leave
    assert bench.engine.engine.tokens_computed < PROMPT + 52 + 20


TOKENS = 300


def begin(bench: Bench, member: int) -> asyncio.Task[Trajectory]:
    return asyncio.create_task(bench.generate(member, new=TOKENS))


@pytest.fixture
def expected() -> list[list[int]]:
    """Turns of three members on an engine that is well."""
    found: list[list[int]] = []

    async def story(bench: Bench) -> None:
        for member in range(3):
            found.append((await begin(bench, member)).turn_tokens.tolist())

    on_bench(story)
    return found


@pytest.mark.deep
@story_on(on_bench)
async def test_a_stuck_turn_goes_on_elsewhere(bench: Bench, expected: list[list[int]]) -> None:
    turn = begin(bench, 0)
    await bench.clock.sleep(1.0)
    stuck = bench.engine
    stuck.commands.enqueue(stuck.engine.pause)
    await bench.add("engine/g1")
    await bench.clock.sleep(TURN_TIMEOUT_S / 2)
    assert not turn.done()
    await bench.clock.sleep(TURN_TIMEOUT_S / 2 + 10.0)
    assert turn.done() and turn.result().turn_tokens.tolist() == expected[0]
    stuck.commands.enqueue(stuck.engine.resume)
    await bench.clock.sleep(5.0)
    assert turn.result().length == 3 + TOKENS, "what came late was taken in"


@story_on(on_bench)
async def test_a_turn_whose_engine_dies_goes_on_elsewhere_after_its_last_token(
    bench: Bench, expected: list[list[int]]
) -> None:
    turns = [begin(bench, member) for member in range(3)]
    await bench.clock.sleep(1.5)
    assert bench.engine.engine.num_running == 3
    await bench.add("engine/g1")
    await bench.clock.sleep(2 * LOOK_S)
    await bench.engines.pop("engine/g0").mesh.transport.close()
    await bench.clock.sleep(20.0)
    assert [turn.result().turn_tokens.tolist() for turn in turns] == expected
    assert bench.router.continued_trajectories == 3
