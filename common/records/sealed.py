"""JSON files that begin with a digest of the rest: whatever byte of one has changed, it shows when
the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from common.errors import Damaged, NotFound

_HEAD = '{"digest": "%s",'
_HEAD_BYTES = len(_HEAD % ("0" * 32))
_BLOCK_BYTES = 1 << 20  # of a file that are in memory at a time while it is read


def sealed(document: Mapping[str, Any]) -> bytes:
    """The JSON of a document that is not empty, with the xxh3_128 of its bytes before it."""
    rest = json.dumps(document, indent=1).encode()[1:]
    return (_HEAD % xxhash.xxh3_128_hexdigest(rest)).encode() + rest


def unsealed(content: bytes, path: Path) -> dict[str, Any]:
    """The document that was sealed; Damaged, which names `path`, for any other bytes."""
    rest = content[_HEAD_BYTES:]
    if not content:
        raise Damaged("it is empty", where=str(path))
    if content[:_HEAD_BYTES] != (_HEAD % xxhash.xxh3_128_hexdigest(rest)).encode():
        raise Damaged("it is not what its digest says", where=str(path))
    document: dict[str, Any] = json.loads(b"{" + rest)
    return document


def read_sealed(path: Path) -> dict[str, Any]:
    """The document in a file; NotFound without one, Damaged when it is not what was written."""
    try:
        return unsealed(path.read_bytes(), path)
    except FileNotFoundError:
        raise NotFound("it is missing", where=str(path)) from None


def unwatched(_: int) -> None:
    """Nobody counts the bytes that are read or written."""


def digest_of_file(path: Path, moved: Callable[[int], None] = unwatched) -> str:
    """The xxh3_128 of a file, as 32 hexadecimal digits; `moved` hears of its bytes as they are
    read.
    """
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hashed.update(block)
            moved(len(block))
    return hashed.hexdigest()
