"""Lines of a log as JSON objects: those that are none are wrapped, and what belongs together, as a
traceback, becomes one. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

DEEP = 100  # brackets of a line: more may nest deeper than can be written
LONGEST = 1 << 16  # characters of one object's text: what is longer goes on in the next
BEGINS = "Traceback (most recent call last):"
# Redis: `812:M 23 Nov 2026 14:17:14.123 # text`; its marks are debug, verbose, notice, warning.
REDIS = re.compile(r"\d+:[A-Z] \d+ \w+ \d{4} [\d:.]+ ([-.*#]) ")
REDIS_LEVELS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
SAID = re.compile(r"(error|warning|critical|fatal)\b", re.IGNORECASE)


class LogObjects:
    """One log, line by line. What it has taken and not given may go on: see `rest`."""

    def __init__(self, service: str) -> None:
        """`service`: what the file says, until a line says it itself, and the job too."""
        self._whose = {"service": service}
        self._held: list[str] = []  # lines of one object that may not be whole
        self._length = 0
        self._traceback = False

    def take(self, line: str, timestamp: str) -> Iterator[str]:
        """The objects that are whole now. `timestamp`: for a line without one, in ISO 8601."""
        if (found := _object(line)) is not None:
            yield from self.rest(timestamp)
            said = {key: str(found[key]) for key in ("service", "job") if found.get(key)}
            self._whose = said if "service" in said else self._whose
            yield self._json(found, timestamp)
            return
        indented = line[:1] in (" ", "\t")
        if self._held and not indented and not self._traceback:
            yield from self.rest(timestamp)
        if not (line.strip() or self._held):
            return
        self._held.append(line)
        self._length += len(line)
        if line.endswith(BEGINS):  # perhaps after what somebody left unfinished
            self._traceback = True
        elif (self._traceback and not indented) or self._length > LONGEST:
            yield from self.rest(timestamp)

    def rest(self, timestamp: str) -> Iterator[str]:
        """What is held, as nothing more came that belongs to it."""
        held, self._held, self._length = self._held, [], 0
        traceback, self._traceback = self._traceback, False
        if held:
            level = "error" if traceback else _level(held[0])
            yield self._json({"event": "\n".join(held), "level": level}, timestamp)

    def _json(self, found: dict[str, Any], timestamp: str) -> str:
        whole = {"event": "", "level": "info", "timestamp": timestamp}
        return json.dumps(self._whose | whole | found)


def _object(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
        if line.count("[") + line.count("{") > DEEP:
            json.dumps(found)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _level(text: str) -> str:
    if redis := REDIS.match(text):
        return REDIS_LEVELS[redis[1]]
    said = SAID.match(text)
    return "info" if said is None else "warning" if said[1].lower() == "warning" else "error"
