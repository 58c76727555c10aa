"""View of a run while it runs: a live view on a terminal, elsewhere one plain line a step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshrl.common.base.host.terminal import escaped_output
from meshrl.common.state.jobs import Phase
from meshrl.view.guard import WarningGuard
from meshrl.view.health.findings import Finding
from meshrl.view.history.job_failures import (
    MAX_KINDS,
    FailurePrinter,
    explain_unscored,
    format_count,
    format_first,
)
from meshrl.view.history.run_snapshot import RunSnapshot
from meshrl.view.live.console_tables import ROLE_COLORS
from meshrl.view.live.run_text import (
    format_duration,
    format_evaluation,
    format_gap,
    format_other_figures,
    format_percent,
    format_point,
    format_step,
    format_value,
)
from meshrl.view.live.slice_tables import make_lanes
from meshrl.view.mesh.prefix_stats import format_prefix_figures
from meshrl.view.mesh.worker_lines import HiddenWorkers, WorkerLine
from meshrl.view.terminal import Console

SPARKLINE_BLOCKS = " ▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
MAX_OTHER_JOBS = 6  # other jobs that are shown by name
# Texts for the end of a problem, by the field of a snapshot that reports it.
RESOLVED_TEXTS = {
    "disk_full_reason": "the disk has free space again",
    "block_reason": "the job runs",
    "no_progress_reason": "the job makes progress again",
    "stale_reason": "redis answers again",
}


def make_run_view(run_dir: Path) -> RunScreen | RunLines:
    """Return the live view when stdout is a terminal, else a line printer."""
    return RunScreen(run_dir) if sys.stdout.isatty() else RunLines()


class LinePrinter:
    """Base of the views that print lines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def print_line(self, text: str) -> None:
        print(text, flush=True)


