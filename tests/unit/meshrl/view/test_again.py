"""A run's report and its figures come from its record alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.base.files.lines import line
from meshrl.common.job.config import JobConfig
from meshrl.directory.places import write_json
from meshrl.view.recording.recorded import read_events
from meshrl.view.report import again
from tests.unit.meshrl.view.test_report import EVENTS, ROWS, summary


def recorded(run_dir: Path, over: bool = True) -> None:
    document = JobConfig(name="tiny").document()
    write_json(run_dir / "job.json", {"job": "tiny", "document": document})
    written(run_dir / "events.jsonl", [asdict(event) for event in EVENTS])
    written(run_dir / "metrics.jsonl", ROWS)
    if over:
        write_json(run_dir / "summary.json", summary())


def written(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_bytes(b"".join(line(row, n) for n, row in enumerate(rows)))


def test_the_report_of_a_run_that_is_over_is_drawn_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path)
    again.show(tmp_path, None)
    page = (tmp_path / "report.html").read_text()
    assert "<title>tiny, seed 3</title>" in page and "training on w1, asleep in memory" in page
    assert "report.html" in capsys.readouterr().out


def test_the_page_of_a_run_that_goes_on_is_left_to_who_records_it(tmp_path: Path) -> None:
    recorded(tmp_path, over=False)
    with pytest.raises(NotFound, match=r"is not over.*summary\.json"):
        again.show(tmp_path, None)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.deep
def test_each_figure_of_the_page_that_shows_something_is_a_file_also_while_it_goes_on(
    tmp_path: Path,
) -> None:
    recorded(tmp_path, over=False)
    assert read_events(tmp_path)
    written_files = again.draw(tmp_path, tmp_path / "new" / "figures")
    names = {path.name for path in written_files}
    assert {p.name for p in (tmp_path / "new" / "figures").iterdir()} == names
    assert {"learning.png", "seconds-a-step.png", "which-worker-did-what-when.png"} <= names
    assert "evaluation.png" not in names  # no dataset beside the held-out set
