"""A small job that could start, for tests to break, and what is said of it then."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.job.job_file import Check, JobFile
from tests.unit.meshrl.job.conftest import SMALL, Given


@pytest.fixture
def place(small: Given) -> Path:
    """The job file of `small`."""
    return small.path


def read(place: Path, *overrides: str) -> JobFile:
    return Given(place, SMALL).read(*overrides)


def refusal(check: Check, place: Path, *overrides: str) -> str:
    """What a check says of the job."""
    return Given(place, SMALL).refusal(*overrides, check=check)
