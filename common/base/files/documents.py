"""JSON documents with a check: the last key, `check`, is a digest of all others.

A document without the key was written by hand or by an earlier version, and is read unchecked.
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
    """Return 16 hexadecimal digits that identify the content, independent of its formatting."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def encode(content: Mapping[str, Any]) -> bytes:
    """Encode a document as readable JSON bytes."""
    document = {key: value for key, value in content.items() if key != CHECK}
    document |= {CHECK: compute_check(json.loads(json.dumps(document)))}  # in the form that is read
    return (json.dumps(document, indent=2) + "\n").encode()


def decode(content: bytes, where: str) -> dict[str, Any]:
    """Decode a document without its check; raise CorruptData if the check fails."""
    odd: list[str] = []

    def number(text: str) -> float:
        found = float(text)
        if repr(found) != text:  # other digits may have the same value
            odd.append(text)
        return found

    try:
        found = json.loads(content, parse_float=number)
    except ValueError as error:  # also raised for bytes that are no text
        why = f"it is not JSON: {error}" if content else "it is empty"
        raise CorruptData(why, where=where) from None
    if not isinstance(found, dict):
        raise CorruptData("it does not contain a JSON object", where=where)
    checked = found.pop(CHECK, None)
    if checked is None and found:  # a check whose key has changed
        last = next(reversed(found))
        rest = {key: value for key, value in found.items() if key != last}
        checked = found[last] if found[last] == compute_check(rest) else None
    if checked is not None and (odd or checked != compute_check(found)):
        raise CorruptData("its content does not match its checksum", where=where)
    return found


def read(path: Path, fix: str) -> dict[str, Any]:
    """Read a document.

    Raises FileNotFoundError, and CorruptData with `fix` if the check fails.
    """
    try:
        return decode(path.read_bytes(), str(path))
    except CorruptData as error:
        raise make_corrupt_error(path, error.message, fix) from None


def make_corrupt_error(path: Path, why: str, fix: str) -> CorruptData:
    """Make the error of an unusable document."""
    return CorruptData(f"{path.name} is corrupt: {why}", where=str(path), fix=fix)


def write(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a document atomically, as `write_bytes` does."""
    write_bytes(path, encode(content), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file atomically, readable by this user only.

    A reader never sees a partial file; with `durable` that holds after a power failure too.
    StorageFull leaves the old file in place.
    """
    with staged_write(path, content, durable=durable):
        pass


def temporary_path(path: Path) -> Path:
    """Return the temporary path of this process's write to `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.new")


@contextlib.contextmanager
def staged_write(path: Path, content: bytes, *, durable: bool) -> Iterator[None]:
    """Write a complete file, and move it to `path` after the block; see `write_bytes`."""
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


def rename_keys(row: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with the current names of its keys: earlier versions wrote the old names."""
    return {new_names.get(key, key): value for key, value in row.items()}
