"""The files of a run's samples: one for each shard, which starts again when it is long. The one
before it is kept.
"""

from __future__ import annotations

from pathlib import Path

from common.process.host import Host
from common.records.append_file import AppendFile

FILE_BYTES = 32 << 20  # twice that is what a shard's samples take on the disk
OLDER = ".older.jsonl"


class SampleFile:
    """The file of a shard's samples in a run's directory."""

    def __init__(self, host: Host, run_dir: Path, shard: int) -> None:
        self._host = host
        self._path = run_dir / f"samples{f'-{shard}' if shard else ''}.jsonl"
        self._file: AppendFile | None = None

    def write(self, lines: bytes) -> None:
        """Appends whole lines; StorageFull leaves them out."""
        file = self._opened()
        if file.tell() > 0 and file.tell() + len(lines) > FILE_BYTES:
            self.close()
            self._path.replace(self._path.with_suffix(OLDER))
            file = self._opened()
        file.write(lines)

    def _opened(self) -> AppendFile:
        if self._file is None:
            self._file = self._host.open_append(self._path)
        return self._file

    def close(self) -> None:
        """Closes the file; the next write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
