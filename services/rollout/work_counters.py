"""Measurements of a shard's own work, as the planner reads them and as traces have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from meshrl.common.base.occupancy import Occupancy
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH, Stopwatch
from meshrl.common.records.line_files import TraceWriter
from meshrl.common.state.pool.demand.measurements import QUANTILES, LengthQuantiles, MeasuredWork
from meshrl.services.rollout.routing.assignment import AT_ENGINE, TURN
from meshrl.services.rollout.trajectories.trajectory import Trajectory

# places of `ShardWorkCounters.occupancy`, beside those of a stay: training trajectories
IN_FLIGHT = "flight"
GATE_CLOSED = "shut"  # and the gate, which is there while it holds back what there is room for
MAX_LENGTHS, MIN_LENGTHS = (
    512,
    16,
)  # trajectories whose lengths are published: so many at most, and at least


class ShardWorkCounters:
    """Counts of groups and trajectories that may be trained, and where their time went."""

    def __init__(self, occupancy: Occupancy) -> None:
        """`spent` goes by the clock of the job: what happens in a pause is no work."""
        self.occupancy = occupancy
        self.groups = 0  # handed in
        self.trajectories = 0  # ended, by whatever end
        self._prompt_tokens = 0  # tokens of the prompts of those that did not fail
        self._latest_lengths: deque[tuple[int, int]] = deque(
            maxlen=MAX_LENGTHS
        )  # (sampled, prompt) of each
        self._length_summary: LengthQuantiles | None = (
            None  # of those, as long as they are the latest
        )

    def add_trajectory(self, sampled_tokens: int, prompt_tokens: int) -> None:
        """A training trajectory is over that did not fail, with so many tokens sampled behind a
        prompt of so many.
        """
        self._prompt_tokens += prompt_tokens
        self._latest_lengths.append((sampled_tokens, prompt_tokens))
        self._length_summary = None

    @property
    def length_summary(self) -> LengthQuantiles | None:
        """Of the latest of those; None as long as they are few."""
        if self._length_summary is None and len(self._latest_lengths) >= MIN_LENGTHS:
            sampled, prompts = np.array(self._latest_lengths, np.float64).T
            levels = tuple(map(float, np.quantile(sampled, QUANTILES)))
            self._length_summary = LengthQuantiles(
                len(self._latest_lengths), levels, float(prompts.mean())
            )
        return self._length_summary

    def measure_work(self, sampled_tokens: int) -> MeasuredWork:
        """All so far, trajectories in flight among them; `sampled`: tokens of training ones."""
        flight_s, turn_s = self.occupancy.read_seconds(IN_FLIGHT), self.occupancy.read_seconds(TURN)
        engine_s = self.occupancy.read_seconds(AT_ENGINE)
        return MeasuredWork(
            groups=self.groups,
            trajectories=self.trajectories,
            sampled=sampled_tokens,
            flight_s=flight_s,
            engine_s=engine_s,
            queue_s=turn_s - engine_s,
            tool_s=flight_s - turn_s,
            shut_s=self.occupancy.read_seconds(GATE_CLOSED),
            prompted=self._prompt_tokens,
        )


class TrajectoryTracer:
    """Gives trajectories their stopwatch, and tells what it says in the end, of as many groups as
    the job has traced.

    A trajectory is in one state at a time: `open` until its prompt is there, `queue` until an
    engine has room for its turn, `cache` while its keys and values come along, `prefill` until the
    first token of the turn is written down (the engine's own queue is part of it), `decode`,
    `environment`, `tool`, `reward`, `scoring`.
    """

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._clock = mesh.clock
        self._traces = TraceWriter(mesh, job, f"shard-{mesh.name.rpartition('/')[2]}")

    @contextmanager
    def trace(self, trajectory: Trajectory) -> Iterator[None]:
        """The time of a trajectory; within another one of the same it is part of that."""
        if trajectory.stopwatch is not NULL_STOPWATCH or not self._traces.is_traced(
            trajectory.group
        ):
            yield
            return
        watch = trajectory.stopwatch = Stopwatch(self._clock, "open")
        try:
            yield
        finally:
            trajectory.stopwatch = NULL_STOPWATCH
            ending = trajectory.outcome  # None when it is cut off, as its shard ends
            self._traces.write(
                {
                    "kind": "trajectory",
                    "at": round(watch.began, 6),
                    "group": trajectory.group,
                    "member": trajectory.member,
                    "version": trajectory.version,
                    "prompt": trajectory.prompt_length,
                    "tokens": trajectory.length,
                    "ending": ending.reason if ending else "",
                    "reward": ending.reward if ending else None,
                    "training": trajectory.is_recorded,
                    "parts": watch.list_parts(),
                }
            )

    async def close(self) -> None:
        await self._traces.close()
