"""Server of the simulated Redis: keys and scripts in one Lua 5.1, as in Redis; commands are not
encoded.

Keys are stored in Lua, so that a script accesses them without leaving Lua. All servers of a process
share one Lua and its compiled scripts; their keys are separate. Lua holds a lock during a command,
so threads may call it. LuaJIT 2.0, if it exists for the processor, runs Lua 5.1 in half the time.
In both, strings hash without a seed, so a run is reproducible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

try:
    from lupa.luajit20 import LuaRuntime, lua_type
except ImportError:
    from lupa.lua51 import LuaRuntime, lua_type

LUA_DIR = Path(__file__).parent / "lua"
MICROSECONDS_PER_S = 1_000_000
LUA_MODULES = (
    "json",
    "keyspace",
    "strings",
    "hashes",
    "sets",
    "sortedsets",
    "streams",
    "scripts",
    "server",
)
# Errors with a class in the real client, which omits the code from their text.
ERROR_CLASSES: dict[str, type[ResponseError]] = {
    "ERR": ResponseError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
}


class FullResource(StrEnum):
    """Reason of rejected writes; reads continue."""

    NO = ""
    MEMORY = "OOM"
    DISK = "MISCONF"


@dataclass
class RedisFaults:
    """Faults of a server. They can be set at any time, and apply from the next command on. A client
    behaves as the real one: it retries a few times, and raises the last error.
    """

    is_unreachable: bool = False  # no connection; no command is executed
    lost_replies: int = 0  # number of commands that are executed without a reply
    delay_s: float = 0.0  # from a command, executed at once, to its reply
    full_resource: FullResource = FullResource.NO

    @property
    def affects_delivery(self) -> bool:
        """True if commands or replies may be lost or late."""
        return self.is_unreachable or self.lost_replies > 0 or self.delay_s > 0


class WallClock(Protocol):
    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class NotSimulated(NotImplementedError):
    """Error of a command, or a form of it, that StateClient and its scripts did not use when this
    was written.
    """


class SimulatedRedisServer:
    """Initially empty server with `clock` and faults."""

    def __init__(self, clock: WallClock) -> None:
        self.faults = RedisFaults()
        self._clock = clock
        self._execute, self._copy_state = _load_server_factory()()

    def execute(self, words: tuple[Any, ...]) -> Any:
        """Execute a command of strings; return its decoded reply."""
        now = int(self._clock.wall() * MICROSECONDS_PER_S)
        reply = self._execute(now, self.faults.full_resource, *words)
        if type(reply) is str or type(reply) is int:
            return reply
        if type(reply) is tuple:
            _, error, *missing = reply
            if error is None:
                what = missing[0] if missing else ""
                raise NotSimulated(f"the simulated Redis has no {what}: add it to {LUA_DIR.name}/")
            raise make_error(error)
        return _convert_list(reply) if lua_type(reply) == "table" else reply or None

    def lose_state(self) -> None:
        """Lose all state, with the scripts, as a restart without a disk does."""
        self._execute, self._copy_state = _load_server_factory()()

    def copy_state(self) -> Any:
        """Copy the current state for one `restore_state`."""
        return self._copy_state()

    def restore_state(self, saved_state: Any) -> None:
        """Restore a state of `copy_state`; scripts are lost."""
        self._execute, self._copy_state = _load_server_factory()(saved_state)


def make_error(error: str) -> ResponseError:
    """Make the exception of the real client for an error reply."""
    code, _, text = error.partition(" ")
    return ERROR_CLASSES[code](text) if code in ERROR_CLASSES else ResponseError(error)


def _convert_list(table: Any) -> list[Any]:
    """Convert a list reply; a nested error stays in its place, as in the real client."""
    found: list[Any] = []
    for item in table.values():
        if type(item) is str or type(item) is int:
            found.append(item)
        elif item is False:
            found.append(None)
        else:
            found.append(make_error(item["err"]) if item["err"] else _convert_list(item))
    return found


def _compute_sha1(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@cache
def _load_server_factory() -> Callable[..., tuple[Callable[..., Any], Callable[[], Any]]]:
    """Load the function that makes servers, in the one Lua of this process."""
    lua = LuaRuntime(register_eval=False, register_builtins=False)
    parts = lua.table()
    for part in LUA_MODULES:
        source = (LUA_DIR / f"{part}.lua").read_text()
        module = lua.execute(source, parts, _compute_sha1, name=f"@simulated/{part}.lua")
    found: Callable[..., tuple[Callable[..., Any], Callable[[], Any]]] = module
    return found
