"""What happens to a file: a bit flips, it loses its end, all or itself, or an older one is back."""

from __future__ import annotations

import shutil
from pathlib import Path

HARMS = ("flip", "truncate", "empty", "delete", "older")
HEAD_BYTES = 8


def harm(how: str, path: Path, older: Path | None, at_head: bool) -> str:
    """Does it; why it cannot be done, or an empty text."""
    try:
        return _harmed(how, path, older, at_head)
    except FileNotFoundError:  # nothing needs it any more
        return "it has gone"


def _harmed(how: str, path: Path, older: Path | None, at_head: bool) -> str:
    content = path.read_bytes()
    match how:
        case "flip":
            if not content:
                return "it is empty"
            at = min(HEAD_BYTES, len(content)) - 1 if at_head else len(content) // 2
            _over(path, content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        case "truncate":
            if len(content) < 2:
                return "it is too short"
            _over(path, content[: HEAD_BYTES // 2 if at_head else len(content) // 2])
        case "empty":
            _over(path, b"")
        case "delete":
            path.unlink()
        case "older":
            if older is None or older.read_bytes() == content:
                return "there is no older one that differs"
            stamped = path.with_name(path.name + ".older")
            shutil.copyfile(older, stamped)
            stamped.replace(path)
        case _:
            raise ValueError(how)
    return ""


def _over(path: Path, content: bytes) -> None:
    """In place, as a disk would: whoever has the file open sees it too."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
