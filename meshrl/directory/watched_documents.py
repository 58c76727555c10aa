"""Documents that a process has written or read, and repairs while it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, DeadlineExceeded, StateUnavailable, StorageFull
from meshrl.common.base.files import corruption
from meshrl.common.base.files.json_lines import read_signature
from meshrl.directory.directory_paths import read_json, write_json

POLL_S = 1.0


class WatchedDocument:
    """Content of a file: CorruptData, or FileNotFoundError, when it cannot be read at first.

    From then on it is restored when it is corrupt or missing; valid content that another process
    writes is adopted.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        quarantine_root: Path,
        job: str = "",
        read: Callable[[Path], dict[str, Any]] = read_json,
        write: Callable[[Path, dict[str, Any]], None] = write_json,
    ) -> None:
        self.path, self._quarantine_root, self._kind, self._job = path, quarantine_root, kind, job
        self._read, self._write = read, write
        self.content = read(path)
        self._signature = read_signature(path)

    def repair_if_changed(self) -> dict[str, Any] | None:
        """Restore the file if it was corrupt or missing, and return the fields of an event.

        Raises StorageFull if there is no space for it; the next call retries.
        """
        if (now := read_signature(self.path)) == self._signature:
            return None
        quarantined_path = None
        try:
            self.content = self._read(self.path)
        except FileNotFoundError:
            why = "it is missing"
        except CorruptData as error:
            why, quarantined_path = (
                error.message,
                corruption.quarantine(self.path, self._quarantine_root),
            )
        else:
            self._signature = now
            return None
        self._write(self.path, self.content)
        self._signature = read_signature(self.path)
        then = "rewritten from memory"
        return corruption.make_event_fields(
            self._kind, self.path, why, then, job=self._job, quarantined_path=quarantined_path
        )


async def watch_documents(
    documents: Iterable[WatchedDocument],
    clock: Clock,
    on_repair: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Poll documents for ever, and report each repair to `on_repair`."""
    documents = list(documents)
    while True:
        for document in documents:
            with contextlib.suppress(StorageFull, StateUnavailable, DeadlineExceeded):
                if (event_fields := document.repair_if_changed()) is not None:
                    print(corruption.describe_event(event_fields), file=sys.stderr, flush=True)
                    await on_repair(event_fields)
        await clock.sleep(POLL_S)
