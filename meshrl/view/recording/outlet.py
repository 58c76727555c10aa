"""Keeps what a run has made at the URL that its job names in `out`: as a run directory, as far as
other hosts have use for it. The directory at home stays the run's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Damaged, MeshError, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.at_url import PART, AtUrl, without_secrets
from meshrl.common.mesh.process.host import Host
from meshrl.common.records.checkpoints import files_below, manifest_of

EVERY_S = 60.0  # while the run goes on, beside each new checkpoint; and after an error
COPY_S = 86_400.0  # of all that is new; what is there by then is not copied again
LAST_TRIES = 3  # of what is written at the end
AGAIN_S = 5.0  # between them
ENDING_S = 30.0  # that a mesh which is to end waits for it: half of what `meshrl down` gives it
JOB = "job.json"
SUMMARY = "summary.json"
# What changes as the run goes on: no secret of its mesh is among it.
RECORDS = (
    JOB,
    "metrics.jsonl",
    "events.jsonl",
    "samples*.jsonl",
    "report.html",
    "usage.json",
    "in_flight.json",
    "tracking.json",
)
FOLDERS = ("bundle", "ledger", "model", "trace")
CHECKPOINTS = "checkpoints"


class Outlet:
    """Of one run."""

    def __init__(self, url: str, run_dir: Path, host: Host, clock: Clock) -> None:
        self._url, self._run_dir = url, run_dir
        self._host, self._clock = host, clock
        self._there: dict[str, tuple[int, int]] | None = None  # bytes and date of what was copied
        self._due, self._committed = 0.0, ""
        self._copying: asyncio.Task[None] | None = None
        self._writer = uuid.uuid4().hex[:8]
        self._over = False  # it writes nothing more
        self.shown = without_secrets(url)
        self.trouble = ""  # why not all of it is there

    def look(self, committed: str) -> None:
        """Begins to copy what is new if it is time, or another checkpoint is committed."""
        now = self._clock.monotonic()
        if self._copying is not None and not self._copying.done():
            return
        if now < self._due and (committed == self._committed or self.trouble):
            return
        self._due = now + EVERY_S
        self._copying = asyncio.create_task(self._copied(committed), name="out")

    async def close(self, committed: str, stop: asyncio.Event) -> str:
        """Copies what is left, when the run is over or its mesh ends; why not all is there then,
        and what to do. When `stop` is set it is given `ENDING_S` more.
        """
        rest = asyncio.create_task(self._rest(committed), name="rest of out")

        async def ended() -> None:
            await stop.wait()
            await self._clock.sleep(ENDING_S)

        too_long = asyncio.create_task(ended(), name="end of out")
        try:
            await asyncio.wait([rest, too_long], return_when=asyncio.FIRST_COMPLETED)
            if rest.done():
                rest.result()
            else:
                why = f"it took longer than the {ENDING_S:g} s that a mesh waits when it ends"
                self.trouble = _not_all(why)
        finally:
            self.abandon()
            rest.cancel()
            too_long.cancel()
            await asyncio.wait([rest, too_long])
        if not self.trouble:
            return ""
        by_hand = f"copy {self._run_dir} to {self.shown} by hand, without its mesh/ and store/"
        return f"{self.trouble}; {by_hand}, unless `meshrl resume` goes on with it"

    def abandon(self) -> None:
        """Leaves the URL to others: what is being copied does not go on to the next file."""
        self._over = True
        if self._copying is not None:
            self._copying.cancel()

    async def _rest(self, committed: str) -> None:
        if self._copying is not None:
            await asyncio.wait([self._copying])
        for attempt in range(LAST_TRIES):
            if attempt:
                await self._clock.sleep(AGAIN_S)
            await self._copied(committed, last=True)
            if not self.trouble or self._over:
                return

    async def _copied(self, committed: str, last: bool = False) -> None:
        try:
            await self._host.run_blocking(self._copy, committed, last, deadline_s=COPY_S)
            self._committed, self.trouble = committed, ""
        except (MeshError, OSError) as error:
            self.trouble = _not_all(str(error))

    def _copy(self, committed: str, last: bool) -> None:
        there = AtUrl(self._url, "out", "the URL of the run", self._writer)
        if self._there is None:
            self._there = self._kept(there)
        self._place_checkpoints(there, committed)
        for folder in FOLDERS if last else FOLDERS[:1]:
            for name in files_below(self._run_dir / folder):
                self._place(there, f"{folder}/{name}")
        for pattern in RECORDS:
            for path in sorted(self._run_dir.glob(pattern)):
                self._place(there, path.name)
        if last:
            self._place(there, SUMMARY)  # as at home: who waits for it finds all the rest

    def _kept(self, there: AtUrl) -> dict[str, tuple[int, int]]:
        """What an earlier process of the run has copied, and never changes. Halves of files go, and
        all of another run that this one replaces.
        """
        found = {name: size for name, size in there.sizes().items() if _ours(name)}
        replaced = JOB in found and self._replaces(there)
        gone = {name for name in found if replaced or name.endswith(PART)}
        last = gone & {JOB}  # which tells that the rest is another run's
        for name in [*sorted(gone - last), *last]:
            self._discard(there, name)
        kept = {name for name in found if name.startswith(("bundle/", f"{CHECKPOINTS}/"))} - gone
        return {name: (found[name], 0) for name in kept}

    def _replaces(self, there: AtUrl) -> bool:
        """Whether another run lies there; no, where that cannot be told."""
        try:
            other = documents.decode(there.content(JOB), JOB)
        except Damaged:
            return False
        ours: dict[str, Any] = documents.decode((self._run_dir / JOB).read_bytes(), JOB)
        return "run_id" in ours and other.get("run_id") != ours["run_id"]

    def _place_checkpoints(self, there: AtUrl, committed: str) -> None:
        """Those up to the committed one; a manifest is there when its files are, and goes first."""
        home, known = self._run_dir / CHECKPOINTS, self._there or {}
        kept = {path.stem for path in home.glob("step-*.json") if path.stem <= committed}
        for name in sorted(kept):
            with contextlib.suppress(NotFound, FileNotFoundError):  # it goes as another has come
                for file in manifest_of(home / f"{name}.json")["files"]:
                    self._place(there, f"{CHECKPOINTS}/{name}/{file}")
                self._place(there, f"{CHECKPOINTS}/{name}.json")
        if committed not in kept:  # home has lost what it had: those there are all that is left
            return
        copied = {
            name: name.split("/")[1].removesuffix(".json")
            for name in known
            if name.startswith(f"{CHECKPOINTS}/")
        }
        for gone in sorted({*copied.values()} - kept):
            self._discard(there, f"{CHECKPOINTS}/{gone}.json")
            self._discard(there, f"{CHECKPOINTS}/{gone}")
            for name in [n for n, checkpoint in copied.items() if checkpoint == gone]:
                del known[name]

    def _place(self, there: AtUrl, name: str) -> None:
        """Copies a file if it has changed. NotFound when it is gone."""
        path, known = self._run_dir / name, self._there
        assert known is not None
        try:
            found = path.stat()
        except FileNotFoundError:
            raise NotFound(f"{path} is missing") from None
        size, date = known.get(name, (-1, 0))
        if size == found.st_size and date in (0, found.st_mtime_ns):
            return
        self._go_on()
        there.place_file(name, path)
        known[name] = (found.st_size, found.st_mtime_ns)

    def _discard(self, there: AtUrl, name: str) -> None:
        self._go_on()
        there.discard(name)

    def _go_on(self) -> None:
        """Refused when nothing more is to be written."""
        if self._over:
            raise Refused("its copying has ended")


def _not_all(why: str) -> str:
    return f"not all that the run has made is at its `out`: {why}"


def _ours(name: str) -> bool:
    """Whether a run has put a file there, whole or a half of it; others may share the URL."""
    if "/" in name:
        return name.startswith(tuple(f"{folder}/" for folder in (*FOLDERS, CHECKPOINTS)))
    records = (*RECORDS, SUMMARY)
    return any(fnmatch(name, of) or fnmatch(name, f"{of}.*{PART}") for of in records)
