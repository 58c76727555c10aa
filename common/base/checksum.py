"""Checksums against accidents: torn writes, flipped bits of a disk, truncated files.

xxh3_128 hashes faster than memory is read. Other bytes with the same checksum are easy to forge, so
it is no proof of identity: see `meshrl.common.base.digest`.
"""

from __future__ import annotations

from typing import NewType

from xxhash import xxh3_128

Checksum = NewType("Checksum", bytes)
CHECKSUM_BYTES = 16  # of a checksum


def compute_checksum(content: bytes | memoryview) -> Checksum:
    """Return the checksum of bytes."""
    return Checksum(xxh3_128(content).digest())


class Checksummer:
    """Checksum of bytes that arrive in pieces."""

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self._hasher = xxh3_128(content)

    def update(self, content: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._hasher.update(content)

    @property
    def checksum(self) -> Checksum:
        """Checksum of all bytes so far."""
        return Checksum(self._hasher.digest())
