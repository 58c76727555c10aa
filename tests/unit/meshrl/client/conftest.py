"""A mesh whose Redis is real, as in the tests of runs, and a whole job."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.job_template.job_creation import create_job
from tests.unit.meshrl.run.conftest import held

__all__ = ["held"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The job file that `meshrl init` writes."""
    create_job(tmp_path / "game")
    return tmp_path / "game/job.toml"
