"""Launcher of jails that the tests of a module share: each program has a jail of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources import cgroups
from tests.unit.sandbox.launching import open_launcher


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JailLauncher]:
    """Yield a launcher in the best tier of this host; its tests use `on_shared_loop`."""
    log = tmp_path_factory.mktemp("launcher") / "jails.log"
    async with open_launcher(log, homes=cgroups.find_parents()) as launcher:
        await launcher.start()
        yield launcher
