"""Measurements of a shard's own work, as the planner reads them and as traces have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from meshrl.common.base.occupancy import Occupancy
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED, Stopwatch
from meshrl.common.records.run_lines import Traces
from meshrl.common.state.pool.demand.measured import LEVELS, Lengths, MeasuredWork
from meshrl.services.rollout.routing.stay import AT_ENGINE, TURN
from meshrl.services.rollout.trajectories.trajectory import Trajectory

IN_FLIGHT = "flight"  # places of `Worked.spent`, beside those of a stay: training trajectories
SHUT = "shut"  # and the gate, which is there while it holds back what there is room for
LATEST, LEAST = 512, 16  # trajectories whose lengths are published: so many at most, and at least


class Worked:
    """Counts of groups and trajectories that may be trained, and where their time went."""

    def __init__(self, spent: Occupancy) -> None:
        """`spent` goes by the clock of the job: what happens in a pause is no work."""
        self.spent = spent
        self.groups = 0  # handed in
        self.trajectories = 0  # ended, by whatever end
        self._prompted = 0  # tokens of the prompts of those that did not fail
        self._latest: deque[tuple[int, int]] = deque(maxlen=LATEST)  # (sampled, prompt) of each
        self._lengths: Lengths | None = None  # of those, as long as they are the latest

    def ended(self, sampled: int, prompt: int) -> None:
        """A training trajectory is over that did not fail, with so many tokens sampled behind a
        prompt of so many.
        """
        self._prompted += prompt
        self._latest.append((sampled, prompt))
        self._lengths = None

    @property
    def lengths(self) -> Lengths | None:
        """Of the latest of those; None as long as they are few."""
        if self._lengths is None and len(self._latest) >= LEAST:
            sampled, prompts = np.array(self._latest, np.float64).T
            levels = tuple(map(float, np.quantile(sampled, LEVELS)))
            self._lengths = Lengths(len(self._latest), levels, float(prompts.mean()))
        return self._lengths

    def work(self, sampled: int) -> MeasuredWork:
        """All so far, trajectories in flight among them; `sampled`: tokens of training ones."""
        flight_s, turn_s = self.spent.seconds(IN_FLIGHT), self.spent.seconds(TURN)
        engine_s = self.spent.seconds(AT_ENGINE)
        return MeasuredWork(
            groups=self.groups,
            trajectories=self.trajectories,
            sampled=sampled,
            flight_s=flight_s,
            engine_s=engine_s,
            queue_s=turn_s - engine_s,
            tool_s=flight_s - turn_s,
            shut_s=self.spent.seconds(SHUT),
            prompted=self._prompted,
        )


class TrajectoryTimes:
    """Gives trajectories their stopwatch, and tells what it says in the end, of as many groups as
    the job has traced.

    A trajectory is in one state at a time: `open` until its prompt is there, `queue` until an
    engine has room for its turn, `cache` while its keys and values come along, `prefill` until the
    first token of the turn is written down (the engine's own queue is part of it), `decode`,
    `environment`, `tool`, `reward`, `scoring`.
    """

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._clock = mesh.clock
        self._traces = Traces(mesh, job, f"shard-{mesh.name.rpartition('/')[2]}")

    @contextmanager
    def of(self, t: Trajectory) -> Iterator[None]:
        """The time of a trajectory; within another one of the same it is part of that."""
        if t.watch is not UNTIMED or not self._traces.has(t.group):
            yield
            return
        watch = t.watch = Stopwatch(self._clock, "open")
        try:
            yield
        finally:
            t.watch = UNTIMED
            ending = t.ending  # None when it is cut off, as its shard ends
            self._traces.write(
                {
                    "kind": "trajectory",
                    "at": round(watch.began, 6),
                    "group": t.group,
                    "member": t.member,
                    "version": t.version,
                    "prompt": t.prompt_length,
                    "tokens": t.length,
                    "ending": ending.reason if ending else "",
                    "reward": ending.reward if ending else None,
                    "training": t.recorded,
                    "parts": watch.parts(),
                }
            )

    async def close(self) -> None:
        await self._traces.close()
