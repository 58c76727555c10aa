"""Documents that a process has written or read, and keeps whole while it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Damaged, DeadlineExceeded, StateUnavailable, StorageFull
from meshrl.common.base.files import damage
from meshrl.common.base.files.lines import signature
from meshrl.directory.places import read_json, write_json

LOOK_S = 1.0


class KeptDocument:
    """What a file holds: Damaged, or FileNotFoundError, when it cannot be read at first. From then
    on it is put back when it is damaged or gone; what somebody else writes right is taken over.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        root: Path,
        job: str = "",
        read: Callable[[Path], dict[str, Any]] = read_json,
        write: Callable[[Path, dict[str, Any]], None] = write_json,
    ) -> None:
        self.path, self._root, self._kind, self._job = path, root, kind, job
        self._read, self._write = read, write
        self.content = read(path)
        self._seen = signature(path)

    def look(self) -> dict[str, Any] | None:
        """The fields of an event when it had to be put back. StorageFull: there is no room for it,
        and it is tried again.
        """
        if (now := signature(self.path)) == self._seen:
            return None
        aside = None
        try:
            self.content = self._read(self.path)
        except FileNotFoundError:
            why = "it is gone"
        except Damaged as error:
            why, aside = error.message, damage.set_aside(self.path, self._root)
        else:
            self._seen = now
            return None
        self._write(self.path, self.content)
        self._seen = signature(self.path)
        then = "written again from memory"
        return damage.fields(self._kind, self.path, why, then, job=self._job, aside=aside)


async def keep(
    documents: Iterable[KeptDocument],
    clock: Clock,
    tell: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Looks at documents for ever, and says what had to be put back."""
    documents = list(documents)
    while True:
        for document in documents:
            with contextlib.suppress(StorageFull, StateUnavailable, DeadlineExceeded):
                if (told := document.look()) is not None:
                    print(damage.sentence(told), file=sys.stderr, flush=True)
                    await tell(told)
        await clock.sleep(LOOK_S)
