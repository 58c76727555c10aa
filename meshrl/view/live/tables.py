"""What `meshrl status` and `meshrl workers` print of a mesh: jobs, processes, workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from common.state.jobs import JobRow
from common.state.pool.store.explained import Judged
from common.state.pool.workers.rows import Resident, Role
from common.state.registry import Entry
from meshrl.view.history.held import reason
from meshrl.view.history.moves import outcome, seconds
from meshrl.view.live import printing
from meshrl.view.live.view import ROLE_COLORS, tier
from meshrl.view.mesh import gpus
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
            state(row),
            progress(row),
            "" if row.ended else has(mesh, row.id),
            str(part.get("priority", 0)),
            f"{part.get('share', 1.0):g}",
            str(row.trained),
            row.run_dir,
        )
    return table


def whys(rows: Sequence[JobRow]) -> list[str]:
    """Why jobs wait or are paused, a line each."""
    return [f"{row.id} is {reason(row)}" for row in rows if reason(row)]


def state(row: JobRow) -> Text:
    """Whether a job waits or is paused, or else its phase."""
    if held := reason(row):
        return Text(held.partition(":")[0], style="yellow")
    return Text(row.phase.replace("_", " "))


def progress(row: JobRow) -> str:
    """Steps done, of how many."""
    return f"{row.steps_done}/{row.document['budget']['steps']}"


def has(mesh: MeshSnapshot, job: str) -> str:
    """How many workers a job has, and how many it is to have."""
    count = len(mesh.workers_of(job))
    return f"{count}/{mesh.entitled[job]}" if job in mesh.entitled else str(count)


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
        resident = residents.get(line.resident)
        table.add_row(
            line.worker,
            line.accelerator,
            line.gang,
            line.resident,
            line.job,
            Text(line.role, style=ROLE_COLORS.get(line.role, "")),
            tier(line),
            line.state,
            ", ".join(filter(None, [*_notes(resident, line.doing), line.gpu])),
        )
    return table


def _notes(resident: Resident | None, doing: str) -> list[str]:
    """What else there is to say of a resident."""
    if resident is None:
        return []
    notes = [
        doing if resident.role != Role.SCORING else "",
        "by turns" if resident.turns else "",
        "placed by hand" if resident.pinned else "",
        resident.detail,
    ]
    return [note for note in notes if note]


def troubles(mesh: MeshSnapshot) -> list[str]:
    """Why jobs have failed, and which processes have ended unasked, a line each."""
    failed = [f"{row.id} failed: {row.error}" for row in mesh.jobs if row.error]
    return failed + [
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


MOVE_COLUMNS = (
    *("judged", "step", "gang", "moved", "rule"),
    *("before", "without", "predicted", "observed", "regret", "outcome"),
)
