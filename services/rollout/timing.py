"""Where the trajectories of a shard spend their time, of as many groups as the job has traced.

A trajectory is in one state at a time: `open` until its prompt is there, `queue` until an engine
has room for its turn, `cache` while its keys and values come along, `prefill` until the first token
of the turn is written down (the engine's own queue is part of it), `decode`, `environment`, `tool`,
`reward`, `scoring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.job.bundle.job_data import JobData
from common.mesh.runtime.mesh import Mesh
from common.mesh.telemetry.stopwatch import UNTIMED, Stopwatch
from common.records.traces import Traces
from services.rollout.trajectories.trajectory import Trajectory


class TrajectoryTimes:
    """Gives trajectories their stopwatch, and tells what it says in the end."""

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
            self._tell(t, watch)

    def _tell(self, t: Trajectory, watch: Stopwatch) -> None:
        """A trajectory that is cut off, as its shard ends, has no ending."""
        ending = t.ending
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
        """Writes what is left."""
        await self._traces.close()
