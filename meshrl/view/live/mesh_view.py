"""View of all jobs of a mesh: a screen on a terminal, elsewhere a plain line for each change."""

from __future__ import annotations

import sys

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from meshrl.view.live import mesh_tables
from meshrl.view.live.run_text import format_duration, format_roles
from meshrl.view.live.run_view import LinePrinter, ScreenView
from meshrl.view.live.slice_tables import make_lanes
from meshrl.view.live.top_screen import render_jobs
from meshrl.view.mesh.mesh_frames import MeshFrame
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.worker_lines import list_worker_lines


def make_mesh_view(root: str) -> MeshScreen | MeshLines:
    """Return a screen when stdout is a terminal, else a line printer."""
    return MeshScreen(root) if sys.stdout.isatty() else MeshLines()


class MeshLines(LinePrinter):
    """Printer of a line for each step, phase, wait and pause, which starts with the job."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._steps: dict[str, int] = {}

    def show(self, mesh: MeshSnapshot, frame: MeshFrame, elapsed_s: float) -> None:
        workers = list(list_worker_lines(mesh))
        for job in frame.jobs:
            at = f"[{format_duration(elapsed_s)}] {job.job}"
            if job.step > self._steps.get(job.job, job.step):
                learned = f"  reward {job.reward:.3f}" if job.reward is not None else ""
                learned += f"  loss {job.loss:.4f}" if job.loss is not None else ""
                rolled_out, trained = (
                    (job.rollout_tokens_per_s or 0) / 1000,
                    (job.trained_tokens_per_s or 0) / 1000,
                )
                rate = f"{rolled_out:.1f}k rolled out {trained:.1f}k trained"
                step = f"step {job.step}/{job.steps}{learned}  tokens/s {rate}"
                self.print_line(f"{at}: {step}  {format_roles(workers, job.job)}")
            self._steps[job.job] = job.step
            state = job.block_reason or job.no_progress_reason.partition(" s ")[2] or job.phase_text
            if state != self._states.get(job.job):
                self._states[job.job] = state
                self.print_line(f"{at}: {(job.error and f'failed: {job.error}') or state}")


class MeshScreen(ScreenView):
    """Screen of all jobs and all workers, redrawn with each poll."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root

    def show(self, mesh: MeshSnapshot, frame: MeshFrame, elapsed_s: float) -> None:
        self._draw(render_screen(mesh, frame, elapsed_s, self._root))


def render_screen(
    mesh: MeshSnapshot, frame: MeshFrame, elapsed_s: float, root: str
) -> RenderableType:
    """Return all jobs of a mesh, why some are blocked, and the activity of its workers."""
    parts = [*render_jobs(frame), mesh_tables.make_workers_table(mesh)]
    parts += [make_lanes(frame.slices)] if frame.slices else []
    if ends := mesh_tables.format_exits(mesh):
        parts.append(Text("\n".join(ends), style="bold red"))
    title = Text.assemble((f"{len(mesh.jobs)} jobs", "bold"), f"  {format_duration(elapsed_s)}")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(root))
