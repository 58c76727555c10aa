"""Launcher of jails for a test, in the best tier of this host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources import cgroups
from tests.unit.sandbox.launching import open_launcher


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    async with open_launcher(tmp_path / "jails.log", homes=cgroups.find_parents()) as launcher:
        await launcher.start()
        yield launcher
