"""Hosts for tests: namespaces of this machine, connected only by a network."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadtests.namespaces.host import Host

PORT = 7000
MARKS = [pytest.mark.needs(name) for name in ("root", "netns", "iptables")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, because each makes hosts."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in MARKS:
                item.add_marker(mark)


@contextlib.asynccontextmanager
async def run_probe_server(host: Host) -> AsyncIterator[None]:
    """Run `tests.hosts.probe` as a server on a host and yield once it listens."""
    words = ("python", "-m", "tests.hosts.probe", "serve", str(PORT))
    async with host.started(*words, pipes=True) as server:
        assert server.stdout and await server.stdout.readline() == b"ready\n"
        yield


async def probe(asking: Host, what: str, asked: Host, count: int) -> list[float]:
    """Return the results of `tests.hosts.probe` from one host to another."""
    words = ("tests.hosts.probe", what, asked.address, str(PORT), str(count))
    return [json.loads(line) for line in (await asking.run("python", "-m", *words)).out.split()]
