"""Pours malformed frames into ports, from wherever it runs: a `Pour` as JSON on standard input,
what came of it on standard output.

A frame is what one connection sends: whoever sends such a thing is hung up on. Most connections say
that no more will come, and last until the other end has read that and hung up, too; some are reset
in the middle; some stay until others need their place, having sent nothing or half of something
(half open), or a byte now and then (slow loris).
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random

from loadtests.hosts.flood.malformed import KINDS

AT_ONCE, AT_ONCE_EACH = 512, 24  # connections that wait for the other end: in all, at a port
WAIT_S = 5.0  # for the other end to hang up
RESET_S = 0.05  # after which those that are to be reset are
TURN_S = 0.05
CONNECT_S = 15.0  # until a connection that is not taken is given up: the kernel asks four times
HELD = 64  # connections to each port that stay open
HELD_SHARE = 0.02  # of all
RESET_SHARE = 0.1
DRIP_S = 0.5  # between two bytes of a slow one
RESET = struct.pack("ii", 1, 0)  # a close that leaves nothing: ports are used again at once


@dataclass(frozen=True)
class Pour:
    """Where to, how many, and from which seed."""

    ports: list[tuple[str, int]]
    frames: int
    seed: int = 0
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    most_s: float = 600.0


@dataclass
class Poured:
    """What came of it. `hung_up`: by both ends; `answered`: the other sent something first."""

    frames: int = 0
    seconds: float = 0.0
    hung_up: int = 0
    answered: int = 0
    unconnected: int = 0
    reset: int = 0
    unheard: int = 0  # by the other end, which did not hang up in time
    held: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


@dataclass
class _Line:
    socket: socket.socket
    place: tuple[str, int]
    content: bytes
    until: float
    keep: bool = False  # open, with half of it
    reset: bool = False
    sent: bool = False
    answered: bool = False


_End = Callable[[_Line], None]


class _Held:
    """Open connections to one port that are not in a hurry."""

    def __init__(self) -> None:
        self._lines: list[socket.socket] = []
        self._dripped = 0.0

    def add(self, line: socket.socket) -> None:
        self._lines.append(line)
        if len(self._lines) > HELD:
            self._lines.pop(0).close()

    def drip(self, now: float) -> None:
        """A byte more on every other."""
        if now - self._dripped > DRIP_S:
            self._dripped = now
            for line in self._lines[::2]:
                with suppress(OSError):
                    line.send(b"\0")

    def close(self) -> None:
        for line in self._lines:
            line.close()


def poured(pour: Pour) -> Poured:
    """Pours all, and closes everything. ValueError without ports."""
    if not pour.ports:
        raise ValueError("there is no port to pour into")
    random, counts, began = Random(pour.seed), Counter[str](), time.monotonic()
    found, kinds = Poured(), [(name, KINDS[name]) for name in pour.kinds]
    held = {tuple(place): _Held() for place in pour.ports}
    selector = selectors.DefaultSelector()
    lines: dict[int, _Line] = {}

    def end(line: _Line) -> None:
        selector.unregister(line.socket)
        del lines[line.socket.fileno()]
        found.unconnected += not line.sent
        if line.sent and line.keep:
            found.held += 1
            held[line.place].add(line.socket)
        else:
            line.socket.close()

    number, at_once = 0, min(AT_ONCE, AT_ONCE_EACH * len(pour.ports))
    while (number < pour.frames and time.monotonic() - began < pour.most_s) or lines:
        now = time.monotonic()
        while len(lines) < at_once and number < pour.frames and now - began < pour.most_s:
            name, make = kinds[number % len(kinds)]
            host, port = pour.ports[random.randrange(len(pour.ports))]
            number += 1
            counts[name] += 1
            lot = random.random()
            keep, reset = lot < HELD_SHARE, lot > 1 - RESET_SHARE
            content = make(random)
            half = content[: random.randint(0, len(content))] if keep else content
            line = _Line(_connecting(host, port), (host, port), half, now + CONNECT_S, keep, reset)
            lines[line.socket.fileno()] = line
            selector.register(line.socket, selectors.EVENT_WRITE)
        for key, ready in selector.select(TURN_S):
            line = lines[key.fd]
            if ready & selectors.EVENT_WRITE:
                _write(line, selector, found, end)
            else:
                _read(line, found, end)
        now = time.monotonic()
        for line in [line for line in lines.values() if line.until < now]:
            found.reset += line.sent and line.reset
            found.unheard += line.sent and not line.reset
            end(line)
        for one in held.values():
            one.drip(now)
    for one in held.values():
        one.close()
    found.frames, found.seconds = number, round(time.monotonic() - began, 2)
    found.by_kind = dict(counts)
    return found


def _connecting(host: str, port: int) -> socket.socket:
    found = socket.socket()
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with suppress(BlockingIOError):
        found.connect((host, port))
    return found


def _write(line: _Line, selector: selectors.BaseSelector, found: Poured, end: _End) -> None:
    try:
        if line.content:
            line.socket.send(line.content)
        line.sent = True
        if line.keep:
            end(line)
            return
        if not line.reset:
            line.socket.shutdown(socket.SHUT_WR)
        line.until = time.monotonic() + (RESET_S if line.reset else WAIT_S)
        selector.modify(line.socket, selectors.EVENT_READ)
    except BlockingIOError:
        pass
    except ConnectionRefusedError:
        end(line)
    except OSError:  # it was hung up on before it could say a word
        line.sent = True
        found.hung_up += 1
        end(line)


def _read(line: _Line, found: Poured, end: _End) -> None:
    try:
        more = line.socket.recv(1 << 16)
    except OSError:
        more = b""
    if more:
        found.answered += not line.answered
        line.answered = True
        return
    found.hung_up += not line.reset
    found.reset += line.reset
    end(line)


def main() -> None:
    document = json.load(sys.stdin)
    ports = [(host, port) for host, port in document.pop("ports")]
    json.dump(asdict(poured(Pour(ports, **document))), sys.stdout)


if __name__ == "__main__":
    main()
