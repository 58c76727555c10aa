"""Redis' word on where the runs of a mesh are at home; see `meshrl.common.base.files.home`."""

from __future__ import annotations

import json
from dataclasses import asdict

from meshrl.common.base.files.home import Home
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import MESH

HOME = f"{MESH}:home"


async def tell(state: State, home: Home) -> None:
    """Says where home is, in place of what was said before."""
    await state.command("SET", HOME, json.dumps(asdict(home)))


async def told(state: State) -> Home | None:
    """Where it is; None: nobody has said so."""
    found = await state.command("GET", HOME)
    return Home(**json.loads(found)) if found else None
