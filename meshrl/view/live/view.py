"""Shows a run while it runs: a live view on a terminal, elsewhere one plain line a step."""

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

from meshrl.common.base.host.terminal import guarded_output
from meshrl.common.job.evaluation_plan import GREEDY, HELD_OUT, SAMPLED
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.workers.rows import Role
from meshrl.view.guard import WarningGuard
from meshrl.view.history.failures import (
    SHOWN,
    ShownFailures,
    counted,
    first,
    lost,
    named_figures,
    of_share,
)
from meshrl.view.history.run_snapshot import Evaluation, RunSnapshot
from meshrl.view.mesh.prefixes import told
from meshrl.view.mesh.workers import WorkerLine, WorkerSums
from meshrl.view.terminal import Console

BLOCKS = " ▁▂▃▄▅▆▇█"
ROLE_COLORS: dict[str, str] = {
    Role.ROLLOUT: "cyan",
    Role.TRAINING: "magenta",
    Role.SCORING: "green",
    Role.IDLE: "bright_black",
}
CURVE_WIDTH = 60
OTHERS = 6  # other jobs that are shown by name
# What is said when nothing stands in the way any more, by the field of a snapshot that tells it.
OVER = {
    "full": "there is room on the disk again",
    "held": "the job runs",
    "quiet": "the job comes further again",
    "trouble": "redis answers again",
}


def view_for(run_dir: Path) -> LiveView | RunLines:
    """The live view when stdout is a terminal, else lines."""
    return LiveView(run_dir) if sys.stdout.isatty() else RunLines()


class PrintedLines:
    """Base of the views that print lines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, flush=True)


class RunLines(PrintedLines):
    """One line for each step, evaluation and change of phase; for logs and pipes."""

    def __init__(self) -> None:
        self._steps = -1
        self._evaluations = 0
        self._phase: Phase | None = None
        self._shown: dict[str, str] = {}  # by what stands in the way, see `OVER`
        self._alerts = 0
        self._failures = ShownFailures()

    def show(self, shot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        at = f"[{clock(shot.elapsed_s)}]"
        if self._phase != Phase.TRAINING:  # after training, the last steps come before the news
            self._show_phase(shot)
        for name, over in OVER.items():
            now, before = getattr(shot, name), self._shown.get(name, "")
            if now != before if name == "held" else bool(now) != bool(before):
                self.say(f"{at} {now or over}")
            self._shown[name] = now
        for alert in shot.alerts[self._alerts :]:
            self.say(f"{at} {alert}")
        self._alerts = len(shot.alerts)
        if self._steps < 0:  # what a resumed run did before is not news
            self._steps = 0 if len(rows) <= 1 else int(rows[-1]["step"])
        new = list(takewhile(lambda row: row["step"] > self._steps, reversed(rows)))[::-1]
        for row in new:
            self.say(step_line(row, shot))
        for line in self._failures.news(shot.failures, bool(new), shot.elapsed_s):
            self.say(f"{at} {line}")
        self._steps = int(rows[-1]["step"]) if rows else 0
        self._show_phase(shot)
        for evaluation in shot.evaluations[self._evaluations :]:
            self.say(evaluation_line(evaluation))
        self._evaluations = len(shot.evaluations)

    def _show_phase(self, shot: RunSnapshot) -> None:
        if shot.phase != self._phase:
            self._phase = shot.phase
            self.say(f"[{clock(shot.elapsed_s)}] {shot.phase.replace('_', ' ')}")


class OneScreen:
    """A screen that is redrawn, with lines above it that stay."""

    def __init__(self) -> None:
        self._live = Live(console=Console(), auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._guarded = guarded_output()  # what is printed meanwhile, above the screen
        self._guarded.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._guarded.__exit__(None, None, None)
        self._live.__exit__(kind, error, tb)

    def say(self, text: str) -> None:
        self._live.console.print(text)

    def _draw(self, screen: RenderableType) -> None:
        self._live.update(screen, refresh=True)


class LiveView(OneScreen):
    """The whole run on one screen, redrawn with each snapshot."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir

    def show(self, shot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        self._draw(screen(shot, self._run_dir))


def screen(shot: RunSnapshot, run_dir: Path) -> RenderableType:
    """The live view of one snapshot."""
    parts: list[RenderableType] = [_progress(shot), _learning(shot), _workers(shot)]
    if shot.held:
        parts.insert(0, Text(shot.held, style="yellow"))
    if shot.others:
        more = len(shot.others) - OTHERS
        beside = [*shot.others[:OTHERS], *([f"and {more} more"] if more > 0 else [])]
        parts.append(_named([("beside", "\n".join(beside))]))
    if shot.histogram:
        parts.append(_in_flight(shot))
    if shot.failures:
        parts.append(Text("\n".join(map(counted, shot.failures[-SHOWN:])), style="yellow"))
        parts.append(Text(first(shot.failures[-1]), style="dim yellow"))
    if shot.news:
        parts.append(Text("\n".join(shot.news), style="dim"))
    if wrong := shot.full or shot.trouble or shot.quiet or shot.error:
        parts.append(Text(wrong, style="bold red"))
    about = f"  seed {shot.seed}  {shot.phase.replace('_', ' ')}"
    title = Text.assemble((shot.job, "bold"), about)
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(str(run_dir)))


