"""Timeline chart of instances on workers.

It has a row for each worker, a colour for each role, and a mark for each move, with its reason in
the pointer's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshrl.common.state.pool.workers.rows import Role
from meshrl.view.history.worker_timeline import RoleSpan, WorkerTimeline
from meshrl.view.report.charts import BOTTOM, LEFT, TOP, Plot, compute_ticks, draw_legend, wrap_svg

COLORS: dict[str, str] = {
    Role.ROLLOUT: "#56b4e9",
    Role.TRAINING: "#e69f00",
    Role.SCORING: "#cc79a7",
}
OTHER_COLOR = "#bbbbbb"  # of a role without a colour
ROW_HEIGHT = 26  # height of a row
PALE_OPACITY = 0.35  # of an instance that starts, drains or sleeps


def draw_timeline(timeline: WorkerTimeline) -> str:
    """Return the chart of a run; without spans, a note."""
    rows, spans, moves = timeline.list_workers, timeline.spans, timeline.moves
    if not rows:
        return '<p class="none">no roles were recorded</p>'
    x_ticks = compute_ticks(0.0, timeline.end_s)
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    plot = Plot((0.0, x_ticks[-1]), (0.0, 1.0), height)
    parts = [plot.draw_grid(x_ticks, [], "seconds")]
    for index, row in enumerate(rows):
        top = TOP + ROW_HEIGHT * index
        y = top + ROW_HEIGHT / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{escape(row)}</text>')
        parts += (
            _draw_span(plot, lane, lanes, top, span)
            for lane, lanes, span in assign_lanes(spans, row)
        )
        for mark in moves:
            if mark.workers and row not in mark.workers:
                continue
            x, low = plot.to_x_pixel(mark.at_s), top + ROW_HEIGHT - 4
            points = f"{x - 5:.1f},{low:.1f} {x + 5:.1f},{low:.1f} {x:.1f},{low - 10:.1f}"
            title = f"<title>{mark.at_s:.1f} s: {escape(mark.text)}</title>"
            parts.append(f'<polygon class="move" points="{points}">{title}</polygon>')
    for mark in timeline.faults:
        x = plot.to_x_pixel(mark.at_s)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" class="mark">'
            f"<title>{escape(mark.text)}</title></line>"
        )
    there = [role for role in COLORS if any(span.role == role for span in spans)]
    keys = [(role, COLORS[role]) for role in there]
    return wrap_svg(height, parts) + draw_legend(
        keys + ([("a move", "var(--text)")] if moves else [])
    )


def assign_lanes(spans: Sequence[RoleSpan], worker: str) -> list[tuple[int, int, RoleSpan]]:
    """Return the spans of a row, each with its lane and the number of lanes.

    Simultaneous spans get different lanes.
    """
    free: list[float] = []
    found: list[tuple[int, RoleSpan]] = []
    for span in sorted(
        (s for s in spans if worker in s.workers), key=lambda s: (s.start_s, s.end_s)
    ):
        lane = next((i for i, until in enumerate(free) if until <= span.start_s), len(free))
        free[lane : lane + 1] = [span.end_s]
        found.append((lane, span))
    return [(lane, len(free), span) for lane, span in found]


def _draw_span(plot: Plot, lane: int, lanes: int, top: float, span: RoleSpan) -> str:
    high = (ROW_HEIGHT - 6) / lanes
    y = top + 3 + lane * high
    left, right = plot.to_x_pixel(span.start_s), plot.to_x_pixel(min(span.end_s, plot.xs[1]))
    opacity = 1 if span.state == "ready" else PALE_OPACITY
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(0.5, right - left):.1f}" '
        f'height="{high:.1f}" fill="{COLORS.get(span.role, OTHER_COLOR)}" '
        f'opacity="{opacity:g}"><title>{escape(span.summary)}</title></rect>'
    )
