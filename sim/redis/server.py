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

SOURCES = Path(__file__).parent / "lua"
MICROSECONDS = 1_000_000
PARTS = (
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
CODES: dict[str, type[ResponseError]] = {
    "ERR": ResponseError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
}


class Full(StrEnum):
    """Why writes are refused; reads go on."""

    NO = ""
    MEMORY = "OOM"
    DISK = "MISCONF"


@dataclass
class RedisFaults:
    """Set any of them at any time; what is set holds from the next command on. A client meets them
    as the real one does: it sends again a few times, and raises what it met last.
    """

    away: bool = False  # no connection; nothing runs
    lost_replies: int = 0  # so many commands to come run, and their clients are not answered
    delay_s: float = 0.0  # from a command, which runs at once, to its reply
    full: Full = Full.NO

    @property
    def on_the_way(self) -> bool:
        """Whether commands or replies may be lost or late."""
        return self.away or self.lost_replies > 0 or self.delay_s > 0


class WallClock(Protocol):
    def wall(self) -> float: ...
    def monotonic(self) -> float: ...


class NotSimulated(NotImplementedError):
    """A command, or a form of it, that State and its scripts did not use when this was written."""


class RedisServer:
    """An empty server that lives by `clock`, and its faults."""

    def __init__(self, clock: WallClock) -> None:
        self.faults = RedisFaults()
        self._clock = clock
        self._execute, self._copied = _new_server()()

    def run(self, words: tuple[Any, ...]) -> Any:
        """The reply to a command whose words are strings, decoded as by a client that decodes."""
        now = int(self._clock.wall() * MICROSECONDS)
        reply = self._execute(now, self.faults.full, *words)
        if type(reply) is str or type(reply) is int:
            return reply
        if type(reply) is tuple:
            _, error, *missing = reply
            if error is None:
                what = missing[0] if missing else ""
                raise NotSimulated(f"the simulated Redis has no {what}: add it to {SOURCES.name}/")
            raise typed(error)
        return _list(reply) if lua_type(reply) == "table" else reply or None

    def lose(self) -> None:
        """Loses all it has, scripts too, as one that started again without its disk."""
        self._execute, self._copied = _new_server()()

    def copy(self) -> Any:
        """What it holds now, for one `restart`."""
        return self._copied()

    def restart(self, held: Any) -> None:
        """Starts again with what it held at a `copy`; scripts are gone."""
        self._execute, self._copied = _new_server()(held)


def typed(error: str) -> ResponseError:
    """The error that the real client raises for an error reply."""
    code, _, text = error.partition(" ")
    return CODES[code](text) if code in CODES else ResponseError(error)


def _list(table: Any) -> list[Any]:
    """A reply of several; an error in the midst of it stays in its place, as the real client's."""
    found: list[Any] = []
    for item in table.values():
        if type(item) is str or type(item) is int:
            found.append(item)
        elif item is False:
            found.append(None)
        else:
            found.append(typed(item["err"]) if item["err"] else _list(item))
    return found


def _sha1(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@cache
def _new_server() -> Callable[..., tuple[Callable[..., Any], Callable[[], Any]]]:
    """What makes a server, in the one Lua of this process."""
    lua = LuaRuntime(register_eval=False, register_builtins=False)
    parts = lua.table()
    for part in PARTS:
        source = (SOURCES / f"{part}.lua").read_text()
        made = lua.execute(source, parts, _sha1, name=f"@simulated/{part}.lua")
    found: Callable[..., tuple[Callable[..., Any], Callable[[], Any]]] = made
    return found
