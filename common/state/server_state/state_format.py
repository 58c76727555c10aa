"""Format of a mesh's state in Redis: its keys, fields and scripts.

The format rises when one of these changes its name or meaning. A state of another format is
rejected by name, because its rows would be read wrongly.
"""

from __future__ import annotations

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import redact_password
from meshrl.common.state.redis.keys import MESH_PREFIX
from meshrl.common.state.server_state.rollback import TOKEN_KEY

STATE_FORMAT = 2
FIRST_FORMAT = 1  # of a state without FORMAT_KEY
FORMAT_KEY = f"{MESH_PREFIX}:format"


async def require_state_format(state: StateClient) -> None:
    """Raise ConfigError if Redis holds a state of another format. An empty Redis is accepted."""
    found = await state.run_command("GET", FORMAT_KEY)
    if found is None and not await state.run_command("EXISTS", TOKEN_KEY):
        return
    number = FIRST_FORMAT if found is None else int(found)
    if number == STATE_FORMAT:
        return
    raise ConfigError(
        f"this Redis contains the state of another version of MeshRL: its format is {number}, but "
        f"this version reads format {STATE_FORMAT}",
        where=redact_password(state.url),
        fix="Start the version that wrote the state to finish its jobs or to export their "
        "weights. Or start this version in another directory with an empty Redis",
    )


async def write_state_format(state: StateClient) -> None:
    """Record the format of the state that this version writes."""
    await state.run_command("SET", FORMAT_KEY, STATE_FORMAT)
