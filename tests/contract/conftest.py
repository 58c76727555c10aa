"""Real servers that the simulated ones are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.contract.state.state_bench import Server, binary_of, running_server


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], Server]]:
    """Start one server per backend and session (per pytest worker) at its first use."""
    with ExitStack() as stack:
        started: dict[str, Server] = {}

        def server(backend: str) -> Server:
            if backend not in started:
                started[backend] = stack.enter_context(running_server(binary_of(backend)))
            return started[backend]

        yield server
