"""Files of tests and solution, whose jails have a file system each: what one has changed in its
scratch directory is told with the next question or answer.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator

MAX_FILE_BYTES = 2 << 20  # of one file; larger ones do not cross
MAX_MESSAGE_BYTES = 8 << 20  # of those in one message, which is no frame's limit yet

# Tests may put others in their place.
_OS_OPEN, _BUILTIN_OPEN = os.open, open


class FileSync:
    """One side's scratch directory."""

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)
        self._known: dict[str, int] = {}  # a hash of each file's content: it only tells of changes

    def changes(self) -> dict[str, str | None]:
        """Content of what is new or other than it was, in hexadecimal; a name that ends with a
        slash is a directory, None what is gone.
        """
        found: dict[str, str | None] = {}
        size = 0
        now: dict[str, int] = {}
        for name, content in self._walk():
            digest = hash(content)
            if self._known.get(name) != digest:
                size += len(content)
                if size > MAX_MESSAGE_BYTES:
                    break
                found[name] = content.hex()
            now[name] = digest
        else:
            found.update(dict.fromkeys(set(self._known) - set(now)))
        self._known = now
        return found

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

    def change(self, changes: Any) -> None:
        """Does here what the other side has told."""
        for name, content in sorted(changes.items()):
            path = os.path.join(self._root, str(name))
            parent = os.path.realpath(os.path.dirname(path.rstrip("/")))
            if parent != self._root and not parent.startswith(self._root + "/"):
                raise ValueError("a file outside of the scratch directory")
            if content is None:
                self._known.pop(name, None)
                with contextlib.suppress(OSError):  # it is gone, or holds what this side has made
                    (os.rmdir if name.endswith("/") else os.unlink)(path.rstrip("/"))
            elif name.endswith("/"):
                os.makedirs(path, exist_ok=True)
                self._known[name] = hash(b"")
            else:
                data = bytes.fromhex(content)
                os.makedirs(parent, exist_ok=True)
                with _BUILTIN_OPEN(path, "wb", opener=_open_without_links) as file:
                    file.write(data)
                self._known[name] = hash(data)


def _open_without_links(path: str, flags: int) -> int:
    return _OS_OPEN(path, flags | os.O_NOFOLLOW, 0o644)
