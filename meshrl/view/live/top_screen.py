"""A frame of `meshrl top` as tables of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshrl.view.history import moves
from meshrl.view.live import printing
from meshrl.view.live.tables import has, state
from meshrl.view.live.tables import moves as moves_table
from meshrl.view.live.view import ROLE_COLORS, sparkline
from meshrl.view.mesh.frames import Frame, JobFrame, MoveFrame, ResidentFrame

MOVES = 5  # judged moves that are shown, the last ones
CURVE = 16  # rewards


def screen(frame: Frame, *, trouble: str = "") -> RenderableType:
    """The frame with a border, for a terminal that is redrawn; `trouble`: why it is not of now."""
    parts = tables(frame)
    if trouble:
        parts.insert(0, Text(trouble, style="bold red"))
    return Panel(Group(*parts), title=Text("meshrl top", "bold"), title_align="left")


def tables(frame: Frame) -> list[RenderableType]:
    """What there is to show, the most wanted first: gangs may be many."""
    parts = jobs(frame)
    if frame.hosts:
        busy = (f"{h.host}: {h.busy_cores:.1f} of {h.cores:g} cores busy" for h in frame.hosts)
        parts.append(Text("   ".join(busy), style="dim"))
    if frame.moves:
        parts.append(Text("\n".join(map(under_way, frame.moves)), style="cyan"))
    if frame.judged:
        parts.append(moves_table(frame.judged[-MOVES:]))
    if frame.residents:
        parts.append(_gangs(frame.residents))
    for what, workers in (("idle", frame.idle), ("lost", frame.lost)):
        if workers:
            parts.append(Text(f"{what}: {' '.join(workers)}", style="dim"))
    return parts


def jobs(frame: Frame) -> list[RenderableType]:
    """The jobs of a frame, their rates, and why some do nothing."""
    if not frame.jobs:
        return [Text("no job goes on", style="dim")]
    parts: list[RenderableType] = [_jobs(frame.jobs), _rates(frame.jobs)]
    whys = [f"{job.job} is {job.held}" for job in frame.jobs if job.held]
    whys += [f"{j.job}: {j.now.verdict}" for j in frame.jobs if j.now and j.now.verdict]
    if whys:
        parts.append(Text("\n".join(whys), style="yellow"))
    failed = [f"{job.job} failed: {job.error}" for job in frame.jobs if job.error]
    quiet = [f"{job.job} {job.quiet}" for job in frame.jobs if job.quiet and not job.error]
    if wrong := failed + quiet:
        parts.append(Text("\n".join(wrong), style="bold red"))
    return parts


def _jobs(jobs: Sequence[JobFrame]) -> Table:
    table = printing.table("job", "phase", "step", "steps/min", "reward", "", "workers", "a step")
    for job in jobs:
        predicted = "-"  # seconds a step
        if job.now is not None and job.now.step_s:
            binds = f", {job.now.binds}" if job.now.binds else ""
            predicted = moves.seconds(job.now.step_s) + binds
        table.add_row(
            job.job,
            state(job.held, job.phase),
            f"{job.step}/{job.steps}",
            _number(job.steps_per_min, ".3g"),
            _number(job.reward, ".3f"),
            sparkline(job.rewards[-CURVE:]),
            "-" if job.workers is None else has(job.workers, job.entitled),
            predicted,
        )
    return table


def _rates(jobs: Sequence[JobFrame]) -> Table:
    table = printing.table(
        "job", "rolled out", "trained", "in flight", "running", "waiting", "trainer waits"
    )
    for job in jobs:
        table.add_row(
            job.job,
            _number(job.rolled_out_s, ",.0f", " tokens/s"),
            _number(job.trained_s, ",.0f", " tokens/s"),
            _number(job.in_flight, "d"),
            _number(job.running, "d"),
            _number(job.waiting, "d"),
            _number(None if job.wait_share is None else 100 * job.wait_share, ".0f", " %"),
        )
    return table


def under_way(move: MoveFrame) -> str:
    """A move that is not complete, in a line."""
    rule = f" ({move.rule})" if move.rule else ""
    then = f", predicted {moves.seconds(move.predicted_s)} a step" if move.predicted_s else ""
    return (
        f"{move.gang} moves from {move.was} to {move.to}{rule} since {move.since_s:.0f} s, "
        f"undone in {move.left_s:.0f} s if it is not complete{then}"
    )


def _gangs(residents: Sequence[ResidentFrame]) -> Table:
    table = printing.table(
        "gang", "workers", "job", "resident", "role", "tier", "state", "tp", "doing"
    )
    for one in residents:
        role = "training" if one.role == "core" else one.role
        table.add_row(
            one.gang,
            " ".join(one.workers),
            one.job,
            one.resident,
            Text(one.role, style=ROLE_COLORS.get(role, "")),
            one.tier if one.tier == one.wanted else f"{one.tier} -> {one.wanted}",
            one.state,
            _number(one.tensor_parallel, "d"),
            one.doing,
        )
    return table


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
