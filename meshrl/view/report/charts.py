"""Charts as inline SVG, so that a report is one file that opens anywhere, without a network."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 12, 34  # margins, for the axes' labels
# Okabe and Ito's colours, distinct also for colour-blind readers, without yellow on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MIN_SPAN_SHARE = (
    1e-9  # share of its values that an axis covers at least: below that no tick is round
)
MAX_TICKS = 6  # of an axis, at most
MAX_VALUE = 1e300  # largest value on an axis: differences of larger ones overflow


@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]
    has_dots: bool = False  # marks, joined by a thin line: measured now and then


@dataclass(frozen=True)
class Figure:
    """Line chart over the steps of a run."""

    title: str
    series: Sequence[Series]


def draw_line_chart(series: Sequence[Series], x_label: str, y_from_zero: bool = True) -> str:
    """Return a line chart with a legend; without points, a note."""
    points = [point for s in series for point in s.points if math.isfinite(point[1])]
    if not points:
        return '<p class="none">nothing was measured</p>'
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x_ticks = compute_ticks(min(xs), max(xs))
    y_ticks = compute_ticks(min(0.0, *ys) if y_from_zero else min(ys), max(ys))
    plot = Plot((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    parts = [plot.draw_grid(x_ticks, y_ticks, x_label)]
    for index, s in enumerate(series):
        parts.append(plot.draw_series(s, f"var(--s{choose_index(index)})"))
    keys = [(s.label, f"var(--s{choose_index(i)})") for i, s in enumerate(series)]
    return wrap_svg(HEIGHT, parts, "chart") + draw_legend(keys)


def choose_index(index: int) -> int:
    """Return the number of a series' colour; colours repeat where a chart has many series."""
    return index % len(COLORS)


def compute_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`."""
    low, high = max(-MAX_VALUE, min(low, MAX_VALUE)), max(-MAX_VALUE, min(high, MAX_VALUE))
    if high - low < max(abs(low) * MIN_SPAN_SHARE, abs(high) * MIN_SPAN_SHARE, sys.float_info.min):
        high = low + (abs(low) if abs(low) > sys.float_info.min else 1.0)
    raw = (high - low) / MAX_TICKS
    magnitude: float = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


class Plot:
    """Mapping of values to pixels."""

    def __init__(
        self, xs: tuple[float, float], ys: tuple[float, float], height: int = HEIGHT
    ) -> None:
        self.xs, self.ys, self.height = xs, ys, height

    def to_x_pixel(self, value: float) -> float:
        low, high = self.xs
        return LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def to_y_pixel(self, value: float) -> float:
        low, high = self.ys
        room = self.height - TOP - BOTTOM
        return self.height - BOTTOM - (value - low) / ((high - low) or 1.0) * room

    def draw_grid(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> str:
        base = self.height - BOTTOM
        parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>']
        for tick in y_ticks:
            y = self.to_y_pixel(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:.4g}</text>')
        for tick in x_ticks:
            x = self.to_x_pixel(tick)
            parts.append(f'<text x="{x}" y="{base + 16}" text-anchor="middle">{tick:.4g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{base + 31}" text-anchor="middle">{x_label}</text>')
        return "".join(parts)

    def draw_series(self, series: Series, color: str) -> str:
        measured = [point for point in series.points if math.isfinite(point[1])]
        if not measured:
            return ""
        places = [(self.to_x_pixel(x), self.to_y_pixel(y)) for x, y in measured]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        steps = " ".join(f"{x:.10g}" for x, _ in measured)
        values = " ".join(f"{y:.4g}" for _, y in measured)
        kind = ' class="sparse"' if series.has_dots else ""
        line = (
            f'<polyline points="{path}" style="stroke:{color}" data-x="{steps}" data-y="{values}" '
            f'data-name="{escape(series.label)}"{kind}/>'
        )
        if not series.has_dots and len(measured) > 1:
            return line
        dots = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{color}">'
            f"<title>{at:g}: {value:.3f}</title></circle>"
            for (x, y), (at, value) in zip(places, measured, strict=True)
        )
        return line + "".join(dots)


def wrap_svg(height: int, parts: Sequence[str], kind: str = "") -> str:
    """Return a drawing of the common width."""
    name = f' class="{kind}"' if kind else ""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img"{name}>{"".join(parts)}</svg>'


def draw_legend(items: Sequence[tuple[str, str]]) -> str:
    """Return the legend of the colours."""
    keys = (f'<span><i style="background:{c}"></i>{escape(label)}</span>' for label, c in items)
    return f'<p class="legend">{"".join(keys)}</p>'
