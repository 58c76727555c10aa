"""Tables of a gang's slice scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from string import ascii_lowercase

from rich.table import Table
from rich.text import Text

from meshrl.common.api.node import SliceExplanation
from meshrl.view.live import console_tables
from meshrl.view.live.run_view import ROLE_COLORS
from meshrl.view.mesh.slice_frames import WINDOW_S, GangSlicesFrame
from meshrl.view.mesh.slice_lanes import SWITCH, LaneSpan

LANE_CELLS = 60  # characters of a lane
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


def make_slices_table(frames: Sequence[GangSlicesFrame]) -> Table:
    """Return a table with a lane for each gang: a letter is the instance that computes, `=` a
    switch, `.` an idle accelerator.
    """
    table = console_tables.make_table(
        "gang", f"last {WINDOW_S:.0f} s", "switch", "hidden", "accelerator time"
    )
    for frame in frames:
        if frame.error:
            table.add_row(frame.gang, "-", "-", "-", frame.error)
            continue
        letters = _assign_letters(frame)
        used = (
            f"{job} {function} {seconds:.1f} s"
            for job, functions in (frame.accelerator_s or {}).items()
            for function, seconds in functions.items()
        )
        names = ", ".join(f"{letter} {instance}" for instance, letter in letters.items())
        hidden = "-" if frame.hidden_share is None else f"{100 * frame.hidden_share:.0f} %"
        text = f"{', '.join(used) or 'idle'}" + (f" ({names})" if names else "")
        table.add_row(
            frame.gang, _draw_lane(frame, letters), f"{frame.switch_s:.1f} s", hidden, text
        )
    return table


def _assign_letters(frame: GangSlicesFrame) -> dict[str, str]:
    """Return a letter for each instance of a lane."""
    instances = sorted({span.instance for span in frame.spans if span.instance})
    return {one: ascii_lowercase[n % len(ascii_lowercase)] for n, one in enumerate(instances)}


def _draw_lane(frame: GangSlicesFrame, letters: Mapping[str, str]) -> Text:
    """Return a lane as characters, each of the span that fills most of its part of the window."""
    cell_s = (frame.end_s - frame.start_s) / LANE_CELLS
    longest: list[tuple[float, LaneSpan | None]] = [(0.0, None)] * LANE_CELLS
    for span in frame.spans:
        first = int((span.start_s - frame.start_s) / cell_s)
        last = int((span.end_s - frame.start_s) / cell_s)
        for cell in range(max(0, first), min(LANE_CELLS - 1, last) + 1):
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
