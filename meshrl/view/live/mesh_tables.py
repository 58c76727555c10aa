"""Tables of `meshrl status`, `workers` and `hosts`: jobs, processes, workers, hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from meshrl.common.state.jobs import JobRow, Phase
from meshrl.common.state.pool.scheduling.host_services import ALL_SERVICES
from meshrl.common.state.pool.store.planner_reports import MoveOutcome
from meshrl.common.state.pool.store.spot_scaling import ScalerReport
from meshrl.common.state.pool.workers.rows import MARKETS, Role
from meshrl.common.state.registry import RegistryEntry
from meshrl.view.history.blocked_jobs import find_block_reason
from meshrl.view.history.move_outcomes import format_outcome, format_seconds
from meshrl.view.json_output import to_json_document
from meshrl.view.live import console_tables
from meshrl.view.live.console_tables import ROLE_COLORS
from meshrl.view.live.run_view import format_tier
from meshrl.view.mesh import gpu_status
from meshrl.view.mesh.host_rows import HostRow
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.worker_lines import list_worker_lines
from meshrl.view.recording.job_usage import count_accelerators


def make_jobs_table(mesh: MeshSnapshot) -> Table:
    """Return a table with a row for each job: its phase, and its part of the workers.

    It has the price of an hour of these, where workers have prices. `list_block_reasons` has the
    reasons of waiting jobs.
    """
    has_prices = any(mesh.prices.values())
    table = console_tables.make_table(
        *("job", "phase", "steps", "workers", *(["cost/h"] if has_prices else [])),
        *("priority", "share", "trained", "run"),
    )
    for row in mesh.jobs:
        part = row.document.get("pool", {})
        hourly_cost = count_accelerators(mesh, row.id)[1]
        table.add_row(
            row.id,
            format_state(find_block_reason(row), row.phase, row.phase_text),
            f"{row.steps_done}/{row.document['budget']['steps']}",
            ""
            if row.is_terminal
            else format_worker_count(len(mesh.find_workers(row.id)), mesh.entitlements.get(row.id)),
            *(["" if row.is_terminal else f"{hourly_cost:,.4g}"] if has_prices else []),
            str(part.get("priority", 0)),
            f"{part.get('share', 1.0):g}",
            str(row.trained),
            row.run_dir,
        )
    return table


def list_block_reasons(rows: Sequence[JobRow]) -> list[str]:
    """Return why jobs wait or are paused, a line each."""
    return [f"{row.id} is {find_block_reason(row)}" for row in rows if find_block_reason(row)]


def list_shared_gangs(mesh: MeshSnapshot) -> list[str]:
    """Return which jobs share the workers of their cores, a line for each such gang."""
    lines = []
    for gang in mesh.gangs:
        cores = [one for one in gang.instances if one.core and one.time_sliced]
        if len({one.job for one in cores}) > 1:
            names = [f"{one.job} (by request)" if one.pinned else one.job for one in cores]
            lines.append(f"{gang.id} is shared by time slices: {', '.join(sorted(names))}")
    return lines


def list_scaler_lines(report: ScalerReport | None) -> tuple[list[str], list[str]]:
    """Return lines on the provider of spot hosts, and its errors; none without a scaler."""
    if report is None:
        return [], []
    dry = "dry run, nothing is requested: " if report.dry_run else ""
    line = f"spot hosts: {dry}{report.present} up, {report.hosts} requested ({report.reason})"
    if report.release:
        line += f"; given back: {', '.join(report.release)}"
    if not report.error:
        return [line], []
    at = datetime.fromtimestamp(report.retry_ms / 1000).strftime("%H:%M:%S")
    return [line], [
        f"the scaler of spot hosts failed {report.failures} times, again at {at}: {report.error}"
    ]


def format_state(block_reason: str, phase: str, phase_text: str) -> Text:
    """Return the state of a job: `block_reason` if it waits or is paused, else its phase."""
    if block_reason:
        return Text(block_reason.partition(":")[0], style="yellow")
    return Text(phase_text, style="red" if phase == Phase.FAILED else "")


def format_worker_count(workers: int, entitled: int | None) -> str:
    """Return how many workers a job has, and how many it is entitled to."""
    return str(workers) if entitled is None else f"{workers}/{entitled}"


def make_processes_table(mesh: MeshSnapshot) -> Table:
    """Return a table with a row for each live process: the age of its lease, and its waits."""
    table = console_tables.make_table("process", "pid", "renewed", "metrics", "waits for")
    for entry in sorted(mesh.entries, key=lambda e: e.name):
        if entry.alive:
            leader_mark = " (leads)" if mesh.leader.startswith(entry.name) else ""
            renewed = f"{(mesh.now_ms - entry.renewed_ms) / 1000:.1f} s ago"
            waits = ", ".join(sorted({wait["on"] for wait in entry.waits}))
            table.add_row(entry.name + leader_mark, str(entry.pid), renewed, entry.metrics, waits)
    return table


def make_workers_table(mesh: MeshSnapshot) -> Table:
    """Return a table with a row for each instance of each worker, and for each idle worker."""
    table = console_tables.make_table(
        "worker", "on", "gang", "instance", "job", "role", "tier", "state", ""
    )
    residents = {resident.id: resident for _, resident in mesh.instances}
    for line in list_worker_lines(mesh):
        notes = [line.gpu_text]
        if (one := residents.get(line.instance)) is not None:
            notes = [
                line.activity if one.role != Role.SCORING else "",
                "time-sliced" if one.time_sliced else "",
                "placed manually" if one.pinned else "",
                one.detail,
                line.gpu_text,
            ]
        table.add_row(
            line.worker,
            line.accelerator,
            line.gang,
            line.instance,
            line.job,
            Text(line.role, style=ROLE_COLORS.get(line.role, "")),
            format_tier(line),
            line.state,
            ", ".join(filter(None, notes)),
        )
    return table


def format_exits(mesh: MeshSnapshot) -> list[str]:
    """Return which processes ended unexpectedly, a line each."""
    return [
        f"{end.name} exited {(mesh.now_ms - end.at_ms) / 1000:.0f} s ago"
        + (f", {end.times} times in total" if end.times > 1 else "")
        + f": {end.description}"
        for end in mesh.last_exits
    ]


def list_copy_errors(entries: Sequence[RegistryEntry]) -> list[str]:
    """Return why the durable copy, copies of versions or deltas are not made at the moment."""
    titles_by_stat = {
        "durable_trouble": "durable copy",
        "copies_trouble": "weights.copies of",
        "deltas_trouble": "training.deltas (versions are sent in full)",
    }
    errors = (
        (e.stats.get(key), what) for e in entries if e.alive for key, what in titles_by_stat.items()
    )
    return [f"{what}: {error}" for error, what in errors if error]


def list_quota_errors(entries: Sequence[RegistryEntry]) -> list[str]:
    """Return which jobs' next versions exceed their quotas in the store."""
    errors = (str(e.stats.get("quota_trouble", "")) for e in entries if e.alive)
    why = "Run `meshrl weights list RUN` to see the stored versions"
    return [f"weights.quota_gb: {error}. {why}" for error in errors if error]


