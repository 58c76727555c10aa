"""History of trajectory lengths on disk, for a shard that restarts.

There is one line of JSON per trajectory: [prompt, [[tool, size class, status, sampled], ...],
sampled], with a checksum. The lengths only improve estimates, so a truncated or corrupt line, or a
full disk, is harmless.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.corruption import quarantine
from meshrl.common.base.files.json_lines import decode_row, encode_row
from meshrl.common.mesh.process.host import Host
from meshrl.services.rollout.routing.length_trees import HISTORY, PastTrajectory

FILE_NAME = "lengths.jsonl"


class LengthHistory:
    """Latest trajectories of a shard, in `directory`; a corrupt file is quarantined in `root`."""

    def __init__(
        self, host: Host, directory: Path, limit: int = HISTORY, root: Path | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._host, self.path, self._limit = host, directory / FILE_NAME, limit
        found, self.corruption = _read_lines(self.path)  # corruption of the old file; empty: none
        self.quarantined_path = (
            quarantine(self.path, root or directory) if self.corruption else None
        )
        self._latest = deque(found, maxlen=limit)
        self._file: AppendFile | None = None
        self._lines = 0
        self._rewrite()

    @property
    def latest(self) -> list[PastTrajectory]:
        return list(self._latest)

    def append(self, past: PastTrajectory) -> None:
        self._latest.append(past)
        if self._file is None:
            return
        with suppress(StorageFull):
            self._file.write(_encode_line(past))
            self._lines += 1
        if self._lines >= 2 * self._limit:
            self._rewrite()

    def _rewrite(self) -> None:
        """Rewrite the file without old lines; on a full disk keep the file."""
        with suppress(OSError, StorageFull):
            self._host.replace_file(self.path, b"".join(map(_encode_line, self._latest)))
            self._lines = len(self._latest)
        with suppress(StorageFull):
            opened = self._host.open_append(self.path)
            self.close()
            self._file = opened

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _encode_line(past: PastTrajectory, number: int = 0) -> bytes:
    returns = [[*state, sampled] for state, sampled in past.tool_returns]
    return encode_row({"past": [past.prompt, returns, past.sampled_tokens]}, number)


def _read_lines(path: Path) -> tuple[list[PastTrajectory], str]:
    """Read all valid lines; return them and a description of corrupt ones."""
    found = []
    content = path.read_bytes() if path.exists() else b""
    rows = [decode_row(text) for text in content.split(b"\n")[:-1]]
    for row in rows:
        try:
            prompt, returns, sampled = (row or {})["past"]
            states = [((tool, size, status), n) for tool, size, status, n in returns]
        except (KeyError, TypeError, ValueError):  # valid, but of another version
            continue
        found.append(PastTrajectory(prompt, tuple(states), sampled))
    corrupt_count = len(rows) - len(found)
    return found, f"{corrupt_count} of {len(rows)} lines are corrupt" if corrupt_count else ""
