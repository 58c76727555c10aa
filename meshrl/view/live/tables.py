"""What `meshrl status`, `workers` and `hosts` print of a mesh: jobs, processes, workers, hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.pool.placing.taking import ALL
from meshrl.common.state.pool.store.explained import Judged
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.registry import Entry
from meshrl.view.history.held import reason
from meshrl.view.history.moves import outcome, seconds
from meshrl.view.live import printing
from meshrl.view.live.view import ROLE_COLORS, tier
from meshrl.view.mesh import gpus
from meshrl.view.mesh.hosts import HostRow
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.mesh.workers import lines


def jobs(mesh: MeshSnapshot) -> Table:
    """A row a job: what it does, and its part of the workers. Why one waits, `whys` says."""
    table = printing.table(
        "job", "phase", "steps", "workers", "priority", "share", "trained", "run"
    )
    for row in mesh.jobs:
        part = row.document.get("pool", {})
        table.add_row(
            row.id,
            state(reason(row), row.phase),
            f"{row.steps_done}/{row.document['budget']['steps']}",
            "" if row.ended else has(len(mesh.workers_of(row.id)), mesh.entitled.get(row.id)),
            str(part.get("priority", 0)),
            f"{part.get('share', 1.0):g}",
            str(row.trained),
            row.run_dir,
        )
    return table


def whys(rows: Sequence[JobRow]) -> list[str]:
    """Why jobs wait or are paused, a line each."""
    return [f"{row.id} is {reason(row)}" for row in rows if reason(row)]


def state(held: str, phase: str) -> Text:
    """Return what a job does: `held` is why it waits or is paused, empty if it does neither."""
    if held:
        return Text(held.partition(":")[0], style="yellow")
    return Text(phase.replace("_", " "), style="red" if phase == Phase.FAILED else "")


def has(workers: int, entitled: int | None) -> str:
    """How many workers a job has, and how many it is to have."""
    return str(workers) if entitled is None else f"{workers}/{entitled}"


def processes(mesh: MeshSnapshot) -> Table:
    """A row a process that lives: how fresh its lease is, and whom it waits for."""
    table = printing.table("process", "pid", "renewed", "metrics", "waits for")
    for entry in sorted(mesh.entries, key=lambda e: e.name):
        if entry.alive:
            leads = " (leads)" if mesh.leader.startswith(entry.name) else ""
            renewed = f"{(mesh.now_ms - entry.renewed_ms) / 1000:.1f} s ago"
            waits = ", ".join(sorted({wait["on"] for wait in entry.waits}))
            table.add_row(entry.name + leads, str(entry.pid), renewed, entry.metrics, waits)
    return table


def workers(mesh: MeshSnapshot) -> Table:
    """A row for each resident of each worker, and for each idle worker."""
    table = printing.table("worker", "on", "gang", "resident", "job", "role", "tier", "state", "")
    residents = {resident.id: resident for _, resident in mesh.residents}
    for line in lines(mesh):
        notes = [line.gpu]
        if (one := residents.get(line.resident)) is not None:
            notes = [
                line.doing if one.role != Role.SCORING else "",
                "by turns" if one.turns else "",
                "placed by hand" if one.pinned else "",
                one.detail,
                line.gpu,
            ]
        table.add_row(
            line.worker,
            line.accelerator,
            line.gang,
            line.resident,
            line.job,
            Text(line.role, style=ROLE_COLORS.get(line.role, "")),
            tier(line),
            line.state,
            ", ".join(filter(None, notes)),
        )
    return table


def ends(mesh: MeshSnapshot) -> list[str]:
    """Which processes have ended unasked, a line each."""
    return [
        f"{end.name} ended {(mesh.now_ms - end.at_ms) / 1000:.0f} s ago"
        + (f", {end.times} times in all" if end.times > 1 else "")
        + f": {end.told}"
        for end in mesh.ended
    ]


def copy_troubles(entries: Sequence[Entry]) -> list[str]:
    """Why the mesh's durable copy, or copies of versions, are not kept at the moment, or deltas of
    them not made, if they are not.
    """
    kept = {
        "durable_trouble": "durable copy",
        "copies_trouble": "weights.copies of",
        "deltas_trouble": "training.deltas, so that versions go in full",
    }
    told = ((e.stats.get(key), what) for e in entries if e.alive for key, what in kept.items())
    return [f"{what}: {trouble}" for trouble, what in told if trouble]


def quota_troubles(entries: Sequence[Entry]) -> list[str]:
    """Which jobs' next versions have no room in the store by their quotas."""
    told = (str(e.stats.get("quota_trouble", "")) for e in entries if e.alive)
    why = "`meshrl weights list RUN` says what stays"
    return [f"weights.quota_gb: {trouble}. {why}" for trouble in told if trouble]


def document(mesh: MeshSnapshot) -> dict[str, Any]:
    """The workers, with the figures of their GPUs, and the gangs of a mesh as JSON has them."""
    stats = mesh.stats
    found = ((worker, gpus.figures(worker, stats)) for worker in mesh.workers)
    return {
        "workers": [asdict(worker) | ({"gpu": gpu} if gpu else {}) for worker, gpu in found],
        "gangs": [asdict(gang) for gang in mesh.gangs],
    }


def moves(found: Iterable[Judged]) -> Table:
    """A row a move; times are seconds a step."""
    made = printing.table(*MOVE_COLUMNS)
    for move in found:
        made.add_row(
            datetime.fromtimestamp(move.ms / 1000).strftime("%H:%M:%S"),
            "" if move.step is None else str(move.step),
            move.gang,
            f"{move.was} -> {move.to}",
            move.policy,
            *map(seconds, (move.before_s, move.expected_s, move.predicted_s, move.observed_s)),
            seconds(move.regret_s),
            outcome(move),
        )
    return made


HOST_COLUMNS = (
    *("host", "state", "address", "since", "workers", "services"),
    *("busy", "trip", "clock", ""),
)
MOVE_COLUMNS = (
    *("judged", "step", "gang", "moved", "rule"),
    *("before", "without", "predicted", "observed", "regret", "outcome"),
)


def hosts(found: list[HostRow]) -> Table:
    """A row a host; of its services how many there are, and what may be, where that is not all."""
    made = printing.table(*HOST_COLUMNS)
    for row in found:
        kinds = sorted({accelerator.partition(":")[0] for accelerator in row.accelerators})
        takes = "" if set(row.takes) == set(ALL) else f" {' '.join(row.takes) or 'none'}"
        notes = ["head" if row.head else "", f"{row.planner} stands by" if row.planner else ""]
        since = datetime.fromtimestamp(row.since_s).strftime("%m-%d %H:%M") if row.since_s else ""
        made.add_row(
            row.host,
            row.state,
            row.address,
            since,
            f"{len(row.workers)} {'+'.join(kinds)}".strip(),
            f"{len(row.services)}{takes}",
            "" if row.cores is None else f"{row.busy_cores:.1f} of {row.cores:g}",
            "" if row.trip_ms is None else f"{row.trip_ms:.1f} ms",
            "" if row.ahead_ms is None else f"{row.ahead_ms:+.0f} ms",
            ", ".join(filter(None, [*notes, row.draining])),
        )
    return made
