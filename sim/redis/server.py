"""The server: keys and scripts in one Lua 5.1, which is what Redis has; no command is encoded.

Keys live in Lua, so that a script reaches them without leaving it. All servers of a process share
one Lua and its compiled scripts; their keys are their own. Lua locks itself for as long as a
command takes: threads may call. LuaJIT 2.0 runs Lua 5.1 in half the time, where there is one for
the processor. In both, strings hash without a seed, so that a run is the same every time.
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
# Errors that the real client has a class for; it leaves the code out of their text.
ERROR_CLASSES: dict[str, type[ResponseError]] = {
    "ERR": ResponseError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
}


class FullResource(StrEnum):
    """Why writes are refused; reads go on."""

    NO = ""
    MEMORY = "OOM"
    DISK = "MISCONF"


@dataclass
class RedisFaults:
    """Set any of them at any time; what is set holds from the next command on. A client meets them
    as the real one does: it sends again a few times, and raises what it met last.
    """

    is_unreachable: bool = False  # no connection; nothing runs
    lost_replies: int = 0  # so many commands to come run, and their clients are not answered
    delay_s: float = 0.0  # from a command, which runs at once, to its reply
    full_resource: FullResource = FullResource.NO

    @property
    def affects_delivery(self) -> bool:
        """Whether commands or replies may be lost or late."""
        return self.is_unreachable or self.lost_replies > 0 or self.delay_s > 0


class WallClock(Protocol):
    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class NotSimulated(NotImplementedError):
    """A command, or a form of it, that State and its scripts did not use when this was written."""


class SimulatedRedisServer:
    """An empty server that lives by `clock`, and its faults."""

    def __init__(self, clock: WallClock) -> None:
        self.faults = RedisFaults()
        self._clock = clock
        self._execute, self._copy_state = _load_server_factory()()

    def execute(self, words: tuple[Any, ...]) -> Any:
        """The reply to a command whose words are strings, decoded as by a client that decodes."""
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
        """Loses all it has, scripts too, as one that started again without its disk."""
        self._execute, self._copy_state = _load_server_factory()()

    def copy_state(self) -> Any:
        """What it holds now, for one `restart`."""
        return self._copy_state()

    def restore_state(self, saved_state: Any) -> None:
        """Starts again with what it held at a `copy`; scripts are gone."""
        self._execute, self._copy_state = _load_server_factory()(saved_state)


def make_error(error: str) -> ResponseError:
    """The error that the real client raises for an error reply."""
    code, _, text = error.partition(" ")
    return ERROR_CLASSES[code](text) if code in ERROR_CLASSES else ResponseError(error)


def _convert_list(table: Any) -> list[Any]:
    """A reply of several; an error in the midst of it stays in its place, as the real client's."""
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
    """What makes a server, in the one Lua of this process."""
    lua = LuaRuntime(register_eval=False, register_builtins=False)
    parts = lua.table()
    for part in LUA_MODULES:
        source = (LUA_DIR / f"{part}.lua").read_text()
        made = lua.execute(source, parts, _compute_sha1, name=f"@simulated/{part}.lua")
    found: Callable[..., tuple[Callable[..., Any], Callable[[], Any]]] = made
    return found
