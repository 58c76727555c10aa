"""Follower of a file of JSON lines that another process writes."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.base.files.json_lines import Row, decode_row


class RowFollower:
    """Reader of the rows that are appended to a file, or written when the file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset_bytes = 0, 0

    def read_new(self) -> list[Row]:
        """Return the complete rows since the last call; all of them after a replacement."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            inode, end = (stat := self._path.stat()).st_ino, stat.st_size
            if inode != self._inode or end < self._offset_bytes:
                self._inode, self._offset_bytes = inode, 0
            file.seek(self._offset_bytes)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._offset_bytes += len(content)
        rows = map(decode_row, content.split(b"\n")[:-1])
        return [row for row in rows if row is not None]
