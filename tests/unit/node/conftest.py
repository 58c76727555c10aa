"""Fixture of one small mesh for each test, which leaves nothing behind."""

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
    """Make a short directory, because the path of a Unix socket is limited."""
    with tempfile.TemporaryDirectory(prefix="n") as made:
        yield Path(made)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[SmallMesh]:
    small = SmallMesh(directory)
    await small.open()
    yield small
    await small.state.close()
    for pid in small.processes():
        with contextlib.suppress(ProcessLookupError):  # it has exited since it was listed
            os.kill(pid, signal.SIGKILL)
    small.redis.kill()
    await small.redis.wait(scaled(5))
