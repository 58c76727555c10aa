"""Metric families of a mesh as a whole, of its jobs, gangs, workers and hosts. They have no label
`service`, as they belong to no process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.state import steps
from meshrl.common.state.jobs import COUNT_FIELDS, JobRow
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.view.health.findings import judge_run
from meshrl.view.health.run_figures import RunFigures, extend_figures
from meshrl.view.mesh import host_rows
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot, read_writable_snapshot
from meshrl.view.mesh.stalls import Stall, diagnose_stalls
from meshrl.view.recording.job_usage import count_accelerators, sum_live_slices

HOST_STATES = ("up", "away", "joining", "draining", "drained")  # as `meshrl hosts` has them
BUSY, IDLE, AWAY = "busy", "idle", "away"
GaugeRows = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class HeadSnapshot:
    """Snapshot of a mesh at its head."""

    mesh: MeshSnapshot
    host_states: Mapping[str, str] = field(default_factory=dict)  # host -> its state
    stalls: Sequence[Stall] = ()
    health: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # job -> rule -> severity


class HeadReader:
    """Reader of the mesh's snapshots at its head, with the figures of its jobs' steps so far."""

    def __init__(self, mesh_paths: MeshPaths) -> None:
        self._mesh_paths = mesh_paths
        self._figures: dict[str, RunFigures] = {}

    async def read_snapshot(self, state: StateClient) -> HeadSnapshot:
        """Read the snapshot. Raises StateUnavailable also when Redis takes no writes."""
        mesh = await read_writable_snapshot(state)
        last_rows, health, before = {}, {}, self._figures
        self._figures = {}
        for row in mesh.live_jobs:
            if not row.steps_done:
                continue
            figures = before.get(row.id, RunFigures())
            known = min(figures.last_step, row.steps_done - 1)
            found = await steps.read_step_rows(state, row.id, after_step=known)
            figures = self._figures[row.id] = extend_figures(figures, found) if found else figures
            counts = {fate: int(getattr(row, fate)) for fate in COUNT_FIELDS}
            verdicts = judge_run(figures, row.document, counts)
            last_rows[row.id] = found[-1:]
            health[row.id] = {name: int(v.severity) for name, v in verdicts.items()}
        mesh = replace(mesh, steps=last_rows)
        states = {
            host.host: host.state for host in host_rows.build_host_rows(mesh, self._mesh_paths)
        }
        return HeadSnapshot(mesh, states, diagnose_stalls(mesh), health)


def make_metric_families(head: HeadSnapshot) -> Iterator[Any]:
    """Yield gauges of `prometheus_client`, each once."""
    mesh = head.mesh
    yield from _make_job_gauges(mesh)
    yield _make_gauge(
        *("job_health", "Verdict of each health rule: 0 fine, 1 warning, 2 cannot learn"),
        ("job", "rule"),
        [((job, name), v) for job, found in head.health.items() for name, v in found.items()],
    )
    yield from _make_slice_gauges(mesh)
    yield _make_gauge("leader", "1 while one of the planners leads", (), [((), bool(mesh.leader))])
    # A gang counts once for each role on it; one without instances is idle.
    roles = Counter(
        role
        for gang in mesh.gangs
        for role in {resident.role for resident in gang.instances} or {Role.IDLE}
    )
    by_role = [((str(role),), roles[role]) for role in Role]
    yield _make_gauge("gangs", "Gangs by the role of their instances", ("role",), by_role)
    busy = Counter((BUSY if w.gang else IDLE) if w.alive else AWAY for w in mesh.workers)
    by_state = [((state,), busy[state]) for state in (BUSY, IDLE, AWAY)]
    yield _make_gauge("workers", "Workers by state", ("state",), by_state)
    states = Counter(head.host_states.values())
    yield _make_gauge(
        "hosts", "Hosts by state", ("state",), [((s,), states[s]) for s in HOST_STATES]
    )
    wait_counts = Counter(stall.what for stall in head.stalls)
    yield _make_gauge(
        *("stalls", "Overdue waits, as `meshrl status --stalled` lists them"),
        *(("what",), [((what,), n) for what, n in wait_counts.items()]),
    )
    yield _make_gauge(
        *("process_ends", "Unexpected exits of processes with this name"),
        *(("service", "job"), [((e.name, e.job), e.times) for e in mesh.last_exits]),
    )


def _make_job_gauges(mesh: MeshSnapshot) -> Iterator[Any]:
    job, rows = ("job",), mesh.jobs
    yield _make_gauge("job_steps", "Steps done", job, [((r.id,), r.steps_done) for r in rows])
    budgets = ((row.id, row.document.get("budget", {}).get("steps")) for row in rows)
    to_do = [((id,), steps) for id, steps in budgets if isinstance(steps, int | float)]
    yield _make_gauge("job_steps_budget", "Steps in the budget of a job", job, to_do)
    yield _make_gauge(
        *("job_phase", "1 for the current phase of a job"),
        *(("job", "phase"), [((r.id, str(r.phase)), 1.0) for r in rows]),
    )
    blocked_jobs = [
        ((r.id, r.block_reason.partition(":")[0]), 1.0)
        for r in rows
        if r.block_reason and not r.is_terminal
    ]
    yield _make_gauge(
        "job_held", "1 for a job that waits or is paused", ("job", "why"), blocked_jobs
    )
    yield _make_gauge(
        *(
            "job_step_age_seconds",
            "Seconds since the last step of a job, or since its start or resumption",
        ),
        *(
            job,
            [
                ((r.id,), _compute_step_age_s(r, mesh))
                for r in rows
                if not (r.is_terminal or r.block_reason)
            ],
        ),
    )
    hourly_costs = ((row.id, count_accelerators(mesh, row.id)[1]) for row in mesh.live_jobs)
    yield _make_gauge(
        *("job_cost_per_hour", "Price of an hour of the workers that a job has now"),
        *(job, [((id,), cost) for id, cost in hourly_costs if cost]),
    )
    yield _make_gauge(
        *("job_trajectories", "Trajectories of a job by outcome"),
        ("job", "fate"),
        [((r.id, fate), getattr(r, fate)) for r in rows for fate in COUNT_FIELDS],
    )
    yield _make_gauge(
        *("job_last_step", "Figures of the newest step of a job"),
        ("job", "of"),
        [
            ((id, of), float(value))
            for id, rows in mesh.steps.items()
            if rows
            for of, value in rows[-1].items()
            if isinstance(value, int | float) and math.isfinite(value)
        ],
    )


def _make_slice_gauges(mesh: MeshSnapshot) -> Iterator[Any]:
    slices = sum_live_slices(mesh)
    yield _make_gauge(
        *("job_slice_seconds", "Accelerator-seconds of time slices of a job's live processes"),
        ("job", "function"),
        [
            ((job, function), seconds)
            for job, found in slices.items()
            for function, seconds in found["by_function_s"].items()
        ],
    )
    yield _make_gauge(
        *("job_switch_seconds", "Accelerator-seconds of moves of tensors before its time slices"),
        *(("job",), [((job,), found["switch_s"]) for job, found in slices.items()]),
    )
    yield _make_gauge(
        *("job_hidden_load_share", "Share of the loaded bytes that prefetches hid"),
        ("job",),
        [
            ((job,), found["hidden_share"])
            for job, found in slices.items()
            if found["hidden_share"] is not None
        ],
    )


def _compute_step_age_s(row: JobRow, mesh: MeshSnapshot) -> float:
    """Return seconds since the last step; they start again when a blocked job resumes."""
    rows = mesh.steps.get(row.id)
    committed_ms = int(rows[-1].get("committed_ms", 0)) if rows else 0
    return max(0.0, (mesh.now_ms - max(committed_ms, row.blocked_since_ms, row.created_ms)) / 1000)


def _make_gauge(name: str, description: str, labels: tuple[str, ...], rows: GaugeRows) -> Any:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(f"meshrl_{name}", description, labels=labels)
    for values, number in rows:
        family.add_metric(list(values), float(number))
    return family
