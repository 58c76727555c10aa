"""Assignment whose engines fail, reject, move it and die: counted failures and released state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.job_clock import JobClock
from meshrl.common.base.occupancy import Occupancy
from meshrl.common.base.random import Random
from meshrl.services.rollout.routing.assignment import MAX_ATTEMPTS, MAX_REJECTION_S, Assignment
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.stories import story_on
from tests.unit.rollout.routing.test_router import POLL_S, SLOTS, Bench

LIMIT = 1000


class ScriptedLink:
    """Engine that answers each request with the next step of its script."""

    name = "engine/g0"

    def __init__(self, script: list[Callable[[Assignment], FinishReason]]) -> None:
        self.script = script
        self.ended_sessions: set[int] = set()
        self.failures = 0

    def assign(self, assignment: Assignment) -> None: ...

    def unassign(self, assignment: Assignment) -> None: ...

    def back_off(self) -> None:
        self.failures += 1

    async def generate(self, assignment: Assignment, max_new: int) -> FinishReason:
        await asyncio.sleep(0)
        return self.script.pop(0)(assignment)


class OneEngine:
    """Router interface of an assignment, with one engine."""

    stop_token_ids: frozenset[int] = frozenset()

    def __init__(self, clock: VirtualClock, link: ScriptedLink) -> None:
        self.clock, self.link = JobClock(clock), link
        self.occupancy = Occupancy(self.clock.monotonic)
        self.cache_actions: Counter[str] = Counter()
        self.continued_trajectories = self.rebalanced_trajectories = 0

    async def place(self, assignment: Assignment) -> None:
        assignment.assign(self.link)  # type: ignore[arg-type]

    def dispatch(self) -> None: ...

    def add_assignment(self, assignment: Assignment) -> None: ...

    def remove_assignment(self, assignment: Assignment) -> None: ...

    def enqueue(self, assignment: Assignment) -> None: ...

    def dequeue(self, assignment: Assignment) -> None: ...

    def can_serve(self, link: object) -> bool:
        return True

    def find_successor(self, link: object) -> str:
        return ""

    def find_target(self, name: str, version: int) -> ScriptedLink:
        return self.link


def abort(assignment: Assignment) -> FinishReason:
    return FinishReason.ABORTED


def reject(assignment: Assignment) -> FinishReason:
    return FinishReason.REJECTED


def sample_and_move(assignment: Assignment) -> FinishReason:
    one = np.ones(5, np.int32)
    assignment.trajectory.append_sampled(one, np.zeros(5, np.float32), one)
    assignment.balance_target = "engine/g0"
    return FinishReason.ABORTED


def stop(assignment: Assignment) -> FinishReason:
    return FinishReason.STOP


def run_script(
    *script: Callable[[Assignment], FinishReason], turns: int = 1, pause_s: float = 0.0
) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        t = Trajectory(0, 0, 0, 0, seed=1)
        t.set_prompt([1, 2, 3])
        engines = OneEngine(clock, ScriptedLink(list(script)))
        async with Assignment(engines, t) as assignment:  # type: ignore[arg-type]
            for _ in range(turns):
                assert await assignment.generate(LIMIT) is FinishReason.STOP
                await clock.sleep(pause_s)
        assert not engines.link.script

    run_virtual(main, limit_s=36_000.0)


def test_failures_before_a_token_do_not_count_after_it() -> None:
    some = [abort] * (MAX_ATTEMPTS - 1)
    run_script(*some, sample_and_move, *some, stop)


def test_consecutive_failures_end_the_assignment() -> None:
    with pytest.raises(ToolFailed, match=f"{MAX_ATTEMPTS} engines in a row failed"):
        run_script(*[abort] * MAX_ATTEMPTS)


def test_rejection_time_does_not_start_at_a_failure_of_an_earlier_turn() -> None:
    run_script(abort, stop, reject, stop, turns=2, pause_s=2 * MAX_REJECTION_S)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("tenths", range(0, 24))
@story_on(partial(run_virtual, limit_s=3600.0), given=2)
async def test_turns_of_a_dead_engine_continue_at_another(
    clock: VirtualClock, random: Random, tenths: int
) -> None:
    """Let the engine die while turns are queued, running or between two turns."""
    bench = Bench(clock, random)
    await bench.start()
    await clock.sleep(2 * POLL_S)

    async def two_turns(member: int) -> int:
        t = Trajectory(0, member, 0, 0, seed=member)
        t.set_prompt([1, 2, 3])
        async with bench.router.create_assignment(t) as assignment:
            await assignment.generate(43)
            await clock.sleep(0.3)
            t.append([4])
            await assignment.generate(84)
        return t.length

    turns = [asyncio.create_task(two_turns(m)) for m in range(3 * SLOTS)]
    await clock.sleep(tenths / 10)
    await bench.engines.pop("engine/g0").mesh.transport.close()
    await bench.add("engine/g1")
    assert await asyncio.gather(*turns) == [84] * len(turns)
    await clock.sleep(2 * POLL_S)
    (link,) = bench.router.links.values()
    assert (len(link.assignments), len(link.running_assignments), bench.router.queue_length) == (
        0,
        0,
        0,
    )
    assert bench.router.free_requests == SLOTS and not bench.router.assignments
    assert bench.rollout.waits.list_longest([]) == []
