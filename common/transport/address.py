"""Addresses of processes: a ZeroMQ endpoint, and behind `#` the public key that its process answers
with, in hexadecimal digits, where each process has a key of its own.
"""

from __future__ import annotations

import re

from zmq.utils import z85

MARK = "#"


def keyed(endpoint: str, public: bytes) -> str:
    """The address of who answers at `endpoint` with the key `public` (Z85)."""
    return f"{endpoint}{MARK}{key_text(public)}"


def key_text(public: bytes) -> str:
    """A public key (Z85) in hexadecimal digits, as it is written everywhere else."""
    text: bytes = z85.decode(public)
    return text.hex()


def endpoint_of(address: str) -> str:
    """Where to connect to."""
    return address.partition(MARK)[0]


def key_of(address: str) -> bytes:
    """The public key (Z85) of who answers there; empty when the address names none."""
    text = address.partition(MARK)[2]
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        return b""
    key: bytes = z85.encode(bytes.fromhex(text))
    return key