def _progress(shot: RunSnapshot) -> RenderableType:
    warming = shot.phase == Phase.WARM_START
    done, total = (shot.warm_start, 1.0) if warming else (float(shot.step), float(shot.steps))
    what = f"warm start {shot.warm_start:.0%}" if warming else f"step {shot.step}/{shot.steps}"
    to_go = f"about {clock(shot.eta_s)} to go" if shot.eta_s is not None else ""
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    bar = ProgressBar(total=total, completed=done)
    line.add_row(what, bar, f"{clock(shot.elapsed_s)}  {to_go}".rstrip())
    return line


def _learning(shot: RunSnapshot) -> RenderableType:
    now = f"{shot.rewards[-1]:.3f}" if shot.rewards else "-"
    rows = [("reward", f"{now}  {sparkline(shot.rewards[-CURVE_WIDTH:])}")]
    held = "   ".join(
        f"{e.step}: {e.sampled:.3f}{of_share(e.shares.get(SAMPLED))}"
        + (f" ({e.greedy:.3f} greedy)" if e.greedy is not None else "")
        for e in shot.evaluations[-4:]
        if e.sampled is not None
    )
    last = shot.evaluations[-1] if shot.evaluations else None
    missing = lost(last.shares, last.reasons) if last else ""
    rows.append(("held-out", "   ".join(filter(None, (held, missing))) or "-"))
    if last and (others := other_figures(last)):
        rows.append(("evaluated", f"{last.step}: {others}"))
    speed = f"{shot.rolled_out_s:,.0f} rolled out   {shot.trained_s:,.0f} trained"
    rows.append(("tokens/s", speed))
    if said := told(shot.prefixes):
        rows.append(("prefixes", said))
    stale = f"staleness {shot.staleness:.2f} (at most {shot.max_staleness})"
    apart = f"log-probability gap {gap(shot.logprob_gap)}"
    rows.append(("off-policy", f"{stale}   {apart}   entropy {shot.entropy:.2f}"))
    return _named(rows)


def _workers(shot: RunSnapshot) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("worker", "on", "gang", "role", "tier", "state", "doing"):
        table.add_column(column, no_wrap=True, header_style="dim")
    for line in shot.workers:
        mine = line.job in ("", shot.job)
        role = Text(line.role, style=ROLE_COLORS.get(line.role, ""))
        doing = ", ".join(filter(None, [line.doing if mine else f"job {line.job}", line.gpu]))
        cells = (line.worker, line.accelerator, line.gang, role, tier(line), line.state, doing)
        table.add_row(*cells, style="" if mine else "dim")
    more = elsewhere(shot.elsewhere)
    return Group(table, Text(more, style="dim")) if more else table


def tier(line: WorkerLine) -> str:
    """Where a resident's tensors are; and where they are to be, if that is elsewhere."""
    if not line.resident:
        return ""
    return line.tier if line.tier == line.wanted else f"{line.tier} -> {line.wanted}"


