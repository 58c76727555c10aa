"""Router with engines that reject, fail, join and leave: waiting, moves and failures."""

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
from tests.unit.common.generation.test_builtin_engine import words

SLOTS = 4
PROMPT = 700  # More tokens than an engine computes in a step.
NEW = 20  # tokens of a turn
POLL_S = 0.5


class DiscardingSink:
    """Token sink for tests that need no ledger."""

    async def write_tokens(self, rows: TokenRows) -> None:
        return None


class Bench:
    """Router and simulated engines, one of them in service, under virtual time."""

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
        """Create the router of another rollout shard."""
        self.rollout = self._mesh(name)
        self.routers.append(self._router())
        return self.routers[-1]

    def _router(self) -> Router:
        commits = GroupCommit(self.rollout, DiscardingSink())
        scheduler = BucketScheduler(self.buckets, LengthTrees(self.past), self.follows)
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
        self.tasks.append(asyncio.create_task(self._poll_engines()))

    async def add(self, name: str) -> EngineService:
        """Add another engine to service."""
        engine = self._engine(name)
        await engine.mesh.join(engine)
        self.tasks.append(asyncio.create_task(self._drive(engine)))
        self.engines[name] = engine
        return engine

    async def _drive(self, engine: EngineService) -> None:
        while True:
            engine.run_once()
            await self.clock.sleep(0.02)

    async def _poll_engines(self) -> None:
        while True:
            alive = {
                name: EngineSnapshot(
                    "",
                    EngineStats(
                        requests=service.shard_streams.request_counts,
                        plateau=self.plateau,
                        leaving=service.is_leaving,
                        cache_bytes_per_token=service.engine.cache_bytes_per_token,
                        tensor_parallel=self.degrees.get(name, 1),
                    ),
                )
                for name, service in self.engines.items()
            }
            for router in self.routers:
                router.update_engines(alive)
            await self.clock.sleep(POLL_S)

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


