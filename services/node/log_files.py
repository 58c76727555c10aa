"""The log files of a host's processes: read in parts for who is on another host, and bounded."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.api.node import LogFile, LogPart
from meshrl.common.base.errors import NotFound
from meshrl.common.mesh.process.output.log_bounds import bound_file

MOST_BYTES = 1 << 20  # of a part, whatever is asked for
ENDING = ".log"


class HostLogFiles:
    """Those in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def listed(self) -> list[LogFile]:
        found = []
        for path in sorted(self._directory.glob(f"*{ENDING}")):
            about = path.stat()
            found.append(LogFile(path.stem, about.st_size, about.st_mtime))
        return found

    def read(self, name: str, offset: int, most: int) -> LogPart:
        """A part of a file from `offset` on, whole lines if there is one; or of so many bytes
        before its end if that is less than 0. NotFound.
        """
        if name not in (file.name for file in self.listed()):
            raise NotFound(f"there is no log {name!r:.200} here")
        with (self._directory / (name + ENDING)).open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            file.seek(start)
            content = file.read(max(0, min(most, MOST_BYTES)))
        whole = content if offset < 0 else content[: content.rfind(b"\n") + 1] or content
        return LogPart(whole.decode(errors="replace"), start + len(whole), size)

    def bound(self) -> None:
        """Start those again that are too long, whatever process writes to them."""
        for path in self._directory.glob(f"*{ENDING}"):
            bound_file(path)
