"""Chart of the time slices of a run's instances: a row for each gang."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshrl.view.mesh.slice_lanes import OTHER, SLICE, SWITCH, GangLane, LaneSpan
from meshrl.view.report.charts import (
    BOTTOM,
    COLORS,
    LEFT,
    TOP,
    WIDTH,
    Plot,
    compute_ticks,
    draw_legend,
    wrap_svg,
)

ROW_HEIGHT = 26  # height of a row
SWITCH_COLOR, OTHER_COLOR = "#000000", "#bbbbbb"
WINDOW_S = 60.0  # of the chart: the last ones, as slices take fractions of a second


def draw_slice_chart(lanes: Sequence[GangLane]) -> str:
    """Return the chart of the last `WINDOW_S` seconds of slices; without any, a note."""
    ends = [span.end_s for lane in lanes for span in lane.spans]
    if not ends:
        return '<p class="none">no time slices were recorded</p>'
    start_s = max(max(ends) - WINDOW_S, min(s.start_s for lane in lanes for s in lane.spans))
    shown = [lane.clip(start_s, max(ends)) for lane in lanes]
    ticks = compute_ticks(0.0, max(ends) - start_s)
    height = TOP + ROW_HEIGHT * len(shown) + BOTTOM
    plot = Plot((0.0, ticks[-1]), (0.0, 1.0), height)
    names = sorted({span.function for lane in shown for span in lane.spans if span.function})
    colors = {name: COLORS[index % (len(COLORS) - 1)] for index, name in enumerate(names)}
    parts = [plot.draw_grid(ticks, [], f"seconds of the last {max(ends) - start_s:.0f}")]
    for index, lane in enumerate(shown):
        top = TOP + ROW_HEIGHT * index
        y = top + ROW_HEIGHT / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{escape(lane.gang)}</text>')
        parts += (_draw_span(plot, top, start_s, span, colors) for span in lane.spans)
    kinds = {span.kind for lane in shown for span in lane.spans}
    keys = [(name, colors[name]) for name in names]
    keys += [(kind, SWITCH_COLOR) for kind in [SWITCH] if kind in kinds]
    keys += [("another job", OTHER_COLOR) for kind in [OTHER] if kind in kinds]
    return wrap_svg(height, parts) + draw_legend(keys)


def _draw_span(
    plot: Plot, top: float, start_s: float, span: LaneSpan, colors: dict[str, str]
) -> str:
    left = plot.to_x_pixel(span.start_s - start_s)
    right = min(float(WIDTH), plot.to_x_pixel(span.end_s - start_s))
    color = {SLICE: colors.get(span.function, ""), SWITCH: SWITCH_COLOR}.get(span.kind, OTHER_COLOR)
    title = f"{span.label}: {1000 * span.duration_s:.0f} ms"
    return (
        f'<rect x="{left:.1f}" y="{top + 3:.1f}" width="{max(0.5, right - left):.1f}" '
        f'height="{ROW_HEIGHT - 6}" fill="{color}"><title>{escape(title)}</title></rect>'
    )
