"""A frame of `meshrl top` as tables of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.state.jobs import Phase
from meshrl.view.frames.frame import Frame, JobFrame, MoveFrame, ResidentFrame
from meshrl.view.history import moves
from meshrl.view.live import printing
from meshrl.view.live.tables import moves as moves_table
from meshrl.view.live.view import ROLE_COLORS, sparkline

MOVES = 5  # judged moves that are shown, the last ones
CURVE = 16  # rewards


def screen(frame: Frame, *, trouble: str = "", at: str = "") -> RenderableType:
    """The frame with a border, for a terminal that is redrawn; `trouble`: why it is not of now."""
    parts = tables(frame)
    if trouble:
        parts.insert(0, Text(trouble, style="bold red"))
    title = Text.assemble(("meshrl top", "bold"), f"  {at}".rstrip())
    return Panel(Group(*parts), title=title, title_align="left")


def tables(frame: Frame) -> list[RenderableType]:
    """What there is to show, the most wanted first: gangs may be many."""
    parts: list[RenderableType] = [_jobs(frame.jobs), _rates(frame.jobs)]
    if not frame.jobs:
        parts = [Text("no job goes on", style="dim")]
    parts += [Text("\n".join(said), style="yellow")] if (said := list(_whys(frame.jobs))) else []
    if wrong := [f"{j.job} {j.error or j.quiet}" for j in frame.jobs if j.error or j.quiet]:
        parts.append(Text("\n".join(wrong), style="bold red"))
    if frame.hosts:
        parts.append(Text("   ".join(_hosts(frame)), style="dim"))
    if frame.moves:
        parts.append(Text("\n".join(map(under_way, frame.moves)), style="cyan"))
    if frame.judged:
        parts.append(moves_table(frame.judged[-MOVES:]))
    if frame.residents:
        parts.append(_gangs(frame.residents))
    parts += [Text(line, style="dim") for line in _others(frame)]
    return parts


def _jobs(jobs: Sequence[JobFrame]) -> Table:
    table = printing.table("job", "phase", "step", "steps/min", "reward", "", "workers", "a step")
    for job in jobs:
        table.add_row(
            job.job,
            _state(job),
            f"{job.step}/{job.steps}",
            _number(job.steps_per_min, ".3g"),
            _number(job.reward, ".3f"),
            sparkline(job.rewards[-CURVE:]),
            _workers(job),
            _predicted(job),
        )
    return table


def _state(job: JobFrame) -> Text:
    if job.held:
        return Text(job.held.partition(":")[0], style="yellow")
    return Text(job.phase.replace("_", " "), style="red" if job.phase == Phase.FAILED else "")


def _workers(job: JobFrame) -> str:
    """Those that it has, of those that it is to have."""
    if job.workers is None:
        return "-"
    return str(job.workers) if job.entitled is None else f"{job.workers}/{job.entitled}"


def _predicted(job: JobFrame) -> str:
    now = job.now
    if now is None or not now.step_s:
        return "-"
    return moves.seconds(now.step_s) + (f", {now.binds}" if now.binds else "")


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


def _whys(jobs: Sequence[JobFrame]) -> Iterator[str]:
    for job in jobs:
        if job.held:
            yield f"{job.job} is {job.held}"
        if job.now is not None and job.now.verdict:
            yield f"{job.job}: {job.now.verdict}"


def _hosts(frame: Frame) -> Iterator[str]:
    for host in frame.hosts:
        yield f"{host.host}: {host.busy_cores:.1f} of {host.cores:g} cores busy"


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
        table.add_row(
            one.gang,
            " ".join(one.workers),
            one.job,
            one.resident,
            Text(
                one.role, style=ROLE_COLORS.get("training" if one.role == "core" else one.role, "")
            ),
            one.tier if one.tier == one.wanted else f"{one.tier} -> {one.wanted}",
            one.state,
            _number(one.tensor_parallel, "d"),
            one.doing,
        )
    return table


def _others(frame: Frame) -> Iterator[str]:
    if frame.idle:
        yield f"idle: {' '.join(frame.idle)}"
    if frame.lost:
        yield f"lost: {' '.join(frame.lost)}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
