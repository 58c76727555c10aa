"""Addresses of processes: a ZeroMQ endpoint, and behind `#` the identity of its process where each
has keys of its own: the public key that it answers calls with, and that of its bulk port, in
hexadecimal digits with a point between them.
"""

from __future__ import annotations

import re

from zmq.utils import z85

KEY_SEPARATOR, BULK_KEY_SEPARATOR = "#", "."
BULK_KEY_PREFIX = "bulk:"  # begins the text of a bulk port's key, which is taken for no other


def format_address(endpoint: str, public: bytes, bulk: bytes = b"") -> str:
    """The address of who answers at `endpoint` with the key `public` (Z85), and at its bulk port
    with the key `bulk` (32 bytes), if it has one.
    """
    return f"{endpoint}{KEY_SEPARATOR}{format_key(public)}" + (
        f"{BULK_KEY_SEPARATOR}{bulk.hex()}" if bulk else ""
    )


def format_key(public: bytes) -> str:
    """A public key (Z85) in hexadecimal digits, as it is written everywhere else."""
    text: bytes = z85.decode(public)
    return text.hex()


def parse_endpoint(address: str) -> str:
    """Where to connect to."""
    return address.partition(KEY_SEPARATOR)[0]


def parse_key(address: str) -> bytes:
    """The public key (Z85) of who answers there; empty when the address names none."""
    text = address.partition(KEY_SEPARATOR)[2].partition(BULK_KEY_SEPARATOR)[0]
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        return b""
    key: bytes = z85.encode(bytes.fromhex(text))
    return key


def parse_bulk_key(address: str) -> bytes:
    """The public key (32 bytes) of the bulk port of who answers there; empty when the address names
    none.
    """
    text = address.partition(KEY_SEPARATOR)[2].partition(BULK_KEY_SEPARATOR)[2]
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{64}", text) else b""


def format_bulk_key(public: bytes) -> str:
    """The key of a bulk port as doors and errors have it: no key of calls reads like that."""
    return f"{BULK_KEY_PREFIX}{public.hex()}"
