"""JSON documents with a check: the last key, `check`, is a digest of all others.

One without the key was written by hand or by an earlier version, and is read as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import Damaged
from common.records.append_file import AppendFile
from common.records.durable import sync

CHECK = "check"


def digest(content: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that tell one content from another, however it is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def encode(content: Mapping[str, Any]) -> bytes:
    """The document's bytes, for people to read too."""
    told = {key: value for key, value in content.items() if key != CHECK}
    told |= {CHECK: digest(json.loads(json.dumps(told)))}  # as it will be read
    return (json.dumps(told, indent=2) + "\n").encode()


def decode(content: bytes, where: str) -> dict[str, Any]:
    """What a document holds, without its check; Damaged when it is not what was written."""
    try:
        found = json.loads(content)
    except ValueError as error:  # also for bytes that are no text
        why = f"it is not JSON: {error}" if content else "it is empty"
        raise Damaged(why, where=where) from None
    if not isinstance(found, dict):
        raise Damaged("it does not hold a JSON object", where=where)
    check = found.pop(CHECK, None)
    if check is not None and check != digest(found):
        raise Damaged("its content is not what its check says", where=where)
    return found


def write(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Puts a document in place, as `put` does."""
    put(path, encode(content), durable=durable)


def put(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Whole or not at all: a reader never sees half a file, nor does who comes after a power cut if
    it is `durable`. StorageFull with the old one in its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.unlink(missing_ok=True)
    file = AppendFile(fresh)
    try:
        file.write(content)
        if durable:
            file.sync()
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        file.close()
    fresh.replace(path)
    if durable:
        sync(path.parent)
