"""Versions in bad weather."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fork_server import TestForkServer
from tests.mesh.weights.weather import Weather, weather


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Start one fork server for all tests, where the run has none."""
    nursery = TestForkServer()
    nursery.start()
    yield
    nursery.close()


@pytest.fixture
async def made() -> AsyncIterator[Weather]:
    async with weather(Weather) as found:
        yield found
