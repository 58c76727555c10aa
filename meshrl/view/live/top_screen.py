"""Frame of `meshrl top` as tables of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshrl.view.history import move_outcomes
from meshrl.view.live import console_tables
from meshrl.view.live.console_tables import ROLE_COLORS
from meshrl.view.live.mesh_tables import format_state, format_worker_count
from meshrl.view.live.mesh_tables import make_moves_table as moves_table
from meshrl.view.live.run_view import draw_sparkline
from meshrl.view.live.slice_tables import make_lanes
from meshrl.view.mesh.mesh_frames import InstanceFrame, JobFrame, MeshFrame, MoveFrame

MAX_MOVES = 5  # judged moves that are shown, the last ones
CURVE_STEPS = 16  # rewards


def render_screen(frame: MeshFrame, *, stale_reason: str = "") -> RenderableType:
    """Return the frame with a border, for a terminal; `stale_reason`: why it is outdated."""
    parts = render_tables(frame)
    if stale_reason:
        parts.insert(0, Text(stale_reason, style="bold red"))
    return Panel(Group(*parts), title=Text("meshrl top", "bold"), title_align="left")


def render_tables(frame: MeshFrame) -> list[RenderableType]:
    """Return the tables, the most important first, as there may be many gangs."""
    parts = render_jobs(frame)
    if frame.hosts:
        busy = (f"{h.host}: {h.busy_cores:.1f} of {h.cores:g} cores busy" for h in frame.hosts)
        parts.append(Text("   ".join(busy), style="dim"))
    if frame.moves:
        parts.append(Text("\n".join(map(format_move, frame.moves)), style="cyan"))
    if frame.move_outcomes:
        parts.append(moves_table(frame.move_outcomes[-MAX_MOVES:]))
    if frame.instances:
        parts.append(_make_instances_table(frame.instances))
    if frame.slices:
        parts.append(make_lanes(frame.slices))
    for what, workers in (("idle", frame.idle), ("lost", frame.lost)):
        if workers:
            parts.append(Text(f"{what}: {' '.join(workers)}", style="dim"))
    return parts


def render_jobs(frame: MeshFrame) -> list[RenderableType]:
    """Return the jobs of a frame, their rates, and why some are blocked."""
    if not frame.jobs:
        return [Text("no job is running", style="dim")]
    parts: list[RenderableType] = [_make_jobs_table(frame.jobs), _make_rates_table(frame.jobs)]
    reasons = [f"{job.job} is {job.block_reason}" for job in frame.jobs if job.block_reason]
    reasons += [
        f"{j.job}: {j.prediction.verdict}"
        for j in frame.jobs
        if j.prediction and j.prediction.verdict
    ]
    if reasons:
        parts.append(Text("\n".join(reasons), style="yellow"))
    failed = [f"{job.job} failed: {job.error}" for job in frame.jobs if job.error]
    quiet = [
        f"{job.job} {job.no_progress_reason}"
        for job in frame.jobs
        if job.no_progress_reason and not job.error
    ]
    if wrong := failed + quiet:
        parts.append(Text("\n".join(wrong), style="bold red"))
    return parts


def _make_jobs_table(jobs: Sequence[JobFrame]) -> Table:
    table = console_tables.make_table(
        "job", "phase", "step", "steps/min", "reward", "", "workers", "predicted step"
    )
    for job in jobs:
        predicted = "-"  # seconds a step
        if job.prediction is not None and job.prediction.step_s:
            binds = f", {job.prediction.bottleneck}" if job.prediction.bottleneck else ""
            predicted = move_outcomes.format_seconds(job.prediction.step_s) + binds
        table.add_row(
            job.job,
            format_state(job.block_reason, job.phase, job.phase_text),
            f"{job.step}/{job.steps}",
            _format_number(job.steps_per_min, ".3g"),
            _format_number(job.reward, ".3f") if job.loss is None else f"loss {job.loss:.3f}",
            draw_sparkline(job.rewards[-CURVE_STEPS:]),
            "-" if job.workers is None else format_worker_count(job.workers, job.entitled),
            predicted,
        )
    return table


def _make_rates_table(jobs: Sequence[JobFrame]) -> Table:
    table = console_tables.make_table(
        "job", "rolled out", "trained", "in flight", "running", "waiting", "trainer waits"
    )
    for job in jobs:
        table.add_row(
            job.job,
            _format_number(job.rollout_tokens_per_s, ",.0f", " tokens/s"),
            _format_number(job.trained_tokens_per_s, ",.0f", " tokens/s"),
            _format_number(job.in_flight, "d"),
            _format_number(job.running, "d"),
            _format_number(job.waiting, "d"),
            _format_number(None if job.wait_share is None else 100 * job.wait_share, ".0f", " %"),
        )
    return table


def format_move(move: MoveFrame) -> str:
    """Return an incomplete move as a line."""
    rule = f" ({move.rule})" if move.rule else ""
    then = (
        f", predicted {move_outcomes.format_seconds(move.predicted_s)} a step"
        if move.predicted_s
        else ""
    )
    return (
        f"{move.gang} moves from {move.from_role} to {move.to_role}{rule}: {move.elapsed_s:.0f} s "
        f"so far, undone in {move.remaining_s:.0f} s if incomplete{then}"
    )


def _make_instances_table(instances: Sequence[InstanceFrame]) -> Table:
    table = console_tables.make_table(
        "gang", "workers", "job", "instance", "role", "tier", "state", "tp", "activity"
    )
    for one in instances:
        role = "training" if one.role == "core" else one.role
        table.add_row(
            one.gang,
            " ".join(one.workers),
            one.job,
            one.instance,
            Text(one.role, style=ROLE_COLORS.get(role, "")),
            one.tier if one.tier == one.desired_tier else f"{one.tier} -> {one.desired_tier}",
            one.state,
            _format_number(one.tensor_parallel, "d"),
            one.activity,
        )
    return table


def _format_number(value: float | None, format_spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{format_spec}}{unit}"
