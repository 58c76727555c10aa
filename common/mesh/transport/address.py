"""Addresses of processes: a ZeroMQ endpoint, optionally followed by `#` and the process's keys.

The keys are the public key of its calls and that of its bulk port, in hexadecimal digits with a
point between them.
"""

from __future__ import annotations

import re

from zmq.utils import z85

KEY_SEPARATOR, BULK_KEY_SEPARATOR = "#", "."
BULK_KEY_PREFIX = "bulk:"  # prefix of a bulk port's key, which is unlike other keys


def format_address(endpoint: str, public: bytes, bulk: bytes = b"") -> str:
    """Format the address of a process.

    Args:
        endpoint: ZeroMQ endpoint.
        public: public key of its calls (Z85).
        bulk: public key of its bulk port (32 bytes), if it has one.
    """
    return f"{endpoint}{KEY_SEPARATOR}{format_key(public)}" + (
        f"{BULK_KEY_SEPARATOR}{bulk.hex()}" if bulk else ""
    )


def format_key(public: bytes) -> str:
    """Format a public key (Z85) in hexadecimal digits, the form used everywhere else."""
    text: bytes = z85.decode(public)
    return text.hex()


def read_key_text(address: str) -> str:
    """Return the key in an address, in hexadecimal digits; empty if there is none."""
    public = parse_key(address)
    return format_key(public) if public else ""


def parse_endpoint(address: str) -> str:
    """Return the endpoint to connect to."""
    return address.partition(KEY_SEPARATOR)[0]


def parse_key(address: str) -> bytes:
    """Return the public key (Z85) of the process at an address; empty if the address names none."""
    text = address.partition(KEY_SEPARATOR)[2].partition(BULK_KEY_SEPARATOR)[0]
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        return b""
    key: bytes = z85.encode(bytes.fromhex(text))
    return key


def parse_bulk_key(address: str) -> bytes:
    """Return the bulk port's public key (32 bytes) in an address; empty if the address names
    none.
    """
    text = address.partition(KEY_SEPARATOR)[2].partition(BULK_KEY_SEPARATOR)[2]
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{64}", text) else b""


def format_bulk_key(public: bytes) -> str:
    """Format a bulk port's key for credentials and errors; the prefix distinguishes it from call
    keys.
    """
    return f"{BULK_KEY_PREFIX}{public.hex()}"
