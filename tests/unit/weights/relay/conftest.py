"""Fixture of hosts that close when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.unit.weights.relay.hosts import Hosts


@pytest.fixture
async def hosts(tmp_path: Path) -> AsyncIterator[Hosts]:
    state = open_simulated_state(SystemClock())
    created = Hosts(tmp_path, state)
    await created.start_store()
    yield created
    await created.leave()
    await state.close()
