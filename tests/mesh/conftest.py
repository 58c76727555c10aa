"""Real meshes for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.head.launcher import Launcher
from meshrl.launch.head.mesh_shape import MeshShape
from tests.mesh.running import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run of the job of digits: `run(budget__steps=2)`."""
    started: list[Run] = []

    def start(**settings: Any) -> Run:
        started.append(Run(tmp_path, **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
async def mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Launcher]:
    """Start a mesh of this process with the module's `HEAD`, or without workers."""
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    head = getattr(request.module, "HEAD", (MeshShape(workers=0),))
    launcher = Launcher(MeshPaths(tmp_path / "head"), *head)
    await launcher.start()
    yield launcher
    await launcher.stop()
