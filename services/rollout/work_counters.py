"""Counters of a shard's own work, for the planner and for traces."""

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

# places of `ShardWorkCounters.occupancy`, beside those of an assignment: training trajectories
IN_FLIGHT = "flight"
IDLE = "idle"  # no trajectory in flight
GATE_CLOSED = "shut"  # and the gate, present while it blocks groups despite free capacity
MAX_LENGTHS, MIN_LENGTHS = (
    512,
    16,
)  # trajectories whose lengths are published: maximum and minimum number


class ShardWorkCounters:
    """Counts of groups and trajectories for training, and their time by state."""

    def __init__(self, occupancy: Occupancy) -> None:
        """Create counters. `occupancy` uses the clock of the job, so that pauses do not count."""
        self.occupancy = occupancy
        self.groups = 0  # submitted
        self.trajectories = 0  # ended, successfully or not
        self._prompt_tokens = 0  # prompt tokens of successful ones
        # (sampled, prompt) of each
        self._latest_lengths: deque[tuple[int, int]] = deque(maxlen=MAX_LENGTHS)
        self._length_summary: LengthQuantiles | None = None  # None: to be computed

    @contextmanager
    def count_flight(self) -> Iterator[None]:
        """Count a training trajectory in flight during the block."""
        try:
            with self.occupancy.occupy(IN_FLIGHT):
                self.occupancy.set_count(IDLE, 0)
                yield
        finally:
            self.occupancy.set_count(IDLE, not self.occupancy.read_count(IN_FLIGHT))

    def add_trajectory(self, sampled_tokens: int, prompt_tokens: int) -> None:
        """Add a successful training trajectory with its sampled tokens and prompt tokens."""
        self._prompt_tokens += prompt_tokens
        self._latest_lengths.append((sampled_tokens, prompt_tokens))
        self._length_summary = None

    @property
    def length_summary(self) -> LengthQuantiles | None:
        """Length quantiles of the latest trajectories; None while there are too few."""
        if self._length_summary is None and len(self._latest_lengths) >= MIN_LENGTHS:
            sampled, prompts = np.array(self._latest_lengths, np.float64).T
            levels = tuple(map(float, np.quantile(sampled, QUANTILES)))
            self._length_summary = LengthQuantiles(
                len(self._latest_lengths), levels, float(prompts.mean())
            )
        return self._length_summary

    def measure_work(self, sampled_tokens: int) -> MeasuredWork:
        """Measure all work so far, with trajectories in flight; `sampled_tokens` are those of
        training.
        """
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
            idle_s=self.occupancy.read_seconds(IDLE),
        )


class TrajectoryTracer:
    """Tracer of trajectories: it gives them a stopwatch, and writes the result for the traced
    groups of the job.

    A trajectory is in one state at a time: `open` until its prompt exists, `queue` until an engine
    has room for its turn, `cache` while its KV cache is moved, `prefill` until the first token of
    the turn is written (with the engine's own queue), `decode`, `environment`, `tool`, `reward`,
    `scoring`.
    """

    def __init__(self, mesh: Mesh, job: JobData) -> None:
        self._clock = mesh.clock
        self._traces = TraceWriter(mesh, job, f"shard-{mesh.name.rpartition('/')[2]}")

    @contextmanager
    def trace(self, trajectory: Trajectory) -> Iterator[None]:
        """Trace the time of a trajectory; a nested trace of the same one is part of it."""
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
            ending = trajectory.outcome  # None if it is cut off by the end of its shard
            self._traces.write(
                {
                    "kind": "trajectory",
                    "at": round(watch.started_at, 6),
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
