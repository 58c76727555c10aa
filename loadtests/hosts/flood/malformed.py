"""What no honest peer sends: for each protocol that a mesh listens with, and for none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from random import Random

from meshrl.common.weights.handshakes.handshake import MAGIC_BYTES, SUITES, ServerHandshake

ZMTP = b"\xff" + bytes(8) + b"\x7f"
CURVE_HELLO = 200  # bytes of the command with its name
LARGE = 1 << 14  # bytes of what is long: more than fits a socket's buffer is not taken anyway
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


def greeting(mechanism: bytes = b"CURVE", minor: int = 1, server: bool = False) -> bytes:
    """Return the 64 bytes by which a ZeroMQ peer begins (ZMTP 3.1, RFC 37)."""
    found = ZMTP + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)
    return found[:64]


def command(body: bytes, flags: int = 4) -> bytes:
    """Return a ZMTP command, of any length."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def curve_hello(r: Random) -> bytes:
    """Return a hello that is right in everything but the box, which is under no key of the mesh."""
    body = b"\x05HELLO\x01\0" + bytes(72) + r.randbytes(32 + 8 + 80)
    return greeting() + command(body.ljust(CURVE_HELLO, b"\0"))


def unknown_commands(r: Random) -> bytes:
    """Return commands that no peer knows."""
    names = (b"\x04PING", b"\x05ERROR\xff", b"\x09SUBSCRIBE", b"\xff", b"")
    return greeting() + b"".join(command(r.choice(names)) for _ in range(8))


def huge_frame(r: Random) -> bytes:
    """Return a length that nobody has memory for, and its first bytes."""
    size = r.choice(((1 << 62), (1 << 63) - 1, (1 << 64) - 1, 1 << 40, 1 << 31, 256 << 20))
    return greeting() + bytes([r.choice((2, 3, 6))]) + struct.pack(">Q", size) + r.randbytes(64)


def bulk_hello(r: Random) -> bytes:
    """Return a hello under keys that nobody has, and of points that no key pair has."""
    ephemeral = r.choice((r.randbytes(32), bytes(32), b"\1" + bytes(31), b"\xff" * 32))
    rest = ServerHandshake.hello_bytes - MAGIC_BYTES - len(ephemeral)
    return r.choice(list(SUITES)) + ephemeral + r.randbytes(rest)


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
