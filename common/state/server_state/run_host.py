"""Record of a mesh's run host in Redis; see `meshrl.common.base.files.run_host`."""

from __future__ import annotations

import json
from dataclasses import asdict

from meshrl.common.base.files.run_host import RunHost
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

RUN_HOST_KEY = f"{MESH_PREFIX}:run_host"


async def write_run_host(state: StateClient, run_host: RunHost) -> None:
    """Set the run host."""
    await state.run_command("SET", RUN_HOST_KEY, json.dumps(asdict(run_host)))


async def read_run_host(state: StateClient) -> RunHost | None:
    """Return the run host; None if it is not set."""
    found = await state.run_command("GET", RUN_HOST_KEY)
    return RunHost(**json.loads(found)) if found else None
