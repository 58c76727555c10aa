"""Fixtures of the client's tests: a mesh with a real Redis and a complete job."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.job_template.job_creation import create_job
from tests.unit.meshrl.runs.conftest import held_mesh

__all__ = ["held_mesh"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write the job file of `meshrl init`."""
    create_job(tmp_path / "game")
    return tmp_path / "game/job.toml"
