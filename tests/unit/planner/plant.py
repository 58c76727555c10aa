"""A job that runs as it is told: what its processes publish, for whatever split it is given.

Its rollout goes by a fixed point that is found step by step, its stages by a plain maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshrl.common.state.pool.demand.measured import Curve, Measured, MeasuredWork
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.workers.rows import Role, Tier
from tests.unit.planner.pools import Looks

TRAJECTORIES, SLOTS = 128.0, 64


@dataclass
class Plant:
    """One job. Times in seconds."""

    base_s: float = 0.02  # of a decode step,
    sequence_s: float = 0.001  # and for each sequence in it
    tokens: float = 50.0  # of a trajectory
    tool_s: float = 0.0  # of a trajectory
    flight: float = 192.0  # trajectories under way while rollout binds
    work_s: float = 2.0  # gradients of a step, by one worker
    fixed_s: float = 0.1  # of a step
    drag: float = 1.0  # times as long as it would, when a helper is there
    total: MeasuredWork = field(default_factory=MeasuredWork)

    def batch(self, engines: int) -> float:
        """Trajectories at each engine, of those under way, when rollout binds."""
        batch = 1.0
        for _ in range(200):
            at_engine_s = self.tokens * (self.base_s + batch * self.sequence_s)
            share = at_engine_s / (at_engine_s + self.tool_s)
            batch = 0.5 * batch + 0.5 * min(SLOTS, self.flight * share / engines)
        return batch

    def stages(self, engines: int, trainers: int) -> tuple[float, float]:
        """(rollout_s, train_s) of a step."""
        batch = self.batch(engines)
        token_s = self.base_s + batch * self.sequence_s
        rollout_s = TRAJECTORIES * self.tokens * token_s / (engines * batch)
        train_s = self.fixed_s + self.work_s / trainers
        drag = self.drag if trainers > 1 else 1.0
        return rollout_s * drag, train_s * drag

    def step_s(self, engines: int, trainers: int) -> float:
        """Seconds of a step."""
        return max(self.stages(engines, trainers))

    def steps(self, count: int, engines: int, trainers: int) -> float:
        """Makes so many steps; the seconds that they take."""
        rollout_s, train_s = self.stages(engines, trainers)
        step_s, batch = max(rollout_s, train_s), self.batch(engines)
        if rollout_s < step_s:  # engines are as busy as the trainer asks for
            drag = self.drag if trainers > 1 else 1.0
            share = TRAJECTORIES * self.tokens * drag / step_s / engines
            batch = share * self.base_s / (1 - share * self.sequence_s)
        token_s = self.base_s + batch * self.sequence_s
        each = TRAJECTORIES * count
        self.total += MeasuredWork(
            steps=count,
            groups=16.0 * count,
            trajectories=each,
            sampled=each * self.tokens,
            flight_s=each * (self.tokens * token_s + self.tool_s),
            engine_s=each * self.tokens * token_s,
            tool_s=each * self.tool_s,
            busy_s=train_s * count,
            wait_s=(step_s - train_s) * count,
            work_s=self.work_s * count,
            tokens=each * self.tokens,
        )
        return step_s * count

    @property
    def measured(self) -> Measured:
        """What its processes have published by now."""
        curve = Curve("cpu", 1, self.base_s, self.sequence_s, steps=1000)
        return Measured({"everybody": self.total}, (curve,))


def run(looks: Looks, plant: Plant, steps: int, job: str = "job", *, ready: bool = True) -> None:
    """A look after each of so many steps of the plant, with the split that is there."""
    for _ in range(steps):
        took_s = stepped(looks, plant, job)
        looks.change(now_ms=looks.snapshot.now_ms + round(1000 * max(took_s, 1.0)))
        looks.look(ready)


def stepped(looks: Looks, plant: Plant, job: str) -> float:
    """Makes a step of the plant; the seconds that it takes."""
    took_s = plant.steps(1, *split(looks, job))
    before: PlannedJob = next(j for j in looks.snapshot.jobs if j.id == job)
    looks.job(job, measured=plant.measured, steps_done=before.steps_done + 1)
    return took_s


def split(looks: Looks, job: str = "job") -> tuple[int, int]:
    """(engines, workers that train) of a job."""
    there = [r for _, r in looks.residents(job) if r.tier == Tier.ACCELERATOR]
    engines = sum(r.role == Role.ROLLOUT for r in there)
    return engines, sum(r.role == Role.TRAINING for r in there)
