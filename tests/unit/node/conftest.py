"""One small mesh for each test of this directory, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.load import scaled
from tests.unit.node.smallmesh import SmallMesh


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, because the path of a unix socket is."""
    with tempfile.TemporaryDirectory(prefix="n") as made:
        yield Path(made)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[SmallMesh]:
    small = SmallMesh(directory)
    await small.open()
    yield small
    await small.state.close()
    for pid in small.processes():
        with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
            os.kill(pid, signal.SIGKILL)
    small.redis.kill()
    await small.redis.wait(scaled(5))
