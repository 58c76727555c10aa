"""Collision-resistant digests, which identify untrusted bytes.

BLAKE3 with 256 bits. It names chunks, bundles, checkpoints, manifests, groups and the identity of
weights, so that no process can create other bytes of the same name. It hashes 4 to 5 GB/s on a core
with AVX-512, where SHA-256 with SHA instructions has 1.8 (`loadtests.weights`, `hash_gb_s`).
`meshrl.common.base.checksum` detects accidental changes of a file, but is no proof against forgery.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from meshrl.common.base.errors import BadMessage, Refused

DIGEST_DIGITS = 64  # hexadecimal
_LEGACY_DIGITS = 32  # of xxh3_128, the names in the stores of earlier versions
_BLOCK_BYTES = 1 << 20  # of a file in memory at a time

BytesLike = bytes | bytearray | memoryview


class Hasher:
    """Digest of bytes that arrive in pieces."""

    def __init__(self, content: BytesLike = b"") -> None:
        self._hasher = _create_blake3(content)

    def update(self, content: BytesLike) -> None:
        """Add the bytes that come next."""
        self._hasher.update(_view_bytes(content))

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far as 64 hexadecimal digits."""
        digest: str = self._hasher.hexdigest()
        return digest


def _view_bytes(content: BytesLike) -> memoryview:
    """Return a view of single bytes, which the library requires."""
    view = memoryview(content)
    return view if view.format == "B" else view.cast("B")


def compute_digest(content: BytesLike) -> str:
    """Return the digest of bytes as 64 hexadecimal digits."""
    return Hasher(content).hexdigest()


def compute_keyed_digest(content: BytesLike, key: bytes) -> bytes:
    """Return the digest of bytes under a key of 32 bytes, which separates its uses."""
    found: bytes = _create_blake3(content, key=key).digest()
    return found


def _create_blake3(content: BytesLike, **options: Any) -> Any:
    """Create the library's hasher, imported at first use: a process without digests needs none."""
    from blake3 import blake3

    return blake3(_view_bytes(content), **options)


def ignore_byte_count(_: int) -> None:
    """Ignore the number of bytes that were read or written."""


def compute_stream_digest(
    file: BinaryIO, on_progress: Callable[[int], None] = ignore_byte_count
) -> str:
    """Return the digest of the rest of a file, with one block in memory at a time.

    `on_progress` is called with the number of bytes of each read.
    """
    hasher = Hasher()
    while block := file.read(_BLOCK_BYTES):
        hasher.update(block)
        on_progress(len(block))
    return hasher.hexdigest()


def compute_file_digest(path: Path, on_progress: Callable[[int], None] = ignore_byte_count) -> str:
    """Return the digest of a file; `on_progress` is called with the number of bytes of each
    read.
    """
    with path.open("rb") as file:
        return compute_stream_digest(file, on_progress)


def check_digest(digest: str, where: str = "") -> None:
    """Return if `digest` has the form of a digest.

    Raises:
        Refused: it is a name of an earlier version, for which other bytes can be forged.
        BadMessage: it is anything else.
    """
    plain = isinstance(digest, str) and set(digest) <= set("0123456789abcdef")
    if plain and len(digest) == DIGEST_DIGITS:
        return
    if plain and len(digest) == _LEGACY_DIGITS:
        raise Refused(
            f"{digest} was stored by an earlier version of MeshRL with a checksum (xxh3_128) that "
            "other bytes can be made to match",
            where=where,
            fix="Export that run with the version that created it (meshrl export RUN --out DIR), "
            "and start a new run from the export (model.path)",
        )
    raise BadMessage(f"{digest!r:.80} is not a digest", where=where)
