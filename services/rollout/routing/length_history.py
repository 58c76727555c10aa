"""Keeps the lengths of past trajectories on disk, so that a shard that starts again knows them.

One line of JSON for each trajectory: [prompt, [[tool, size class, status, sampled], ...], sampled],
with a check. They only help to guess, so a line that was cut short or is damaged, or a full disk,
costs a guess and nothing else.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.damage import set_aside
from meshrl.common.base.files.lines import line, row_of
from meshrl.common.mesh.process.host import Host
from meshrl.services.rollout.routing.lengths import HISTORY, Past

NAME = "lengths.jsonl"


class LengthHistory:
    """The latest trajectories of a shard, in `directory`; a damaged file is set aside in `root`."""

    def __init__(
        self, host: Host, directory: Path, limit: int = HISTORY, root: Path | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._host, self.path, self._limit = host, directory / NAME, limit
        found, self.damage = _read(self.path)  # what is wrong with what was there; empty: nothing
        self.aside = set_aside(self.path, root or directory) if self.damage else None
        self._latest = deque(found, maxlen=limit)
        self._file: AppendFile | None = None
        self._lines = 0
        self._rewrite()

    @property
    def latest(self) -> list[Past]:
        return list(self._latest)

    def append(self, past: Past) -> None:
        self._latest.append(past)
        if self._file is None:
            return
        with suppress(StorageFull):
            self._file.write(_line(past))
            self._lines += 1
        if self._lines >= 2 * self._limit:
            self._rewrite()

    def _rewrite(self) -> None:
        """Leaves what is too old behind; on a full disk the file stays as it is."""
        with suppress(OSError, StorageFull):
            self._host.replace_file(self.path, b"".join(map(_line, self._latest)))
            self._lines = len(self._latest)
        with suppress(StorageFull):
            opened = self._host.open_append(self.path)
            self.close()
            self._file = opened

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(past: Past, number: int = 0) -> bytes:
    returns = [[*state, sampled] for state, sampled in past.returns]
    return line({"past": [past.prompt, returns, past.sampled]}, number)


def _read(path: Path) -> tuple[list[Past], str]:
    """All whole lines, and whether others are damaged."""
    found = []
    content = path.read_bytes() if path.exists() else b""
    rows = [row_of(text) for text in content.split(b"\n")[:-1]]
    for row in rows:
        try:
            prompt, returns, sampled = (row or {})["past"]
            states = [((tool, size, status), n) for tool, size, status, n in returns]
        except (KeyError, TypeError, ValueError):  # whole, but of another shape: another version's
            continue
        found.append(Past(prompt, tuple(states), sampled))
    gone = len(rows) - len(found)
    return found, f"{gone} of {len(rows)} lines are damaged" if gone else ""
