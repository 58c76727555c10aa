"""Seeding time of a job, and the workers that may vanish of which it makes use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from meshrl.common.state.pool.demand.measurements import MeasuredWork, Measurements
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.balance.seeding import CONFIRMATIONS
from meshrl.services.planner.memory import PlannerMemory
from tests.unit.planner.pools import PlannerBench, job
from tests.unit.planner.test_markets import count_markets, make_pool

TRAINING_S, WORK_S = 10.0, 35.0  # of a step: gradients, and rollout of one engine


@dataclass
class SeededJob:
    """Strictly on-policy job on one worker of its core, and engines elsewhere."""

    bench: PlannerBench
    work_s: float = WORK_S
    total: MeasuredWork = field(default_factory=MeasuredWork)
    step_s: float = 0.0

    @property
    def seed_s(self) -> float | None:
        state = self.bench.memory.seeding.get("job")
        return None if state is None or state.written_ms < 0 else state.written_ms / 1000

    @property
    def remote(self) -> int:
        there = self.bench.list_instances("job")
        return sum(r.role == Role.ROLLOUT and not r.time_sliced for _, r in there)

    def run_step(self) -> None:
        """Make a step: the engines elsewhere generate from its start, the core after seeding."""
        n, seed_s = self.remote, self.seed_s
        alone_s = self.work_s / (n + 1)
        if n == 0:
            rollout_s = seed_s = self.work_s
        elif seed_s is None or seed_s >= alone_s:
            rollout_s = seed_s = alone_s
        else:
            rollout_s = (self.work_s - seed_s) / n
        self.step_s = max(seed_s + TRAINING_S, rollout_s)
        self.total += MeasuredWork(
            steps=1,
            busy_s=TRAINING_S,
            wait_s=self.step_s - TRAINING_S,
            work_s=TRAINING_S,
            idle_s=self.step_s - rollout_s,
        )
        bench = self.bench
        bench.update_job("job", measurements=Measurements({"all": self.total}))
        bench.update(now_ms=bench.snapshot.now_ms + round(1000 * self.step_s))
        bench.decide_once(True)


def start(spot: int, settings: PoolSettings | None = None, **options: Any) -> SeededJob:
    job_row = job(colocate="always", max_staleness=0, **options)
    pool = make_pool(["reserved", *["spot"] * spot], job_row, settings=settings or PoolSettings())
    bench = PlannerBench(pool)
    bench.settle()
    return SeededJob(bench)


@pytest.mark.parametrize("spot", [1, 2, 3])
def test_seeding_balances_trainer_and_engines_elsewhere(spot: int) -> None:
    seeded = start(spot)
    for _ in range(10):
        seeded.run_step()
    ideal_s = (WORK_S - spot * TRAINING_S) / (1 + spot)
    assert seeded.remote == spot
    assert seeded.seed_s == pytest.approx(ideal_s, rel=0.1)
    assert seeded.step_s == pytest.approx(ideal_s + TRAINING_S, rel=0.05)


def test_job_returns_engines_that_cannot_shorten_its_steps() -> None:
    seeded = start(7)
    for _ in range(CONFIRMATIONS + 2):
        seeded.run_step()
    assert seeded.remote == 4 and count_markets(seeded.bench.snapshot, "job")["spot"] == 4
    seeded.work_s *= 1.5  # longer trajectories
    for _ in range(CONFIRMATIONS + 4):
        seeded.run_step()
    assert seeded.remote == 6


@pytest.mark.parametrize(("spot_price", "expected"), [(0.3, 4), (0.99, 0)])
def test_job_takes_no_engines_that_cannot_pay(spot_price: float, expected: int) -> None:
    seeded = start(4, PoolSettings(reserved_price=1.0, spot_price=spot_price))
    for _ in range(CONFIRMATIONS + 3):
        seeded.run_step()
    assert seeded.remote == expected
    assert (seeded.seed_s is None) == (expected == 0), "the core's engine does all of it"


def test_seeding_time_of_a_number_of_engines_is_remembered() -> None:
    seeded = start(2)
    for _ in range(10):
        seeded.run_step()
    two_s = seeded.seed_s
    bench = seeded.bench
    lost = bench.snapshot.workers[-1]

    def set_alive(alive: bool) -> None:
        workers = (*bench.snapshot.workers[:-1], replace(lost, alive=alive, gang=""))
        bench.update(workers=workers, now_ms=bench.snapshot.now_ms + 20_000)
        bench.settle()

    set_alive(False)
    for _ in range(10):
        seeded.run_step()
    assert seeded.remote == 1 and seeded.seed_s != two_s
    set_alive(True)
    seeded.run_step()
    assert seeded.remote == 2
    assert seeded.seed_s == pytest.approx(two_s, rel=0.1)


def test_job_without_seeding_has_no_window() -> None:
    seeded = start(2, seeding=False)
    for _ in range(5):
        seeded.run_step()
    assert seeded.seed_s is None and seeded.remote == 2


def test_memory_of_seeding_survives_json_and_explains_itself() -> None:
    seeded = start(2)
    for _ in range(4):
        seeded.run_step()
    bench = seeded.bench
    assert PlannerMemory.decode(bench.memory.encode()) == bench.memory
    text = bench.memory.encode()["explained"]["job"]["seeding"]
    assert "generate for" in text and "2 others continue" in text
