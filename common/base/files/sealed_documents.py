"""JSON files that begin with a checksum of the rest, which detects changed bytes on reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.checksum import CHECKSUM_BYTES, compute_checksum
from meshrl.common.base.errors import CorruptData, NotFound

_HEADER = '{"digest": "%s",'
_HEADER_BYTES = len(_HEADER % ("0" * 2 * CHECKSUM_BYTES))


def encode_sealed(document: Mapping[str, Any]) -> bytes:
    """Encode a non-empty document as JSON after a checksum of its bytes."""
    rest = json.dumps(document, indent=1).encode()[1:]
    return (_HEADER % compute_checksum(rest).hex()).encode() + rest


def decode_sealed(content: bytes, path: Path) -> dict[str, Any]:
    """Decode a sealed document; raise CorruptData, which names `path`, for any other bytes."""
    rest = content[_HEADER_BYTES:]
    if not content:
        raise CorruptData("it is empty", where=str(path))
    if content[:_HEADER_BYTES] != (_HEADER % compute_checksum(rest).hex()).encode():
        raise CorruptData("its content does not match its digest", where=str(path))
    document: dict[str, Any] = json.loads(b"{" + rest)
    return document


def read_sealed(path: Path) -> dict[str, Any]:
    """Read the document in a file; raise NotFound without one, and CorruptData if it has
    changed.
    """
    try:
        return decode_sealed(path.read_bytes(), path)
    except FileNotFoundError:
        raise NotFound("it is missing", where=str(path)) from None
