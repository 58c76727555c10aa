"""Sender of malformed frames: reads a `FrameFlood` as JSON from standard input, prints the result.

A frame is the data of one connection; the receiver closes each such connection. Most connections
announce the end of their data and stay open until the peer has read that and closed, too. Some are
reset in the middle. Some stay until others need their place: they have sent nothing or half of a
frame (half open), or send a byte now and then (slow loris).
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from random import Random

from meshrl.common.weights.handshakes.handshake import MAGIC_BYTES, SUITES_BY_MAGIC, ServerHandshake

AT_ONCE, AT_ONCE_EACH = 512, 24  # connections that wait for the other end: in all, at a port
WAIT_S = 5.0  # for the other end to hang up
RESET_S = 0.05  # after which those that are to be reset are
TURN_S = 0.05
CONNECT_S = 15.0  # limit of a connection attempt: the kernel sends four SYN packets
HELD = 64  # connections to each port that stay open
HELD_SHARE = 0.02  # of all
RESET_SHARE = 0.1
DRIP_S = 0.5  # between two bytes of a slow one
RESET = struct.pack("ii", 1, 0)  # a close that leaves nothing: ports are used again at once
ZMTP = b"\xff" + bytes(8) + b"\x7f"
CURVE_HELLO = 200  # bytes of the command with its name
LARGE = 1 << 14  # bytes of what is long: more than fits a socket's buffer is not taken anyway
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


def greeting(mechanism: bytes = b"CURVE", minor: int = 1, server: bool = False) -> bytes:
    """Return the 64 bytes by which a ZeroMQ peer begins (ZMTP 3.1, RFC 37)."""
    found = ZMTP + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)
    return found[:64]


def command(body: bytes, flags: int = 4) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def curve_hello(r: Random) -> bytes:
    """Return a hello that is right in everything but the box, which is under no key of the mesh."""
    body = b"\x05HELLO\x01\0" + bytes(72) + r.randbytes(32 + 8 + 80)
    return greeting() + command(body.ljust(CURVE_HELLO, b"\0"))


def unknown_commands(r: Random) -> bytes:
    """Return unknown commands."""
    names = (b"\x04PING", b"\x05ERROR\xff", b"\x09SUBSCRIBE", b"\xff", b"")
    return greeting() + b"".join(command(r.choice(names)) for _ in range(8))


def huge_frame(r: Random) -> bytes:
    """Return a length beyond any memory, and its first bytes."""
    size = r.choice(((1 << 62), (1 << 63) - 1, (1 << 64) - 1, 1 << 40, 1 << 31, 256 << 20))
    return greeting() + bytes([r.choice((2, 3, 6))]) + struct.pack(">Q", size) + r.randbytes(64)


def bulk_hello(r: Random) -> bytes:
    """Return a hello with unknown keys and with points that no key pair has."""
    ephemeral = r.choice((r.randbytes(32), bytes(32), b"\1" + bytes(31), b"\xff" * 32))
    rest = ServerHandshake.hello_bytes - MAGIC_BYTES - len(ephemeral)
    return r.choice(list(SUITES_BY_MAGIC)) + ephemeral + r.randbytes(rest)


def bulk_requests(r: Random) -> bytes:
    """Return a hello of the bulk port, and requests behind it."""
    request = r.choice((b"G", b"P", b"H", b"R", b"\0")) + r.randbytes(15) + b"\xff" * 24
    return bulk_hello(r) + r.randbytes(32) + request * 20


def http_lengths(r: Random) -> bytes:
    """Return a request whose length is none, or in chunks that are none."""
    length = r.choice((b"-1", b"99999999999999999999", b"1e9", b"0x10", b"5, 6"))
    way = r.choice((b"Content-Length: " + length, b"Transfer-Encoding: chunked"))
    return b"POST /metrics HTTP/1.1\r\nHost: a\r\n" + way + b"\r\n\r\nffffffffffffffff\r\n"


def tls_hello(r: Random) -> bytes:
    """Return a hello of TLS, cut short or not."""
    size = r.choice((0, 1, 40, 512, 0xFFFF))
    return b"\x16\x03\x01" + struct.pack(">H", size) + b"\x01" + r.randbytes(min(size, 512))


OLD = (b"\x01\x00", b"\xff" + bytes(7) + b"\x01\x7f\x01", b"\x0f\x00junk")
MECHANISMS = (b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20)
METHODS = (b"GET", b"POST", b"\x00\x01", b"A" * 300, b"PRI * HTTP/2.0")
REDIS = (b"*1000000000", b"*-2", b"$-5", b"*1\r\n$999999999999", b"*3\r\n$3\r\nSET\r\n+a")
INLINE = (b"AUTH x y\r\n", b"HELLO 99\r\n", b"'" + b"a" * LARGE, b"\r\n" * 500)
HEADERS = b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(600))

KINDS: Mapping[str, Callable[[Random], bytes]] = {
    "nothing": lambda r: b"",
    "noise": lambda r: r.randbytes(r.randint(1, 4096)),
    "zeros": lambda r: bytes(r.randint(1, LARGE)),
    "cut_greeting": lambda r: greeting()[: r.randint(1, 63)],
    "old_greeting": lambda r: r.choice(OLD),
    "greeting_then_noise": lambda r: greeting() + r.randbytes(r.randint(1, 2048)),
    "other_mechanism": lambda r: greeting(r.choice(MECHANISMS)) + command(READY),
    "curve_hello": curve_hello,
    "cut_hello": lambda r: curve_hello(r)[: r.randint(65, 250)],
    "hello_then_initiate": lambda r: (
        curve_hello(r) + command(b"\x08INITIATE" + r.randbytes(r.randint(0, 600)))
    ),
    "unknown_commands": unknown_commands,
    "huge_frame": huge_frame,
    "many_frames": lambda r: greeting() + command(b"", 1) * 1000,
    "bulk_hello": bulk_hello,
    "cut_bulk_hello": lambda r: bulk_hello(r)[: r.randint(1, ServerHandshake.hello_bytes - 1)],
    "bulk_hello_then_requests": bulk_requests,
    "other_bulk": lambda r: (
        r.choice((b"MRB0", b"MRB1", b"MRB2", b"MRB3", b"MRB9")) + r.randbytes(128)
    ),
    "http_noise": lambda r: r.choice(METHODS) + b" " + r.randbytes(40) + b" HTTP/1.1\r\n\r\n",
    "http_long_line": lambda r: b"GET /" + b"a" * LARGE,
    "http_many_headers": lambda r: b"GET / HTTP/1.1\r\n" + HEADERS,
    "http_lengths": http_lengths,
    "tls_hello": tls_hello,
    "tls_alert_noise": lambda r: bytes([r.choice((20, 21, 23, 24)), 3, 3]) + r.randbytes(40),
    "redis_lengths": lambda r: r.choice(REDIS) + b"\r\n" + r.randbytes(16),
    "redis_inline": lambda r: r.choice(INLINE),
}


@dataclass(frozen=True)
class FrameFlood:
    ports: list[tuple[str, int]]
    frames: int
    seed: int = 0
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    most_s: float = 600.0


@dataclass
class FloodResult:
    """Result of a flood. `hung_up`: closed by both ends; `answered`: the peer sent something
    first.
    """

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


class _IdleConnections:
    """Open connections to one port that are not in a hurry."""

    def __init__(self) -> None:
        self._lines: list[socket.socket] = []
        self._dripped = 0.0

    def add(self, line: socket.socket) -> None:
        self._lines.append(line)
        if len(self._lines) > HELD:
            self._lines.pop(0).close()

    def drip(self, now: float) -> None:
        """Send one more byte on every second connection."""
        if now - self._dripped > DRIP_S:
            self._dripped = now
            for line in self._lines[::2]:
                with suppress(OSError):
                    line.send(b"\0")

    def close(self) -> None:
        for line in self._lines:
            line.close()


def send_flood(flood: FrameFlood) -> FloodResult:
    if not flood.ports:
        raise ValueError("there is no port to flood into")
    random, counts, started_s = Random(flood.seed), Counter[str](), time.monotonic()
    found, kinds = FloodResult(), [(name, KINDS[name]) for name in flood.kinds]
    held = {tuple(place): _IdleConnections() for place in flood.ports}
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

    number, at_once = 0, min(AT_ONCE, AT_ONCE_EACH * len(flood.ports))
    while (number < flood.frames and time.monotonic() - started_s < flood.most_s) or lines:
        now = time.monotonic()
        while len(lines) < at_once and number < flood.frames and now - started_s < flood.most_s:
            name, make = kinds[number % len(kinds)]
            host, port = flood.ports[random.randrange(len(flood.ports))]
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
    found.frames, found.seconds = number, round(time.monotonic() - started_s, 2)
    found.by_kind = dict(counts)
    return found


def _connecting(host: str, port: int) -> socket.socket:
    found = socket.socket()
    found.setblocking(False)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with suppress(BlockingIOError):
        found.connect((host, port))
    return found


def _write(line: _Line, selector: selectors.BaseSelector, found: FloodResult, end: _End) -> None:
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
    except OSError:  # the peer closed before it could send anything
        line.sent = True
        found.hung_up += 1
        end(line)


def _read(line: _Line, found: FloodResult, end: _End) -> None:
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
    json.dump(asdict(send_flood(FrameFlood(ports, **document))), sys.stdout)


if __name__ == "__main__":
    main()