def elsewhere(sums: WorkerSums) -> str:
    """How many workers are not shown, and why."""
    parts = [f"{sums.others} for other jobs"] if sums.others else []
    parts += [f"{sums.idle} more that are idle"] if sums.idle else []
    return f"workers not shown: {', '.join(parts)}" if parts else ""


def _named(rows: Iterable[tuple[str, RenderableType]], wraps: bool = True) -> Table:
    """Rows, each with its name in front."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=not wraps)
    for row in rows:
        grid.add_row(*row)
    return grid


def _in_flight(shot: RunSnapshot) -> RenderableType:
    """Trajectories in flight by length: the tail that a step waits for is to the right."""
    filled = [i for i, count in enumerate(shot.histogram) if count]
    bars = sparkline(shot.histogram[: max(filled, default=0) + 1])
    labels = [str(bound) for bound in shot.bounds]
    labels = [*labels, "more"][: len(bars)]
    width = max(map(len, labels), default=1)
    spread = " ".join(bar * width for bar in bars)
    axis = " ".join(label.rjust(width) for label in labels)
    rows: list[tuple[str, RenderableType]] = [
        ("in flight", f"{shot.in_flight} trajectories, by tokens so far"),
        ("", Text(spread, style="cyan")),
        ("", Text(axis, style="dim")),
    ]
    return _named(rows, wraps=False)


def sparkline(values: Sequence[float]) -> str:
    """One block character a value, from 0 (blank) to the largest (full)."""
    top = max(values, default=0)
    if top <= 0:
        return BLOCKS[0] * len(values)
    scaled = (max(0.0, value) / top * (len(BLOCKS) - 1) for value in values)
    return "".join(BLOCKS[max(1, round(s)) if s > 0 else 0] for s in scaled)


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def step_line(row: dict[str, Any], shot: RunSnapshot) -> str:
    rate = f"{shot.rolled_out_s / 1000:.1f}k rolled out {shot.trained_s / 1000:.1f}k trained"
    return (
        f"[{clock(shot.elapsed_s)}] step {row['step']}/{shot.steps}"
        f"  reward {row['reward']:.3f}  length {row['length_mean']:.0f}"
        f"  staleness {row['staleness']:.2f}  gap {gap(row['logprob_gap'])}"
        f"  failed {100 * row.get('failed_share', 0):.0f} %"
        f"  tokens/s {rate}  {roles(shot.workers, shot.job)}"
    )


def gap(value: float | None) -> str:
    """None: no token of the step had its whole prefix from one version."""
    return "-" if value is None else f"{value:.1e}"


def evaluation_line(evaluation: Evaluation) -> str:
    parts, shares = [], evaluation.shares
    if evaluation.sampled is not None:
        parts.append(f"{evaluation.sampled:.3f} sampled{of_share(shares.get(SAMPLED))}")
    if evaluation.greedy is not None:
        parts.append(f"{evaluation.greedy:.3f} greedy{of_share(shares.get(GREEDY))}")
    parts += [others] if (others := other_figures(evaluation)) else []
    parts += [missing] if (missing := lost(shares, evaluation.reasons)) else []
    best = "; the best so far" if evaluation.best else ""
    what = "held-out" if evaluation.sampled is not None else "evaluated"
    return f"{what} after step {evaluation.step}: {', '.join(parts) or 'no figure'}{best}"


def other_figures(evaluation: Evaluation) -> str:
    """The figures of the datasets beside the held-out set."""
    others = {k: v for k, v in evaluation.figures.items() if not k.startswith(f"{HELD_OUT}.")}
    return named_figures(others, evaluation.shares)


def roles(workers: Sequence[WorkerLine], job: str) -> str:
    """`w0:training w1:rollout`, of those that serve the job."""
    return " ".join(f"{w.worker}:{w.role}" for w in workers if w.resident and w.job == job)


class GuardedView:
    """A view of a run whose faults, such as a closed pipe, do not end the run."""

    def __init__(self, view: LiveView | RunLines) -> None:
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

    def say(self, text: str) -> None:
        """Print a line."""
        with self._guard("the view"):
            self._view.say(text)

    def show(self, shot: RunSnapshot, rows: Sequence[dict[str, Any]]) -> None:
        """Draw a snapshot of the run."""
        with self._guard("the view"):
            self._view.show(shot, rows)
