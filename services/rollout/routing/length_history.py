"""Keeps the lengths of past trajectories on disk, so that a shard that starts again knows them.

One line of JSON for each trajectory: [prompt, [[tool, size class, status, sampled], ...], sampled].
They only help to guess, so a line that was cut short or a full disk costs a guess and nothing else.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from pathlib import Path

from common.errors import StorageFull
from common.process.host import Host
from common.records.append_file import AppendFile
from services.rollout.routing.lengths import HISTORY, Past

NAME = "lengths.jsonl"


class LengthHistory:
    """The latest trajectories of a shard, in `directory`."""

    def __init__(self, host: Host, directory: Path, limit: int = HISTORY) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._host, self._path, self._limit = host, directory / NAME, limit
        self._latest = deque(_read(self._path), maxlen=limit)
        self._file: AppendFile | None = None
        self._lines = 0
        self._rewrite()

    @property
    def latest(self) -> list[Past]:
        """Oldest first."""
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
            self._host.replace_file(self._path, b"".join(map(_line, self._latest)))
            self._lines = len(self._latest)
        with suppress(StorageFull):
            opened = self._host.open_append(self._path)
            self.close()
            self._file = opened

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(past: Past) -> bytes:
    returns = [[*state, sampled] for state, sampled in past.returns]
    return json.dumps([past.prompt, returns, past.sampled]).encode() + b"\n"


def _read(path: Path) -> list[Past]:
    """All whole lines."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            prompt, returns, sampled = json.loads(line)
            states = [((tool, size, status), n) for tool, size, status, n in returns]
        except ValueError:
            continue
        found.append(Past(prompt, tuple(states), sampled))
    return found
