"""Real meshes for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.running import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run of the job of digits: `run(budget__steps=2)`."""
    started: list[Run] = []

    def start(**settings: Any) -> Run:
        started.append(Run(tmp_path, **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()
