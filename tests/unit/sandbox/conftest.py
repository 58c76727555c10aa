"""A launcher of jails for a test, in the best tier that this host has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.base.clock import SystemClock
from common.mesh.process.host import SystemHost
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.outer_jail.interpreters import Interpreter
from services.sandbox.isolation.resources import cgroups


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    host, clock, log = SystemHost(), SystemClock(), tmp_path / "jails.log"
    made = JailLauncher(host, clock, "bwrap", Interpreter.own(), cgroups.find(), log)
    await made.start()
    yield made
    await made.stop()
