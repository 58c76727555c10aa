"""The figures of a mesh as a whole, of its jobs, gangs, workers and hosts, as families of metrics.
They have no label `service`, as they are of no process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.state import steps
from meshrl.common.state.jobs import COUNTS, JobRow
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.redis.client import State
from meshrl.directory.places import MeshPlace
from meshrl.view.mesh import hosts
from meshrl.view.mesh.snapshot import MeshSnapshot, read_writable
from meshrl.view.mesh.stalled import Stall, diagnose

HOSTS = ("up", "away", "joining", "draining", "drained")  # as `meshrl hosts` has them
BUSY, IDLE, AWAY = "busy", "idle", "away"
Rows = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class HeadSnapshot:
    """A mesh as its head sees it."""

    mesh: MeshSnapshot
    hosts: Mapping[str, str] = field(default_factory=dict)  # host -> its state
    stalls: Sequence[Stall] = ()


async def read_head(state: State, place: MeshPlace) -> HeadSnapshot:
    """Read all of it, of the head at `place`. StateUnavailable also when Redis takes no writes."""
    mesh = await read_writable(state)
    found = {}
    for row in mesh.live_jobs:
        if row.steps_done:
            found[row.id] = await steps.step_rows(state, row.id, since=row.steps_done - 1)
    mesh = replace(mesh, steps=found)
    states = {host.host: host.state for host in hosts.rows(mesh, place)}
    return HeadSnapshot(mesh, states, diagnose(mesh))


def families(head: HeadSnapshot) -> Iterator[Any]:
    """Gauges of `prometheus_client`, each once."""
    mesh = head.mesh
    yield from _jobs(mesh)
    yield _gauge("leader", "1 while one of the planners leads", (), [((), bool(mesh.leader))])
    # A gang counts once for each role on it; one without residents is idle.
    roles = Counter(
        role
        for gang in mesh.gangs
        for role in {resident.role for resident in gang.residents} or {Role.IDLE}
    )
    by_role = [((str(role),), roles[role]) for role in Role]
    yield _gauge("gangs", "Gangs by what resides on them", ("role",), by_role)
    busy = Counter((BUSY if w.gang else IDLE) if w.alive else AWAY for w in mesh.workers)
    by_state = [((state,), busy[state]) for state in (BUSY, IDLE, AWAY)]
    yield _gauge("workers", "Workers by state", ("state",), by_state)
    states = Counter(head.hosts.values())
    yield _gauge("hosts", "Hosts by state", ("state",), [((s,), states[s]) for s in HOSTS])
    whats = Counter(stall.what for stall in head.stalls)
    yield _gauge(
        *("stalls", "What is waited for too long, as `meshrl status --stalled` says"),
        *(("what",), [((what,), n) for what, n in whats.items()]),
    )
    yield _gauge(
        *("process_ends", "Times that a process of this name has ended unasked"),
        *(("service", "job"), [((e.name, e.job), e.times) for e in mesh.ended]),
    )


def _jobs(mesh: MeshSnapshot) -> Iterator[Any]:
    job, rows = ("job",), mesh.jobs
    yield _gauge("job_steps", "Steps done", job, [((r.id,), r.steps_done) for r in rows])
    budgets = ((row.id, row.document.get("budget", {}).get("steps")) for row in rows)
    to_do = [((id,), steps) for id, steps in budgets if isinstance(steps, int | float)]
    yield _gauge("job_steps_budget", "Steps that it is to do", job, to_do)
    yield _gauge(
        *("job_phase", "1 for the phase that a job is in"),
        *(("job", "phase"), [((r.id, str(r.phase)), 1.0) for r in rows]),
    )
    held = [((r.id, r.held.partition(":")[0]), 1.0) for r in rows if r.held and not r.ended]
    yield _gauge("job_held", "1 for a job that waits or is paused", ("job", "why"), held)
    yield _gauge(
        *("job_step_age_seconds", "Since its last step, or since it began or went on"),
        *(job, [((r.id,), _age_s(r, mesh)) for r in rows if not (r.ended or r.held)]),
    )
    yield _gauge(
        *("job_trajectories", "Trajectories of a job by their fate"),
        ("job", "fate"),
        [((r.id, fate), getattr(r, fate)) for r in rows for fate in COUNTS],
    )
    yield _gauge(
        *("job_last_step", "Figures of a job's newest step"),
        ("job", "of"),
        [
            ((id, of), float(value))
            for id, rows in mesh.steps.items()
            if rows
            for of, value in rows[-1].items()
            if isinstance(value, int | float) and math.isfinite(value)
        ],
    )


def _age_s(row: JobRow, mesh: MeshSnapshot) -> float:
    """A job that was held begins to be waited for anew when it goes on."""
    rows = mesh.steps.get(row.id)
    committed_ms = int(rows[-1].get("committed_ms", 0)) if rows else 0
    return max(0.0, (mesh.now_ms - max(committed_ms, row.held_ms, row.since_ms)) / 1000)


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Any:
    from prometheus_client.metrics_core import GaugeMetricFamily

    family = GaugeMetricFamily(f"meshrl_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(list(values), float(number))
    return family
