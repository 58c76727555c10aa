"""Checksums against accidents: torn writes, bits that a disk has changed, files that are cut short.

xxh3_128 hashes faster than memory is read. Anybody can make other bytes of the same checksum, so
nothing is trusted by one: see `meshrl.common.base.digest`.
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
    """A checksum of bytes that come in pieces."""

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self._hasher = xxh3_128(content)

    def update(self, content: bytes | memoryview) -> None:
        """Add the bytes that come next."""
        self._hasher.update(content)

    @property
    def checksum(self) -> Checksum:
        """The checksum of all bytes so far."""
        return Checksum(self._hasher.digest())
