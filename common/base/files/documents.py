"""JSON documents with a check: the last key, `check`, is a digest of all others.

One without the key was written by hand or by an earlier version, and is read as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import CorruptData
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.disk_sync import fsync_path

CHECK = "check"


def compute_check(content: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that tell one content from another, however it is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def encode(content: Mapping[str, Any]) -> bytes:
    """The document's bytes, for people to read too."""
    told = {key: value for key, value in content.items() if key != CHECK}
    told |= {CHECK: compute_check(json.loads(json.dumps(told)))}  # as it will be read
    return (json.dumps(told, indent=2) + "\n").encode()


def decode(content: bytes, where: str) -> dict[str, Any]:
    """What a document holds, without its check; Damaged when it is not what was written."""
    odd: list[str] = []

    def number(text: str) -> float:
        found = float(text)
        if repr(found) != text:  # other digits may be the same number
            odd.append(text)
        return found

    try:
        found = json.loads(content, parse_float=number)
    except ValueError as error:  # also for bytes that are no text
        why = f"it is not JSON: {error}" if content else "it is empty"
        raise CorruptData(why, where=where) from None
    if not isinstance(found, dict):
        raise CorruptData("it does not hold a JSON object", where=where)
    checked = found.pop(CHECK, None)
    if checked is None and found:  # a check whose key has changed
        last = next(reversed(found))
        rest = {key: value for key, value in found.items() if key != last}
        checked = found[last] if found[last] == compute_check(rest) else None
    if checked is not None and (odd or checked != compute_check(found)):
        raise CorruptData("its content is not what its check says", where=where)
    return found


def read(path: Path, fix: str) -> dict[str, Any]:
    """What the document there holds. Damaged, with what to do, when it is not what was written;
    FileNotFoundError.
    """
    try:
        return decode(path.read_bytes(), str(path))
    except CorruptData as error:
        raise make_corrupt_error(path, error.message, fix) from None


def make_corrupt_error(path: Path, why: str, fix: str) -> CorruptData:
    """The error of a document that cannot be used."""
    return CorruptData(f"{path.name} is damaged: {why}", where=str(path), fix=fix)


def write(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Puts a document in place, as `put` does."""
    write_bytes(path, encode(content), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Whole or not at all, for this user's eyes: a reader never sees half a file, nor does who
    comes after a power cut if it is `durable`. StorageFull with the old one in its place.
    """
    with staged_write(path, content, durable=durable):
        pass


def temporary_path(path: Path) -> Path:
    """Where this process writes what is to be in that place."""
    return path.with_name(f"{path.name}.{os.getpid()}.new")


@contextlib.contextmanager
def staged_write(path: Path, content: bytes, *, durable: bool) -> Iterator[None]:
    """As `put`: within the block the file is whole, and not yet in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary_path(path)
    fresh.unlink(missing_ok=True)
    file = AppendFile(fresh)
    try:
        file.write(content)
        if durable:
            file.sync()
        yield
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        file.close()
    if durable:
        fsync_path(path.parent)
