"""Small valid job for tests to break, and the errors of its checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.job.job_file import Check, JobFile
from tests.unit.meshrl.job.conftest import SMALL, JobVariant


@pytest.fixture
def place(small: JobVariant) -> Path:
    """Return the path of the job file of `small`."""
    return small.path


def read(place: Path, *overrides: str) -> JobFile:
    return JobVariant(place, SMALL).read(*overrides)


def get_error(check: Check, place: Path, *overrides: str) -> str:
    """Return the error of a check of the job."""
    return JobVariant(place, SMALL).get_error(*overrides, check=check)
