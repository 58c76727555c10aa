"""Snapshot of a mesh that all views are drawn from, read from its Redis in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.mesh.process.child_handle import read_process_usage, read_start_time
from meshrl.common.mesh.process.supervision import exit_reports
from meshrl.common.mesh.process.supervision.exit_reports import LastExit
from meshrl.common.state import jobs, leader, registry
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.scheduling.snapshot import Move
from meshrl.common.state.pool.store import pool_rows as pool
from meshrl.common.state.pool.store.host_notices import HostNotice, read_notices
from meshrl.common.state.pool.store.planner_reports import JobPrediction, decode_predictions
from meshrl.common.state.pool.store.spot_scaling import ScalerReport, read_scaler_report
from meshrl.common.state.pool.workers.rows import Gang, Instance, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import StateClient, read_server_time_ms
from meshrl.common.state.redis.keys import MESH_PREFIX, PLANNER_ELECTION
from meshrl.common.state.registry import RegistryEntry

StepRows = Sequence[Mapping[str, Any]]  # of a job's steps


@dataclass(frozen=True)
class MeshSnapshot:
    """Rows of a mesh at one moment. Times are Redis' own, in milliseconds.

    Fields that `read_full_snapshot` adds are empty in a snapshot of `read_mesh_snapshot`.
    """

    workers: tuple[WorkerRow, ...] = ()
    gangs: tuple[Gang, ...] = ()
    entries: Sequence[RegistryEntry] = ()
    jobs: Sequence[JobRow] = ()
    now_ms: float = 0.0
    # job -> workers that it is entitled to
    entitlements: Mapping[str, int] = field(default_factory=dict)
    predictions: Mapping[str, JobPrediction] = field(default_factory=dict)  # by job
    moves_in_progress: Sequence[Move] = ()  # under way
    settings: PoolSettings = field(default_factory=PoolSettings)
    steps: Mapping[str, StepRows] = field(default_factory=dict)  # last rows, by job
    notices: Mapping[str, HostNotice] = field(default_factory=dict)  # of preemption, by host
    # -- added by `read_full_snapshot`
    leader: str = ""  # process that leads the planners; empty: none does
    last_exits: Sequence[LastExit] = ()
    services: tuple[tuple[str, str], ...] = ()  # (host, shard or sandbox that it is to run)
    drain_reasons: Mapping[str, str] = field(default_factory=dict)  # host -> why
    scaler: ScalerReport | None = None  # None: the mesh has none

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """Figures of the live processes, by name."""
        return {entry.name: entry.stats for entry in self.entries if entry.alive}

    @property
    def live_jobs(self) -> list[JobRow]:
        """Jobs that have not ended."""
        return [row for row in self.jobs if not row.is_terminal]

    @property
    def last_renewed_ms(self) -> float:
        """Time of the last renewal of any lease: nothing is late while no process renews."""
        return max((entry.renewed_ms for entry in self.entries), default=0)

    @property
    def instances(self) -> list[tuple[Gang, Instance]]:
        """All instances, with their gangs."""
        return [(gang, resident) for gang in self.gangs for resident in gang.instances]

    @property
    def prices(self) -> dict[str, float]:
        """Price of an hour of each worker; 0: unknown."""
        return {worker.id: self.settings.get_price(worker) for worker in self.workers}

    def find_instances(self, job: str) -> list[tuple[Gang, Instance]]:
        """Return a job's instances, with their gangs."""
        return [(gang, resident) for gang, resident in self.instances if resident.job == job]

    def find_workers(self, job: str) -> set[str]:
        """Return ids of the workers that a job has instances on, in any tier."""
        return {g.workers[rank] for g, r in self.find_instances(job) for rank in r.ranks}

    def find_shared_gangs(self, job: str = "") -> tuple[Gang, ...]:
        """Return the gangs that several instances share by time slices; of a `job`, its own."""
        sliced = ((g, [one.job for one in g.instances if one.time_sliced]) for g in self.gangs)
        return tuple(g for g, jobs in sliced if len(jobs) > 1 and (not job or job in jobs))


async def read_mesh_snapshot(
    state: StateClient, known_jobs: Sequence[JobRow] | None = None
) -> MeshSnapshot:
    """Read a mesh's rows. `known_jobs`: the jobs, which have long documents, if they were read
    lately.

    Raises StateUnavailable, DeadlineExceeded.
    """
    memory, notices = await pool.read_planner_memory(state), await read_notices(state)
    workers = await pool.read_workers(state)
    return MeshSnapshot(
        tuple(
            replace(worker, preempt_at_s=notices[worker.host].preempt_at_s)
            if worker.host in notices
            else worker
            for worker in workers
        ),
        tuple(await pool.read_gangs(state)),
        tuple(await registry.list_entries(state)),
        tuple(await jobs.read_jobs(state)) if known_jobs is None else known_jobs,
        await read_server_time_ms(state),
        memory.get("entitled", {}),
        decode_predictions(memory),
        await pool.read_moves_in_progress(state),
        await pool.read_settings(state),
        notices=notices,
    )


async def read_full_snapshot(
    state: StateClient, known_jobs: Sequence[JobRow] | None = None
) -> MeshSnapshot:
    """Read the rows and signs of problems: leader, process exits, services, drained hosts."""
    mesh = await read_mesh_snapshot(state, known_jobs)
    leading, _ = await leader.read_leader(state, PLANNER_ELECTION)
    return replace(
        mesh,
        leader=leading,
        last_exits=await exit_reports.read_last_exits(state),
        services=tuple(await pool.read_all_services(state)),
        drain_reasons=await pool.read_drain_reasons(state),
        scaler=await read_scaler_report(state),
    )


PROBE_KEY = f"{MESH_PREFIX}:probe"  # a key of a second, which shows whether Redis takes writes


async def read_writable_snapshot(state: StateClient) -> MeshSnapshot:
    """Read a full snapshot.

    Raises StateUnavailable also when Redis takes no writes: without any, every process seems late.
    """
    await state.run_command("SET", PROBE_KEY, 1, "PX", 1000)
    return await read_full_snapshot(state)


def find_stopped_processes(mesh: MeshSnapshot, host: str) -> list[str]:
    """Return the processes that a signal has stopped, as the kernel of this `host` reports."""
    return [
        entry.name
        for entry in mesh.entries
        if entry.host == host
        and (usage := read_process_usage(entry.pid)) is not None
        and usage.state == "T"
        and read_start_time(entry.pid) == entry.start_time
    ]
