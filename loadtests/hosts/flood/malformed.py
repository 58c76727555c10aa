"""What no honest peer sends: for each protocol that a mesh listens with, and for none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

from common.weights.handshakes.handshake import MAGIC_BYTES, SUITES, ServerHandshake

ZMTP = b"\xff" + bytes(8) + b"\x7f"
CURVE_HELLO = 200  # bytes of the command with its name
LARGE = 1 << 14  # bytes of what is long: more than fits a socket's buffer is not taken anyway
KINDS: dict[str, Callable[[Random], bytes]] = {}


def kind(make: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    """One way to be malformed, under the name of its function."""
    KINDS[make.__name__] = make
    return make


def greeting(mechanism: bytes, minor: int = 1, server: bool = False) -> bytes:
    """64 bytes by which a ZeroMQ peer begins (ZMTP 3.1, RFC 37)."""
    found = ZMTP + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)
    return found[:64]


def command(body: bytes, flags: int = 4) -> bytes:
    """A ZMTP command, of any length."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


@kind
def nothing(random: Random) -> bytes:
    return b""


@kind
def noise(random: Random) -> bytes:
    return random.randbytes(random.randint(1, 4096))


@kind
def zeros(random: Random) -> bytes:
    return bytes(random.randint(1, LARGE))


@kind
def cut_greeting(random: Random) -> bytes:
    return greeting(b"CURVE")[: random.randint(1, 63)]


@kind
def old_greeting(random: Random) -> bytes:
    return random.choice((b"\x01\x00", b"\xff" + bytes(7) + b"\x01\x7f\x01", b"\x0f\x00junk"))


@kind
def greeting_then_noise(random: Random) -> bytes:
    return greeting(b"CURVE") + random.randbytes(random.randint(1, 2048))


@kind
def other_mechanism(random: Random) -> bytes:
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
    return greeting(random.choice((b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20))) + command(ready)


@kind
def curve_hello(random: Random) -> bytes:
    """Right in everything but the box, which is under no key of the mesh."""
    body = b"\x05HELLO\x01\0" + bytes(72) + random.randbytes(32 + 8 + 80)
    return greeting(b"CURVE") + command(body.ljust(CURVE_HELLO, b"\0"))


@kind
def cut_hello(random: Random) -> bytes:
    return curve_hello(random)[: random.randint(65, 250)]


@kind
def hello_then_initiate(random: Random) -> bytes:
    return curve_hello(random) + command(b"\x08INITIATE" + random.randbytes(random.randint(0, 600)))


@kind
def unknown_commands(random: Random) -> bytes:
    names = (b"\x04PING", b"\x05ERROR\xff", b"\x09SUBSCRIBE", b"\xff", b"")
    return greeting(b"CURVE") + b"".join(command(random.choice(names)) for _ in range(8))


@kind
def huge_frame(random: Random) -> bytes:
    """A length that nobody has memory for, and its first bytes."""
    size = random.choice(((1 << 62), (1 << 63) - 1, (1 << 64) - 1, 1 << 40, 1 << 31, 256 << 20))
    flags = random.choice((2, 3, 6))
    return greeting(b"CURVE") + bytes([flags]) + struct.pack(">Q", size) + random.randbytes(64)


@kind
def many_frames(random: Random) -> bytes:
    return greeting(b"CURVE") + b"".join(command(b"", 1) for _ in range(1000))


@kind
def bulk_hello(random: Random) -> bytes:
    """Under keys that nobody has, and of points that no key pair has."""
    ephemeral = random.choice((random.randbytes(32), bytes(32), b"\1" + bytes(31), b"\xff" * 32))
    rest = ServerHandshake.hello_bytes - MAGIC_BYTES - len(ephemeral)
    return random.choice(list(SUITES)) + ephemeral + random.randbytes(rest)


@kind
def cut_bulk_hello(random: Random) -> bytes:
    return bulk_hello(random)[: random.randint(1, ServerHandshake.hello_bytes - 1)]


@kind
def bulk_hello_then_requests(random: Random) -> bytes:
    request = random.choice((b"G", b"P", b"H", b"R", b"\0")) + random.randbytes(15) + b"\xff" * 24
    return bulk_hello(random) + random.randbytes(32) + request * 20


@kind
def other_bulk(random: Random) -> bytes:
    return random.choice((b"MRB0", b"MRB1", b"MRB3", b"MRB9")) + random.randbytes(128)


@kind
def http_noise(random: Random) -> bytes:
    first = random.choice((b"GET", b"POST", b"\x00\x01", b"A" * 300, b"PRI * HTTP/2.0"))
    return first + b" " + random.randbytes(40) + b" HTTP/1.1\r\n\r\n"


@kind
def http_long_line(random: Random) -> bytes:
    return b"GET /" + b"a" * LARGE


@kind
def http_many_headers(random: Random) -> bytes:
    return b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(600))


@kind
def http_lengths(random: Random) -> bytes:
    length = random.choice((b"-1", b"99999999999999999999", b"1e9", b"0x10", b"5, 6"))
    way = random.choice((b"Content-Length: " + length, b"Transfer-Encoding: chunked"))
    return b"POST /metrics HTTP/1.1\r\nHost: a\r\n" + way + b"\r\n\r\nffffffffffffffff\r\n"


@kind
def tls_hello(random: Random) -> bytes:
    size = random.choice((0, 1, 40, 512, 0xFFFF))
    return b"\x16\x03\x01" + struct.pack(">H", size) + b"\x01" + random.randbytes(min(size, 512))


@kind
def tls_alert_noise(random: Random) -> bytes:
    return bytes([random.choice((20, 21, 23, 24)), 3, 3]) + random.randbytes(40)


@kind
def redis_lengths(random: Random) -> bytes:
    lines = (b"*1000000000", b"*-2", b"$-5", b"*1\r\n$999999999999", b"*3\r\n$3\r\nSET\r\n+a")
    return random.choice(lines) + b"\r\n" + random.randbytes(16)


@kind
def redis_inline(random: Random) -> bytes:
    return random.choice((b"AUTH x y\r\n", b"HELLO 99\r\n", b"'" + b"a" * LARGE, b"\r\n" * 500))