class RunLines(LinePrinter):
    """Printer of one line for each step, evaluation and change of phase; for logs and pipes."""

    def __init__(self) -> None:
        self._steps = -1
        self._evaluations = 0
        self._phase: Phase | None = None
        self._shown_problems: dict[str, str] = {}  # by the field of the problem, see above
        self._alerts = 0
        self._failures = FailurePrinter()
        self._findings: dict[str, str] = {}  # severity of those shown, by rule

    def show(self, snapshot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        at = f"[{format_duration(snapshot.elapsed_s)}]"
        if self._phase != Phase.TRAINING:  # after training, the last steps come before the news
            self._show_phase(snapshot)
        for name, resolved_text in RESOLVED_TEXTS.items():
            now, before = getattr(snapshot, name), self._shown_problems.get(name, "")
            if now != before if name == "block_reason" else bool(now) != bool(before):
                self.print_line(f"{at} {now or resolved_text}")
            self._shown_problems[name] = now
        for alert in snapshot.alerts[self._alerts :]:
            self.print_line(f"{at} {alert}")
        self._alerts = len(snapshot.alerts)
        if self._steps < 0:  # what a resumed run did before is not news
            self._steps = 0 if len(rows) <= 1 else int(rows[-1]["step"])
        new = list(takewhile(lambda row: row["step"] > self._steps, reversed(rows)))[::-1]
        for row in new:
            self.print_line(format_step(row, snapshot))
        for line in self._failures.format_new(snapshot.failures, bool(new), snapshot.elapsed_s):
            self.print_line(f"{at} {line}")
        self._steps = int(rows[-1]["step"]) if rows else 0
        self._show_findings(snapshot)
        self._show_phase(snapshot)
        self._show_evaluations(snapshot)

    def _show_evaluations(self, snapshot: RunSnapshot) -> None:
        for evaluation in snapshot.evaluations[self._evaluations :]:
            self.print_line(format_evaluation(evaluation))
        self._evaluations = len(snapshot.evaluations)

    def _show_findings(self, snapshot: RunSnapshot) -> None:
        """Print what is new; at its end a run prints all of its findings elsewhere."""
        found = {} if snapshot.is_terminal else {f.rule: f for f in snapshot.findings}
        for rule, finding in found.items():
            if self._findings.get(rule) != finding.severity:
                self.print_line(f"[{format_duration(snapshot.elapsed_s)}] {finding.line}")
        self._findings = {rule: finding.severity for rule, finding in found.items()}

    def _show_phase(self, snapshot: RunSnapshot) -> None:
        if snapshot.phase != self._phase:
            self._phase = snapshot.phase
            self.print_line(f"[{format_duration(snapshot.elapsed_s)}] {snapshot.phase_text}")


class ProgressLines(RunLines):
    """Printer of a run's phases and problems, without figures."""

    def _show_evaluations(self, snapshot: RunSnapshot) -> None:
        return None


class ScreenView:
    """Screen that is redrawn, with permanent lines above it."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._output_guard = escaped_output()  # escapes output that is printed above the screen
        self._output_guard.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._output_guard.__exit__(None, None, None)
        self._live.__exit__(kind, error, tb)

    def print_line(self, text: str) -> None:
        self._live.console.print(text)

    def _draw(self, screen: RenderableType) -> None:
        self._live.update(screen, refresh=True)


class RunScreen(ScreenView):
    """Screen of the whole run, redrawn with each snapshot."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir

    def show(self, snapshot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        self._draw(render_screen(snapshot, self._run_dir))


def render_screen(snapshot: RunSnapshot, run_dir: Path) -> RenderableType:
    """Return the live view of one snapshot."""
    parts: list[RenderableType] = [
        _render_progress(snapshot),
        _render_learning(snapshot),
        _render_workers(snapshot),
        *([make_lanes(snapshot.slices)] if snapshot.slices else []),
    ]
    if snapshot.block_reason:
        parts.insert(0, Text(snapshot.block_reason, style="yellow"))
    if snapshot.other_jobs:
        more = len(snapshot.other_jobs) - MAX_OTHER_JOBS
        other_jobs = [
            *snapshot.other_jobs[:MAX_OTHER_JOBS],
            *([f"and {more} more"] if more > 0 else []),
        ]
        parts.append(_make_grid([("beside", "\n".join(other_jobs))]))
    if snapshot.histogram:
        parts.append(_render_in_flight(snapshot))
    if snapshot.failures:
        parts.append(
            Text("\n".join(map(format_count, snapshot.failures[-MAX_KINDS:])), style="yellow")
        )
        parts.append(Text(format_first(snapshot.failures[-1]), style="dim yellow"))
    parts += [render_finding(finding) for finding in snapshot.findings]
    if snapshot.news:
        parts.append(Text("\n".join(snapshot.news), style="dim"))
    if (
        wrong := snapshot.disk_full_reason
        or snapshot.stale_reason
        or snapshot.no_progress_reason
        or snapshot.error
    ):
        parts.append(Text(wrong, style="bold red"))
    about = f"  seed {snapshot.seed}  {snapshot.phase_text}"
    title = Text.assemble((snapshot.job, "bold"), about)
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(str(run_dir)))


def render_finding(finding: Finding) -> Text:
    """Return a finding about the run's health, in red if the run cannot have learned."""
    return Text(finding.line, style="bold red" if finding.is_failure else "yellow")


def _render_progress(snapshot: RunSnapshot) -> RenderableType:
    warming = snapshot.phase == Phase.WARM_START
    done, total = (
        (snapshot.warm_start_share, 1.0)
        if warming
        else (float(snapshot.step), float(snapshot.steps))
    )
    what = (
        f"{snapshot.phase_text} {snapshot.warm_start_share:.0%}"
        if warming
        else f"step {snapshot.step}/{snapshot.steps}"
    )
    to_go = f"about {format_duration(snapshot.eta_s)} left" if snapshot.eta_s is not None else ""
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    bar = ProgressBar(total=total, completed=done)
    line.add_row(what, bar, f"{format_duration(snapshot.elapsed_s)}  {to_go}".rstrip())
    return line


def _render_learning(snapshot: RunSnapshot) -> RenderableType:
    curve = snapshot.losses if snapshot.is_supervised else snapshot.rewards
    now = f"{curve[-1]:.3f}" if curve else "-"
    shown = f"{now}  {draw_sparkline(curve[-CURVE_WIDTH:])}"
    rows = [("loss" if snapshot.is_supervised else "reward", shown)]
    held_out = "   ".join(
        f"{e.step}: {text}" for e in snapshot.evaluations[-4:] if (text := format_point(e))
    )
    last = snapshot.evaluations[-1] if snapshot.evaluations else None
    missing = explain_unscored(last.scored_shares, last.unscored_reasons) if last else ""
    rows.append(("held-out", "   ".join(filter(None, (held_out, missing))) or "-"))
    if last and (others := format_other_figures(last)):
        rows.append(("evaluated", f"{last.step}: {others}"))
    speed = (
        f"{snapshot.rollout_tokens_per_s:,.0f} rolled out   "
        f"{snapshot.trained_tokens_per_s:,.0f} trained"
    )
    rows.append(("tokens/s", speed))
    if prefix_text := format_prefix_figures(snapshot.prefix_figures):
        rows.append(("prefixes", prefix_text))
    if snapshot.is_supervised:
        return _make_grid(rows)
    stale = f"staleness {snapshot.staleness:.2f} (at most {snapshot.max_staleness})"
    gap_text = f"log-probability gap {format_gap(snapshot.logprob_gap)}"
    signal = f"reward spread {format_value(snapshot.reward_spread)}"
    signal += f"   truncated {format_percent(snapshot.truncated_share)}"
    rows.append(("signal", f"{signal}   failed {format_percent(snapshot.failed_share)}"))
    rows.append(("off-policy", f"{stale}   {gap_text}   entropy {snapshot.entropy:.2f}"))
    return _make_grid(rows)


def _render_workers(snapshot: RunSnapshot) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("worker", "on", "gang", "role", "tier", "state", "activity"):
        table.add_column(column, no_wrap=True, header_style="dim")
    for line in snapshot.worker_lines:
        mine = line.job in ("", snapshot.job)
        role = Text(line.role, style=ROLE_COLORS.get(line.role, ""))
        activity = ", ".join(
            filter(None, [line.activity if mine else f"job {line.job}", line.gpu_text])
        )
        cells = (
            line.worker,
            line.accelerator,
            line.gang,
            role,
            format_tier(line),
            line.state,
            activity,
        )
        table.add_row(*cells, style="" if mine else "dim")
    more = format_hidden_workers(snapshot.hidden_workers)
    return Group(table, Text(more, style="dim")) if more else table


def format_tier(line: WorkerLine) -> str:
    """Return the tier of an instance's tensors, and the desired tier if that differs."""
    if not line.instance:
        return ""
    return line.tier if line.tier == line.desired_tier else f"{line.tier} -> {line.desired_tier}"


def format_hidden_workers(hidden: HiddenWorkers) -> str:
    """Return how many workers are not shown, and why."""
    parts = [f"{hidden.busy_elsewhere} for other jobs"] if hidden.busy_elsewhere else []
    parts += [f"{hidden.idle} more are idle"] if hidden.idle else []
    return f"workers not shown: {', '.join(parts)}" if parts else ""


def _make_grid(rows: Iterable[tuple[str, RenderableType]], wraps: bool = True) -> Table:
    """Return a grid of rows, each with its name in front."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=not wraps)
    for row in rows:
        grid.add_row(*row)
    return grid


def _render_in_flight(snapshot: RunSnapshot) -> RenderableType:
    """Return trajectories in flight by length: the tail that a step waits for is to the right."""
    filled = [i for i, count in enumerate(snapshot.histogram) if count]
    bars = draw_sparkline(snapshot.histogram[: max(filled, default=0) + 1])
    labels = [str(bound) for bound in snapshot.histogram_bounds]
    labels = [*labels, "more"][: len(bars)]
    width = max(map(len, labels), default=1)
    spread = " ".join(bar * width for bar in bars)
    axis = " ".join(label.rjust(width) for label in labels)
    rows: list[tuple[str, RenderableType]] = [
        ("in flight", f"{snapshot.in_flight} trajectories, by tokens so far"),
        ("", Text(spread, style="cyan")),
        ("", Text(axis, style="dim")),
    ]
    return _make_grid(rows, wraps=False)


def draw_sparkline(values: Sequence[float]) -> str:
    """Return one block character a value, from 0 (blank) to the largest (full)."""
    top = max(values, default=0)
    if top <= 0:
        return SPARKLINE_BLOCKS[0] * len(values)
    scaled = (max(0.0, value) / top * (len(SPARKLINE_BLOCKS) - 1) for value in values)
    return "".join(SPARKLINE_BLOCKS[max(1, round(s)) if s > 0 else 0] for s in scaled)


RunView = RunScreen | RunLines


class GuardedView:
    """View of a run whose faults, such as a closed pipe, do not end the run."""

    def __init__(self, view: RunView) -> None:
        self._view, self._guard = view, WarningGuard()

    def __enter__(self) -> Self:
        with self._guard("the view"):
            self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._guard("the view"):
            self._view.__exit__(kind, error, tb)

    def print_line(self, text: str) -> None:
        """Print a line."""
        with self._guard("the view"):
            self._view.print_line(text)

    def show(self, snapshot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        """Draw a snapshot of the run."""
        with self._guard("the view"):
            self._view.show(snapshot, rows)
