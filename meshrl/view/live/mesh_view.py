"""Shows all jobs of a mesh: on a terminal a screen, elsewhere a plain line for each news."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.state.jobs import JobRow
from common.state.registry import Entry
from meshrl.view.history.held import reason
from meshrl.view.history.run_snapshot import History, trained_rate
from meshrl.view.live import tables
from meshrl.view.live.view import OneScreen, Saying, clock, sparkline
from meshrl.view.mesh.pool import Pool
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import quiet_ms, told
from meshrl.view.mesh.workers import lines

CURVE = 24  # of the rewards of the last steps


@dataclass(frozen=True)
class JobLine:
    """A job of the mesh at one moment."""

    row: JobRow
    rewards: tuple[float, ...] = ()  # of the last steps
    rolled_out_s: float = 0.0  # tokens/s
    trained_s: float = 0.0
    in_flight: int = 0  # trajectories
    roles: str = ""  # `w0:training w1:rollout`
    quiet: str = ""  # that it makes no progress, if that is too long


@dataclass(frozen=True)
class MeshShot:
    """All jobs of a mesh at one moment."""

    elapsed_s: float
    jobs: tuple[JobLine, ...] = ()
    pool: Pool = field(default_factory=Pool)
    entries: tuple[Entry, ...] = ()


def shot(
    elapsed_s: float,
    rows: Sequence[JobRow],
    steps: Mapping[str, Sequence[dict[str, Any]]],
    entries: Sequence[Entry],
    pool: Pool,
    histories: dict[str, History],
) -> MeshShot:
    """The mesh now; `steps` are the last rows of each job's steps, `histories` are brought up to
    date.
    """
    now_ms = max((entry.renewed_ms for entry in entries), default=0)
    placed = list(lines(pool))
    found = []
    for row in rows:
        shards = [e for e in entries if e.alive and e.kind == "rollout" and owner(e) == row.id]
        tokens = sum(float(e.stats.get("tokens", 0)) for e in shards)
        rate = histories.setdefault(row.id, History()).rate(elapsed_s, tokens)
        done = steps.get(row.id, ())
        quiet_s = quiet_ms(row, now_ms) / 1000
        line = JobLine(
            row,
            rewards=tuple(float(step["reward"]) for step in done[-CURVE:]),
            rolled_out_s=0.0 if row.ended else rate,
            trained_s=0.0 if row.ended else trained_rate(done),
            in_flight=sum(int(e.stats.get("in_flight", 0)) for e in shards),
            roles=" ".join(f"{w.worker}:{w.role}" for w in placed if w.job == row.id),
            quiet=f"for {quiet_s:.0f} s {told(row)}" if quiet_s else "",
        )
        found.append(line)
    return MeshShot(elapsed_s, tuple(found), pool, tuple(entries))


class MeshView(Saying, Protocol):
    def show(self, now: MeshShot) -> None: ...


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

    def show(self, now: MeshShot) -> None:
        for line in now.jobs:
            row, at = line.row, f"[{clock(now.elapsed_s)}] {line.row.id}"
            if row.steps_done > self._steps.get(row.id, row.steps_done):
                self.say(f"{at}: {_stepped(line)}")
            self._steps[row.id] = row.steps_done
            state = reason(row) or line.quiet.partition(" s ")[2] or row.phase.replace("_", " ")
            if state != self._states.get(row.id):
                self._states[row.id] = state
                self.say(f"{at}: {(row.error and f'failed: {row.error}') or state}")


class MeshScreen(OneScreen):
    """All jobs and all workers on one screen, redrawn with each look."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root

    def show(self, now: MeshShot) -> None:
        self._draw(screen(now, self._root))


def screen(now: MeshShot, root: str) -> RenderableType:
    """All jobs of a mesh, why some do nothing, and what its workers do."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("job", "phase", "step", "workers", "reward", "", "tokens/s", "in flight"):
        table.add_column(column, header_style="dim", no_wrap=True)
    for line in now.jobs:
        row = line.row
        rate = f"{line.rolled_out_s:,.0f} / {line.trained_s:,.0f}" if not row.ended else ""
        table.add_row(
            row.id,
            tables.state(row),
            tables.progress(row),
            "" if row.ended else tables.has(now.pool, row.id),
            f"{line.rewards[-1]:.3f}" if line.rewards else "-",
            sparkline(line.rewards),
            rate,
            str(line.in_flight or ""),
        )
    parts: list[RenderableType] = [table]
    rows = [line.row for line in now.jobs]
    if whys := tables.whys(rows):
        parts.append(Text("\n".join(whys), style="yellow"))
    parts.append(tables.workers(now.pool, now.entries))
    wrong = [f"{line.row.id} {line.quiet}" for line in now.jobs if line.quiet]
    wrong += tables.troubles(rows, (), 0.0)
    if wrong:
        parts.append(Text("\n".join(wrong), style="bold red"))
    title = Text.assemble((f"{len(now.jobs)} jobs", "bold"), f"  {clock(now.elapsed_s)}")
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(root))


def _stepped(line: JobLine) -> str:
    reward = f"  reward {line.rewards[-1]:.3f}" if line.rewards else ""
    rate = f"{line.rolled_out_s / 1000:.1f}k rolled out {line.trained_s / 1000:.1f}k trained"
    return f"step {tables.progress(line.row)}{reward}  tokens/s {rate}  {line.roles}"
