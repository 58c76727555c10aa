"""Synchronisation of the scratch directories of tests and solution.

Each jail has its own file system. Each request or answer carries the changes of its sender.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator

MAX_FILE_BYTES = 2 << 20  # of one file; larger ones do not cross
MAX_MESSAGE_BYTES = 8 << 20  # of the files in one message, which is below a frame's limit

# Tests may replace the functions.
_OS_OPEN, _BUILTIN_OPEN = os.open, open


class FileSync:
    """Synchronised scratch directory of one side."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)
        self._content_hashes: dict[str, int] = {}  # hashes that detect changes, by file name

    def collect_changes(self) -> dict[str, str | None]:
        """Return the files that are new or changed, with content in hexadecimal.

        A name that ends with a slash is a directory; None marks a deleted file.
        """
        changes: dict[str, str | None] = {}
        size = 0
        now: dict[str, int] = {}
        for name, content in self._walk():
            digest = hash(content)
            if self._content_hashes.get(name) != digest:
                size += len(content)
                if size > MAX_MESSAGE_BYTES:
                    break
                changes[name] = content.hex()
            now[name] = digest
        else:
            changes.update(dict.fromkeys(set(self._content_hashes) - set(now)))
        self._content_hashes = now
        return changes

    def _walk(self) -> Iterator[tuple[str, bytes]]:
        for folder, folders, names in os.walk(self._root):
            inside = os.path.relpath(folder, self._root)
            for name in sorted(folders):
                if not os.path.islink(os.path.join(folder, name)):
                    yield os.path.normpath(os.path.join(inside, name)) + "/", b""
            for name in sorted(names):
                path = os.path.join(folder, name)
                if os.path.islink(path) or not os.path.isfile(path):
                    continue
                if os.path.getsize(path) <= MAX_FILE_BYTES:
                    with _BUILTIN_OPEN(path, "rb", opener=_open_without_links) as file:
                        yield os.path.normpath(os.path.join(inside, name)), file.read()

    def apply_changes(self, changes: Any) -> None:
        """Apply the changes of the other side."""
        for name, content in sorted(changes.items()):
            path = os.path.join(self._root, str(name))
            parent = os.path.realpath(os.path.dirname(path.rstrip("/")))
            if parent != self._root and not parent.startswith(self._root + "/"):
                raise ValueError("a file is outside of the scratch directory")
            if content is None:
                self._content_hashes.pop(name, None)
                # it is missing, or a directory with files of this side
                with contextlib.suppress(OSError):
                    (os.rmdir if name.endswith("/") else os.unlink)(path.rstrip("/"))
            elif name.endswith("/"):
                os.makedirs(path, exist_ok=True)
                self._content_hashes[name] = hash(b"")
            else:
                data = bytes.fromhex(content)
                os.makedirs(parent, exist_ok=True)
                with _BUILTIN_OPEN(path, "wb", opener=_open_without_links) as file:
                    file.write(data)
                self._content_hashes[name] = hash(data)


def _open_without_links(path: str, flags: int) -> int:
    return _OS_OPEN(path, flags | os.O_NOFOLLOW, 0o644)
