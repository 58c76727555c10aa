"""Fixtures of weight transfer tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fork_server import TestForkServer
from tests.mesh.weights.transfer_bench import TransferBench, open_bench


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Start one fork server for all tests, where the run has none."""
    server = TestForkServer()
    server.start()
    yield
    server.close()


@pytest.fixture
async def bench() -> AsyncIterator[TransferBench]:
    async with open_bench(TransferBench) as found:
        yield found
