"""A small job that could start, for tests to break, and what is said of it then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.base.errors import MeshError
from common.model.tokens.tokenizer import character_tokenizer
from meshrl.job import jobfile
from meshrl.job.loaded import JobFile

Check = Callable[[JobFile], None]


@pytest.fixture
def place(job: Path) -> Path:
    """The job file, whose tokenizer has the ids 0 to 11 and whose model has 16 rows."""
    character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    return job


def read(place: Path, *overrides: str) -> JobFile:
    return jobfile.read(place, ["rollout.max_tokens=64", *overrides])


def refusal(check: Check, place: Path, *overrides: str) -> str:
    """What a check says of the job."""
    found = read(place, *overrides)
    with pytest.raises(MeshError) as caught:
        check(found)
    assert "\n" not in str(caught.value) and caught.value.fix
    return str(caught.value)
