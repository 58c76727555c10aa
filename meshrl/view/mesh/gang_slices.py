"""Decisions and slices of a gang's slice scheduler, as its first worker explains them."""

from __future__ import annotations

from meshrl.common.api.node import ExplainSlices, SliceExplanation, Worker
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.process_names import worker_name
from meshrl.common.state.pool.workers.rows import Gang


def is_time_sliced(gang: Gang) -> bool:
    """Return True if instances of a gang compute in time slices."""
    return any(instance.time_sliced for instance in gang.instances)


async def read_gang_slices(mesh: Mesh, gang: Gang, since_s: float = 0.0) -> SliceExplanation:
    """Return the decisions and slices of a gang since a time, in seconds of the epoch; 0: all on
    record.
    """
    scheduler = mesh.ref(worker_name(gang.workers[0]))
    return await scheduler.call(Worker.explain_slices, ExplainSlices(since_s))
