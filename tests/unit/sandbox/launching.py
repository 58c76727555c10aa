"""Launchers of jails on this host."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources.cgroups import Homes


@contextlib.asynccontextmanager
async def launching(
    log: Path | None = None,
    *,
    tier: str = "bwrap",
    interpreter: Interpreter | None = None,
    homes: Homes | None = None,
) -> AsyncIterator[JailLauncher]:
    """One that is stopped in the end."""
    own = interpreter or Interpreter.own()
    made = JailLauncher(SystemHost(), SystemClock(), tier, own, homes, log)
    try:
        yield made
    finally:
        await made.stop()
