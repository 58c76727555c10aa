"""A launcher of jails for a test, in the best tier that this host has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.process.host import SystemHost
from services.sandbox.isolation import cgroups
from services.sandbox.isolation.jail_launcher import Interpreter, Launcher


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[Launcher]:
    host, clock, log = SystemHost(), SystemClock(), tmp_path / "jails.log"
    made = Launcher(host, clock, "bwrap", Interpreter.own(), cgroups.find(), log)
    await made.start()
    yield made
    await made.stop()
