"""Rows of datasets: of each the first one, and as many others as a time allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshrl.job import rows


class TimedRows:
    """Rows of several datasets, which share a time by parts of the same length."""

    def __init__(self, datasets: Sequence[tuple[str, Path]], look_s: float) -> None:
        self._datasets, self._look_s = datasets, look_s
        self.partly = False  # there were more rows than time

    def __iter__(self) -> Iterator[tuple[str, rows.DatasetRow]]:
        """Yield (key of the dataset, row)."""
        until = time.monotonic()
        for key, path in self._datasets:
            until += self._look_s / len(self._datasets)
            for number, row in enumerate(rows.read(path)):
                if number and time.monotonic() > until:
                    self.partly = True
                    break
                yield key, row
