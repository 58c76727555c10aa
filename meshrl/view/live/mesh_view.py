"""Shows all jobs of a mesh: on a terminal a screen, elsewhere a plain line for each news."""

from __future__ import annotations

import sys
from typing import Protocol, Self

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.state.jobs import JobRow
from meshrl.view.frames.frame import Frame, JobFrame
from meshrl.view.history.held import reason
from meshrl.view.live import tables
from meshrl.view.live.view import OneScreen, Saying, clock, sparkline
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.mesh.workers import lines


class MeshView(Saying, Protocol):
    def show(self, mesh: MeshSnapshot, frame: Frame, elapsed_s: float) -> None: ...


def view_for(root: str) -> MeshView:
    """The screen when stdout is a terminal, else lines."""
    return MeshScreen(root) if sys.stdout.isatty() else MeshLines()


class MeshLines:
    """A line for each step, phase, wait and pause of a job, which it begins with."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._steps: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, mesh: MeshSnapshot, frame: Frame, elapsed_s: float) -> None:
        for row, job in zip(mesh.jobs, frame.jobs, strict=True):
            at = f"[{clock(elapsed_s)}] {row.id}"
            if row.steps_done > self._steps.get(row.id, row.steps_done):
                self.say(f"{at}: {_stepped(row, job)}  {roles(mesh, row.id)}")
            self._steps[row.id] = row.steps_done
            state = reason(row) or job.quiet.partition(" s ")[2] or row.phase.replace("_", " ")
            if state != self._states.get(row.id):
                self._states[row.id] = state
                self.say(f"{at}: {(row.error and f'failed: {row.error}') or state}")


class MeshScreen(OneScreen):
    """All jobs and all workers on one screen, redrawn with each look."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root

    def show(self, mesh: MeshSnapshot, frame: Frame, elapsed_s: float) -> None:
        self._draw(screen(mesh, frame, elapsed_s, self._root))


def screen(mesh: MeshSnapshot, frame: Frame, elapsed_s: float, root: str) -> RenderableType:
    """All jobs of a mesh, why some do nothing, and what its workers do."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("job", "phase", "step", "workers", "reward", "", "tokens/s", "in flight"):
        table.add_column(column, header_style="dim", no_wrap=True)
    for row, job in zip(mesh.jobs, frame.jobs, strict=True):
        rate = f"{job.rolled_out_s:,.0f} / {job.trained_s:,.0f}" if not row.ended else ""
        table.add_row(
            row.id,
            tables.state(row),
            tables.progress(row),
            "" if row.ended else tables.has(mesh, row.id),
            f"{job.reward:.3f}" if job.reward is not None else "-",
            sparkline(job.rewards),
            rate,
            str(job.in_flight or ""),
        )
    parts: list[RenderableType] = [table]
    if whys := tables.whys(mesh.jobs):
        parts.append(Text("\n".join(whys), style="yellow"))
    parts.append(tables.workers(mesh))
    wrong = [f"{job.job} {job.quiet}" for job in frame.jobs if job.quiet]
    wrong += tables.troubles(mesh)
    if wrong:
        parts.append(Text("\n".join(wrong), style="bold red"))
    title = Text.assemble((f"{len(mesh.jobs)} jobs", "bold"), f"  {clock(elapsed_s)}")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(root))


def roles(mesh: MeshSnapshot, job: str) -> str:
    """`w0:training w1:rollout`, of the workers that serve a job."""
    return " ".join(f"{line.worker}:{line.role}" for line in lines(mesh) if line.job == job)


def _stepped(row: JobRow, job: JobFrame) -> str:
    reward = f"  reward {job.reward:.3f}" if job.reward is not None else ""
    rolled_out, trained = (job.rolled_out_s or 0.0) / 1000, (job.trained_s or 0.0) / 1000
    rate = f"{rolled_out:.1f}k rolled out {trained:.1f}k trained"
    return f"step {tables.progress(row)}{reward}  tokens/s {rate}"
