"""The figures of a report as PNG files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.view.history.gangs import Span, TimelineMark, WorkerTimeline
from meshrl.view.report import png
from meshrl.view.report.charts import Figure, Series
from tests.load import scaled

PNG = b"\x89PNG\r\n\x1a\n"


def test_each_figure_that_has_points_is_a_file_called_by_its_title(tmp_path: Path) -> None:
    points = [(1.0, 0.5), (2.0, float("nan")), (3.0, 0.7)]
    figure = Figure("KL divergence, nats", [Series("a", points), Series("b", points, dots=True)])
    path = png.lines(figure, tmp_path)
    assert path == tmp_path / "kl-divergence-nats.png"
    assert path.read_bytes().startswith(PNG)
    assert png.lines(Figure("Nothing", [Series("a", [])]), tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["kl-divergence-nats.png"]


def test_the_timeline_of_workers_is_one_too(tmp_path: Path) -> None:
    spans = [
        Span("w0 w1", "training", "ready", 0.0, 9.0),
        Span("w1", "rollout", "leaving", 2.0, 12.0),
    ]
    marks = [TimelineMark(2.0, "moved", ("w1",)), TimelineMark(3.0, "declined")]
    found = WorkerTimeline(spans, marks, [TimelineMark(1.0, "it ended")], 9.0)
    path = png.workers("Workers", found, tmp_path)
    assert path is not None and path.read_bytes().startswith(PNG)
    assert png.workers("Workers", WorkerTimeline([], [], [], 9.0), tmp_path) is None


def test_without_matplotlib_it_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    png.needed()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFound) as refused:
        png.needed()
    assert "pip install 'meshrl[plots]'" in refused.value.fix


def test_a_report_is_drawn_without_matplotlib() -> None:
    asked = "import sys; import meshrl.view.report.report, meshrl.view.report.again; "
    asked += "sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], timeout=scaled(60)).returncode == 0