def to_document(mesh: MeshSnapshot) -> dict[str, Any]:
    """Return workers with their GPU figures, and gangs, as a JSON document."""
    stats = mesh.stats
    found = ((worker, gpu_status.read_gpu_stats(worker, stats)) for worker in mesh.workers)
    return {
        "workers": [asdict(worker) | ({"gpu": gpu} if gpu else {}) for worker, gpu in found],
        "gangs": to_json_document(mesh.gangs),
    }


def make_moves_table(outcomes: Iterable[MoveOutcome]) -> Table:
    """Return a table with a row for each move; times are seconds a step."""
    table = console_tables.make_table(*MOVE_COLUMNS)
    for move in outcomes:
        table.add_row(
            datetime.fromtimestamp(move.ms / 1000).strftime("%H:%M:%S"),
            "" if move.step is None else str(move.step),
            move.gang,
            f"{move.was} -> {move.to}",
            move.policy,
            *map(
                format_seconds, (move.before_s, move.expected_s, move.predicted_s, move.observed_s)
            ),
            format_seconds(move.regret_s),
            format_outcome(move),
        )
    return table


HOST_COLUMNS = (
    *("host", "state", "address", "since", "workers", "services"),
    *("busy", "redis", "clock", ""),
)
MOVE_COLUMNS = (
    *("judged", "step", "gang", "moved", "rule"),
    *("before", "without", "predicted", "observed", "regret", "outcome"),
)


def make_hosts_table(rows: list[HostRow]) -> Table:
    """Return a table with a row for each host.

    It has the number of the host's services, and the accepted services if these are not all.
    """
    table = console_tables.make_table(*HOST_COLUMNS)
    for row in rows:
        kinds = sorted({accelerator.partition(":")[0] for accelerator in row.accelerators})
        accepted = (
            ""
            if set(row.accepted_services) == set(ALL_SERVICES)
            else f" {' '.join(row.accepted_services) or 'none'}"
        )
        markets = [market for market in row.markets if market != MARKETS[0]]
        notes = ["head" if row.head else "", f"{row.planner} on standby" if row.planner else ""]
        notes += [*markets, *(f"{price:,.4g} per worker and hour" for price in row.prices)]
        since = datetime.fromtimestamp(row.since_s).strftime("%m-%d %H:%M") if row.since_s else ""
        table.add_row(
            row.host,
            row.state,
            row.address,
            since,
            f"{len(row.workers)} {'+'.join(kinds)}".strip(),
            f"{len(row.services)}{accepted}",
            "" if row.cores is None else f"{row.busy_cores:.1f} of {row.cores:g}",
            "" if row.redis_round_trip_ms is None else f"{row.redis_round_trip_ms:.1f} ms",
            "" if row.clock_offset_ms is None else f"{row.clock_offset_ms:+.0f} ms",
            ", ".join(filter(None, [*notes, row.drain_reason, row.notice])),
        )
    return table