def run_on_bench(story: Callable[[Bench], object]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.start()
        await story(bench)  # type: ignore[misc]

    run_virtual(main, limit_s=3600.0)


@story_on(run_on_bench)
async def test_temporary_rejections_lose_no_trajectory(bench: Bench) -> None:
    await bench.generate(0)
    bench.engine.draining = True
    later = asyncio.gather(*(bench.generate(member) for member in range(1, 9)))
    await bench.clock.sleep(MAX_REJECTION_S / 2)
    assert not later.done()
    bench.engine.draining = False
    await later


@story_on(run_on_bench)
async def test_trajectory_without_an_engine_fails_by_type(bench: Bench) -> None:
    await bench.generate(0)
    bench.engine.draining = True
    began = bench.clock.monotonic()
    with pytest.raises(ToolFailed, match="engines have rejected trajectory"):
        await bench.generate(1)
    assert bench.clock.monotonic() - began > MAX_REJECTION_S


@story_on(run_on_bench)
async def test_request_fails_by_type_after_five_engine_failures(bench: Bench) -> None:
    began = bench.clock.monotonic()
    with pytest.raises(
        ToolFailed, match=f"{MAX_ATTEMPTS} engines in a row failed to serve trajectory"
    ):
        await bench.generate(0, prompt=(1, 9999, 3))  # outside of the vocabulary
    assert bench.clock.monotonic() - began < MAX_REJECTION_S
    assert bench.router.continued_trajectories == MAX_ATTEMPTS


LONG = 400  # Tokens of a turn that outlasts a few polls.


@story_on(run_on_bench)
async def test_waiting_requests_move_from_a_busy_to_a_free_engine(bench: Bench) -> None:
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


@story_on(run_on_bench)
async def test_idle_engine_takes_requests_above_the_plateau_without_loss(bench: Bench) -> None:
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
    """Built-in engines, one for short trajectories and one for those that follow a failure."""

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
async def test_long_trajectory_changes_engine_with_its_cache(
    clock: VirtualClock, random: Random
) -> None:
    bench = TwoBuckets(clock, random)
    await bench.start()
    unmoved = await bench.two_turns(bench.router)  # there is one engine
    other = await bench.add("engine/g1")
    await clock.sleep(2 * POLL_S)
    moved = await bench.two_turns(bench.router)
    assert bench.router.cache_actions == {"move": 1}
    assert other.engine.tokens_generated == 20
    assert other.engine.tokens_computed <= PROMPT + 52  # missing tokens
    assert moved.tokens.tolist() == unmoved.tokens.tolist()
    np.testing.assert_allclose(moved.logprobs, unmoved.logprobs, atol=2e-4)
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
async def test_engine_of_two_workers_serves_long_trajectories_while_present(
    clock: VirtualClock, random: Random
) -> None:
    bench = Following(clock, random)
    await bench.start()
    await bench.two_turns(bench.router)
    assert len(bench.router.scheduler.buckets) == 1
    bench.degrees = {"engine/g1": 2}
    large = await bench.add("engine/g1")
    await clock.sleep(2 * POLL_S)
    assert bench.router.stats.buckets == {"engine/g0": 0, "engine/g1": 1}
    assert (await bench.two_turns(bench.router)).length == PROMPT + 52
    assert large.engine.tokens_generated == 20, "the turn after the failure"
    del bench.engines["engine/g1"]
    await clock.sleep(2 * POLL_S)
    assert len(bench.router.scheduler.buckets) == 1
    assert (await bench.two_turns(bench.router)).length == PROMPT + 52


@story_on(run_on_bench)
async def test_time_without_engines_is_no_rejection(bench: Bench) -> None:
    await bench.generate(0)
    bench.engine.draining = True
    list_waits = [bench.begin(member) for member in range(1, 4)]
    await bench.clock.sleep(2 * POLL_S)  # rejections of requests
    del bench.engines["engine/g0"]
    await bench.clock.sleep(2 * MAX_REJECTION_S)
    late = await bench.add("engine/g1")
    late.draining = True
    await bench.clock.sleep(2 * POLL_S)
    late.draining = False
    for wait in list_waits:
        await wait


@story_on(run_on_bench)
async def test_new_lineage_is_served_only_by_engines_with_its_weights(bench: Bench) -> None:
    engine = bench.engine
    await engine.weights.update_weights({}, 15, "m0.15", lineage=0)
    assert (await bench.generate(0)).versions[-1] == 15
    bench.router.enter_lineage(1)  # it begins at version 8
    list_waits = bench.begin(1)
    await bench.clock.sleep(20.0)
    assert not list_waits.done(), "15 is a version of the abandoned lineage"
    later = await bench.add("engine/g1")
    await later.weights.update_weights({}, 8, "m0.8", lineage=1)
    assert (await list_waits).versions[-1] == 8
    await engine.weights.update_weights({}, 8, "m0.8", lineage=1)
    await bench.clock.sleep(2 * POLL_S)
    assert bench.router.links["engine/g0"].version == 8


@story_on(run_on_bench)
async def test_lineage_starting_with_loaded_weights_is_served(bench: Bench) -> None:
    await bench.engine.weights.update_weights({}, 8, "m0.8", lineage=0)
    bench.router.enter_lineage(1)
    list_waits = bench.begin(0)
    await bench.clock.sleep(2.0)
    assert not list_waits.done()
    bench.engine.weights.enter_lineage(1)
    assert (await list_waits).versions[-1] == 8


def list_waits(bench: Bench) -> list[tuple[str, str]]:
    return [
        (w["on"], w["what"]) for w in bench.rollout.waits.list_longest([]) if w["what"] != "tokens"
    ]


@story_on(run_on_bench)
async def test_wait_for_a_missing_version_is_reported_by_name(bench: Bench) -> None:
    await bench.generate(0)
    t = Trajectory(0, 1, 0, version=5, seed=1)
    t.set_prompt([1, 2, 3])
    waiting_turn = asyncio.create_task(bench.router.create_assignment(t).generate(3 + NEW))
    await bench.clock.sleep(30.0)
    assert list_waits(bench) == [("engine/g0", "an engine at version 5")]
    del bench.engines["engine/g0"]
    await bench.clock.sleep(2 * POLL_S)
    assert list_waits(bench) == [("an engine", "an engine at version 5")]
    late = await bench.add("engine/g1")
    await late.weights.update_weights({}, 5, "fifth")
    assert await waiting_turn == FinishReason.LENGTH
    await bench.clock.sleep(2 * POLL_S)
    assert list_waits(bench) == []


@pytest.mark.deep
@story_on(run_on_bench)
async def test_wait_for_a_slot_is_not_reported(bench: Bench) -> None:
    everything = asyncio.gather(*(bench.generate(m, new=10 * LONG) for m in range(3 * SLOTS)))
    await bench.clock.sleep(30.0)
    assert bench.router.queue_length == 2 * SLOTS and list_waits(bench) == []
    await everything


@pytest.mark.deep
@story_on(run_on_bench)
async def test_two_shards_share_moves_and_converge(bench: Bench) -> None:
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
async def test_bucket_without_engines_is_not_the_last(clock: VirtualClock, random: Random) -> None:
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
    """Return the turns of three members on a healthy engine."""
    sequences: list[list[int]] = []

    async def story(bench: Bench) -> None:
        for member in range(3):
            sequences.append((await begin(bench, member)).turn_tokens.tolist())

    run_on_bench(story)
    return sequences


@pytest.mark.deep
@story_on(run_on_bench)
async def test_stuck_turn_continues_at_another_engine(
    bench: Bench, expected: list[list[int]]
) -> None:
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


@story_on(run_on_bench)
async def test_turn_of_a_dead_engine_continues_after_its_last_token(
    bench: Bench, expected: list[list[int]]
) -> None:
    turns = [begin(bench, member) for member in range(3)]
    await bench.clock.sleep(1.5)
    assert bench.engine.engine.num_running == 3
    await bench.add("engine/g1")
    await bench.clock.sleep(2 * POLL_S)
    await bench.engines.pop("engine/g0").mesh.transport.close()
    await bench.clock.sleep(20.0)
    assert [turn.result().turn_tokens.tolist() for turn in turns] == expected
    assert bench.router.continued_trajectories == 3
