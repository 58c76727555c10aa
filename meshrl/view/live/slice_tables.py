"""Tables of a gang's slice scheduler, and lanes of its time slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import cycle
from string import ascii_lowercase

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from meshrl.common.api.node import SliceExplanation
from meshrl.view.live import console_tables
from meshrl.view.live.console_tables import ROLE_COLORS
from meshrl.view.live.run_text import format_percent
from meshrl.view.mesh.slice_frames import GangSlicesFrame
from meshrl.view.mesh.slice_lanes import SWITCH, LaneSpan

LANE_CELLS = 60  # characters of a lane, at most
MIN_CELL_SHARE = 0.1  # of a character: less counts as idle

COLUMNS = ("at", "instance", "function", "waited", "service", "switch", "score", "reason")


def make_decisions_table(explanation: SliceExplanation) -> Table:
    """Return a table of decisions: a row for the chosen request, and one for each other.

    Times are in seconds.
    """
    table = console_tables.make_table(*COLUMNS)
    for decision in explanation.decisions:
        at = datetime.fromtimestamp(decision.at_s).strftime("%H:%M:%S")
        is_open = True  # an instance may have several requests; the first one is chosen
        for candidate in decision.candidates:
            is_chosen = is_open and candidate.instance == decision.chosen
            is_open = is_open and not is_chosen
            figures = (candidate.wait_s, candidate.service_s, candidate.switch_s, candidate.score)
            table.add_row(
                at,
                candidate.instance,
                candidate.function,
                *(f"{figure:.2f}" for figure in figures),
                decision.reason if is_chosen else "waits",
            )
            at = ""
    return table


def make_lanes(frames: Sequence[GangSlicesFrame]) -> Table:
    """Return a block for each gang: its lane, its use by instances, and what waits."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for frame in frames:
        block = Text(frame.error, style="yellow") if frame.error else _GangBlock(frame)
        grid.add_row(frame.gang, block)
    return grid


class _GangBlock:
    """Lane and figures of a gang, as wide as the terminal allows.

    A letter of the lane is the instance that computes, `=` a switch, `.` an idle accelerator.
    """

    def __init__(self, frame: GangSlicesFrame) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame, window_s = self._frame, self._frame.end_s - self._frame.start_s
        letters = dict(zip((use.instance for use in frame.uses), cycle(ascii_lowercase)))
        yield _draw_lane(frame, letters, max(1, min(LANE_CELLS, options.max_width)))
        total_s = idle_s = frame.workers * window_s
        for use in frame.uses:
            idle_s -= sum(use.accelerator_s.values())
            about = " ".join(filter(None, (use.instance, use.job, use.role)))
            shares = (f"{f} {format_percent(s / total_s)}" for f, s in use.accelerator_s.items())
            letter = letters[use.instance], ROLE_COLORS.get(use.role, "")
            yield Text.assemble(letter, f" {about}: {', '.join(shares) or 'no slice'}")
        waits = (
            f"{letters.get(one.instance, one.instance)} {one.function} {one.wait_s:.1f} s"
            for one in frame.waiting
        )
        yield Text(
            f"last {window_s:.0f} s: switches {format_percent(frame.switch_s / total_s)}, "
            f"hidden loads {format_percent(frame.hidden_share)}, "
            f"idle {format_percent(max(0.0, idle_s - frame.switch_s) / total_s)}; "
            f"waiting: {', '.join(waits) or 'none'}",
            style="dim",
        )


def _draw_lane(frame: GangSlicesFrame, letters: Mapping[str, str], cells: int) -> Text:
    """Return a lane as characters, each of the span that fills most of its part of the window."""
    cell_s = (frame.end_s - frame.start_s) / cells
    longest: list[tuple[float, LaneSpan | None]] = [(0.0, None)] * cells
    for span in frame.spans:
        first = int((span.start_s - frame.start_s) / cell_s)
        last = int((span.end_s - frame.start_s) / cell_s)
        for cell in range(max(0, first), min(cells - 1, last) + 1):
            began = frame.start_s + cell * cell_s
            inside_s = min(span.end_s, began + cell_s) - max(span.start_s, began)
            if inside_s > longest[cell][0]:
                longest[cell] = inside_s, span
    text = Text()
    for inside_s, shown in longest:
        if shown is None or inside_s < MIN_CELL_SHARE * cell_s:
            text.append(".", style="dim")
        elif shown.kind == SWITCH:
            text.append("=", style="bold")
        else:
            text.append(letters[shown.instance], style=ROLE_COLORS.get(shown.role, ""))
    return text
