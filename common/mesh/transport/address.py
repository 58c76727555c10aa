"""Addresses of processes: a ZeroMQ endpoint, and behind `#` the identity of its process where each
has keys of its own: the public key that it answers calls with, and that of its bulk port, in
hexadecimal digits with a point between them.
"""

from __future__ import annotations

import re

from zmq.utils import z85

MARK, BETWEEN = "#", "."
BULK = "bulk:"  # begins the text of a bulk port's key, which is taken for no other


def keyed(endpoint: str, public: bytes, bulk: bytes = b"") -> str:
    """The address of who answers at `endpoint` with the key `public` (Z85), and at its bulk port
    with the key `bulk` (32 bytes), if it has one.
    """
    return f"{endpoint}{MARK}{key_text(public)}" + (f"{BETWEEN}{bulk.hex()}" if bulk else "")


def key_text(public: bytes) -> str:
    """A public key (Z85) in hexadecimal digits, as it is written everywhere else."""
    text: bytes = z85.decode(public)
    return text.hex()


def endpoint_of(address: str) -> str:
    """Where to connect to."""
    return address.partition(MARK)[0]


def key_of(address: str) -> bytes:
    """The public key (Z85) of who answers there; empty when the address names none."""
    text = address.partition(MARK)[2].partition(BETWEEN)[0]
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        return b""
    key: bytes = z85.encode(bytes.fromhex(text))
    return key


def bulk_key_of(address: str) -> bytes:
    """The public key (32 bytes) of the bulk port of who answers there; empty when the address names
    none.
    """
    text = address.partition(MARK)[2].partition(BETWEEN)[2]
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{64}", text) else b""


def bulk_key_text(public: bytes) -> str:
    """The key of a bulk port as doors and errors have it: no key of calls reads like that."""
    return f"{BULK}{public.hex()}"
