"""A launcher of jails for a test, in the best tier that this host has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.resources import cgroups
from tests.unit.sandbox.launching import launching


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    async with launching(tmp_path / "jails.log", homes=cgroups.find_parents()) as made:
        await made.start()
        yield made
