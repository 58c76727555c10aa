"""PNG files of a report's figures, by matplotlib, which is imported here alone."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from meshrl.common.base.errors import NotFound
from meshrl.view.history.worker_timeline import WorkerTimeline
from meshrl.view.report import timeline
from meshrl.view.report.charts import COLORS, Figure, choose_index

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

FIGURE_INCHES = 7.2, 3.6
DPI = 150
ROW_INCHES = 0.4  # of a worker in the timeline


def require_matplotlib() -> None:
    """Raise NotFound, with the command that installs it, when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NotFound(
            "PNG files require matplotlib, which is not installed",
            fix=f"Run `{sys.executable} -m pip install 'meshrl[plots]'`",
        )


def write_line_chart(figure: Figure, directory: Path, x_label: str = "step") -> Path | None:
    """Write one line chart; return None where nothing was measured."""
    measured = {s.label: [p for p in s.points if math.isfinite(p[1])] for s in figure.series}
    if not any(measured.values()):
        return None
    canvas, axes = _make_canvas(figure.title, FIGURE_INCHES[1])
    for index, series in enumerate(figure.series):
        points = measured[series.label]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        style = {"marker": "o", "linewidth": 1.0} if series.has_dots else {"linewidth": 2.0}
        axes.plot(xs, ys, color=COLORS[choose_index(index)], label=series.label, **style)
    low, _ = axes.get_ylim()
    axes.set_ylim(bottom=min(0.0, low))
    axes.grid(color="#e4e4e4")
    axes.set_xlabel(x_label)
    axes.legend(frameon=False, fontsize=8)
    return _save(canvas, figure.title, directory)


def write_timeline(title: str, worker_timeline: WorkerTimeline, directory: Path) -> Path | None:
    """Write the timeline of a run; return None where no roles were recorded."""
    rows, end = worker_timeline.list_workers, worker_timeline.end_s
    if not rows:
        return None
    canvas, axes = _make_canvas(title, 1.4 + ROW_INCHES * len(rows))
    for y, row in enumerate(rows):
        for lane, lanes, span in timeline.assign_lanes(worker_timeline.spans, row):
            at = y - 0.4 + 0.8 * lane / lanes, 0.8 / lanes
            color = timeline.COLORS.get(span.role, timeline.OTHER_COLOR)
            alpha = 1.0 if span.state == "ready" else timeline.PALE_OPACITY
            width = max(0.0, min(span.end_s, end) - span.start_s)
            label = span.role if span.state == "ready" else None
            axes.broken_barh([(span.start_s, width)], at, color=color, alpha=alpha, label=label)
        at_s = [
            mark.at_s for mark in worker_timeline.moves if not mark.workers or row in mark.workers
        ]
        axes.plot(at_s, [y] * len(at_s), "^", color="#222222", label="a move" if at_s else None)
    for fault in worker_timeline.faults:
        axes.axvline(fault.at_s, color="#cc0000", linestyle=":")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0.0, end or 1.0)
    axes.set_xlabel("seconds")
    handles, labels = axes.get_legend_handles_labels()
    every = dict(zip(labels, handles, strict=True))
    axes.legend(every.values(), every, frameon=False, fontsize=8, loc="upper left", ncols=4)
    return _save(canvas, title, directory)


def _make_canvas(title: str, inches: float) -> tuple[Canvas, Axes]:
    """Return a canvas without any window: it can draw PNG files alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(FIGURE_INCHES[0], inches), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    axes.set_title(title, fontsize=11)
    return canvas, axes


def _save(canvas: Canvas, title: str, directory: Path) -> Path:
    path = directory / f"{make_file_name(title)}.png"
    canvas.savefig(path, dpi=DPI)
    return path


def make_file_name(title: str) -> str:
    """Return a title as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
