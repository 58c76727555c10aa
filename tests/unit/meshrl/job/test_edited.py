"""A job file that was edited after its run began is noticed when the run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.common.job.config import JobConfig
from meshrl.job.edited import notice, remembered

TEXT = '[model]\npath = "here"\n\n[budget]\nsteps = 48\n\n[optimizer]\nadamw_lr = 0.001\n'
DOCUMENT = JobConfig().document()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(TEXT)
    return path


def test_a_file_that_is_as_it_was_or_gone_is_nothing_to_tell(file: Path) -> None:
    kept = remembered(file)
    assert notice(kept, DOCUMENT, "runs/job") == []
    file.unlink()
    assert notice(kept, DOCUMENT, "runs/job") == []


def test_keys_that_differ_are_told_with_how_to_apply_those_that_may_change(file: Path) -> None:
    kept = remembered(file)
    file.write_text(TEXT.replace("48", "96").replace("here", "there") + "clip_norm = 0.5\n")
    told = "\n".join(notice(kept, DOCUMENT, "runs/job"))
    assert "budget.steps: 48 here, 96 in the file" in told
    assert "optimizer.clip_norm: 1.0 here, 0.5 in the file" in told
    assert "model.path" in told and "may not change: the weights" in told
    assert told.endswith(
        "meshrl resume runs/job --set budget.steps=96 --set optimizer.clip_norm=0.5"
    )


def test_an_edit_that_says_what_the_run_does_by_now_is_nothing_to_tell(file: Path) -> None:
    kept = remembered(file)
    file.write_text("# a comment\n" + TEXT)
    assert notice(kept, DOCUMENT, "runs/job") == []
    file.write_text(TEXT.replace("48", "96"))
    extended = DOCUMENT | {"budget": {"steps": 96}}
    assert notice(kept, extended, "runs/job") == []


def test_a_file_that_is_no_job_file_any_more_stops_nothing(file: Path) -> None:
    kept = remembered(file)
    file.write_text("[budget\n")
    assert "no TOML now" in notice(kept, DOCUMENT, "runs/job")[0]
    file.write_text(TEXT + "\n[unheard]\nof = 1\n")
    assert "unheard.of" in notice(kept, DOCUMENT, "runs/job")[1]
