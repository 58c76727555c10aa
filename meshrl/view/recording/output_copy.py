"""Copier of a run's output to the URL that its job names in `out`.

The copy is a run directory with the files that other hosts can use. The directory on the run host
stays the run's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, MeshError, NotFound, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.files.remote_directory import PART_SUFFIX, RemoteDirectory, redact_url
from meshrl.common.mesh.process.host import Host
from meshrl.common.records.checkpoints import list_files, read_manifest

COPY_INTERVAL_S = 60.0  # while the run goes on, beside each new checkpoint; and after an error
COPY_TIMEOUT_S = 86_400.0  # of one copy; files copied by then are not copied again
MAX_FINAL_TRIES = 3  # tries of the last copy
RETRY_S = 5.0  # between these tries
STOP_TIMEOUT_S = 30.0  # wait of a stopping mesh: half of the time that `meshrl down` grants it
JOB_FILE = "job.json"
SUMMARY_FILE = "summary.json"
# Files that change during the run: none has a secret of its mesh.
RECORD_PATTERNS = (
    JOB_FILE,
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


class OutputCopier:
    """Copier of one run's output."""

    def __init__(self, url: str, run_dir: Path, host: Host, clock: Clock) -> None:
        self._url, self._run_dir = url, run_dir
        self._host, self._clock = host, clock
        self._copied_files: dict[str, tuple[int, int]] | None = (
            None  # bytes and date of copied files
        )
        self._next_copy_at_s, self._committed = 0.0, ""
        self._copy_task: asyncio.Task[None] | None = None
        self._writer_id = uuid.uuid4().hex[:8]
        self._is_closed = False  # nothing more is written
        self.public_url = redact_url(url)
        self.error = ""  # why files are missing

    def copy_if_due(self, committed: str) -> None:
        """Start to copy new files if it is time, or another checkpoint is committed."""
        now = self._clock.monotonic()
        if self._copy_task is not None and not self._copy_task.done():
            return
        if now < self._next_copy_at_s and (committed == self._committed or self.error):
            return
        self._next_copy_at_s = now + COPY_INTERVAL_S
        self._copy_task = asyncio.create_task(self._copy_recording_errors(committed), name="out")

    async def close(self, committed: str, stop: asyncio.Event) -> str:
        """Copy the rest when the run is over or its mesh ends; return why files are missing, and
        what to do.

        When `stop` is set the copy gets `STOP_TIMEOUT_S` more.
        """
        rest = asyncio.create_task(self._copy_rest(committed), name="rest of out")

        async def wait_for_timeout() -> None:
            await stop.wait()
            await self._clock.sleep(STOP_TIMEOUT_S)

        too_long = asyncio.create_task(wait_for_timeout(), name="end of out")
        try:
            await asyncio.wait([rest, too_long], return_when=asyncio.FIRST_COMPLETED)
            if rest.done():
                rest.result()
            else:
                why = f"it exceeded the {STOP_TIMEOUT_S:g} s that a mesh waits when it stops"
                self.error = _describe_incomplete(why)
        finally:
            self.abandon()
            rest.cancel()
            too_long.cancel()
            await asyncio.wait([rest, too_long])
        if not self.error:
            return ""
        by_hand = f"copy {self._run_dir} without mesh/ and store/ to {self.public_url} manually"
        return f"{self.error}; {by_hand}, or run `meshrl resume`, which continues the copy"

    def abandon(self) -> None:
        """Stop writing to the URL: the current copy does not continue with the next file."""
        self._is_closed = True
        if self._copy_task is not None:
            self._copy_task.cancel()

    async def _copy_rest(self, committed: str) -> None:
        if self._copy_task is not None:
            await asyncio.wait([self._copy_task])
        for attempt in range(MAX_FINAL_TRIES):
            if attempt:
                await self._clock.sleep(RETRY_S)
            await self._copy_recording_errors(committed, is_final=True)
            if not self.error or self._is_closed:
                return

    async def _copy_recording_errors(self, committed: str, is_final: bool = False) -> None:
        try:
            await self._host.run_blocking(
                self._copy, committed, is_final, deadline_s=COPY_TIMEOUT_S
            )
            self._committed, self.error = committed, ""
        except (MeshError, OSError) as error:
            self.error = _describe_incomplete(str(error))

    def _copy(self, committed: str, is_final: bool) -> None:
        there = RemoteDirectory(self._url, "out", "the URL of the run", self._writer_id)
        if self._copied_files is None:
            self._copied_files = self._list_copied_files(there)
        self._copy_checkpoints(there, committed)
        for folder in FOLDERS if is_final else FOLDERS[:1]:
            for name in list_files(self._run_dir / folder):
                self._copy_file(there, f"{folder}/{name}")
        for pattern in RECORD_PATTERNS:
            for path in sorted(self._run_dir.glob(pattern)):
                self._copy_file(there, path.name)
        if is_final:
            # Last, as on the run host: its readers find all other files.
            self._copy_file(there, SUMMARY_FILE)

    def _list_copied_files(self, remote: RemoteDirectory) -> dict[str, tuple[int, int]]:
        """Return the files that an earlier process of the run has copied, and never changes.

        Partial files are removed, and all of another run that this one replaces.
        """
        found = {
            name: size for name, size in remote.list_file_sizes().items() if _is_own_file(name)
        }
        replaced = JOB_FILE in found and self._is_other_run(remote)
        obsolete = {name for name in found if replaced or name.endswith(PART_SUFFIX)}
        last = obsolete & {JOB_FILE}  # which identifies the rest as another run's
        for name in [*sorted(obsolete - last), *last]:
            self._remove(remote, name)
        retained = {
            name for name in found if name.startswith(("bundle/", f"{CHECKPOINTS}/"))
        } - obsolete
        return {name: (found[name], 0) for name in retained}

    def _is_other_run(self, remote: RemoteDirectory) -> bool:
        """Return True if another run is at the URL; False if that cannot be determined."""
        try:
            other = documents.decode(remote.read_file(JOB_FILE), JOB_FILE)
        except CorruptData:
            return False
        ours: dict[str, Any] = documents.decode((self._run_dir / JOB_FILE).read_bytes(), JOB_FILE)
        return "run_id" in ours and other.get("run_id") != ours["run_id"]

    def _copy_checkpoints(self, remote: RemoteDirectory, committed: str) -> None:
        """Copy the checkpoints up to the committed one.

        A manifest is written after its files, and removed before them.
        """
        home, known = self._run_dir / CHECKPOINTS, self._copied_files or {}
        retained = {path.stem for path in home.glob("step-*.json") if path.stem <= committed}
        for name in sorted(retained):
            # Retention may remove the checkpoint during the copy.
            with contextlib.suppress(NotFound, FileNotFoundError):
                for file in read_manifest(home / f"{name}.json")["files"]:
                    self._copy_file(remote, f"{CHECKPOINTS}/{name}/{file}")
                self._copy_file(remote, f"{CHECKPOINTS}/{name}.json")
        # The run host has lost its checkpoints: the copies are the only ones.
        if committed not in retained:
            return
        copied = {
            name: name.split("/")[1].removesuffix(".json")
            for name in known
            if name.startswith(f"{CHECKPOINTS}/")
        }
        for obsolete in sorted({*copied.values()} - retained):
            self._remove(remote, f"{CHECKPOINTS}/{obsolete}.json")
            self._remove(remote, f"{CHECKPOINTS}/{obsolete}")
            for name in [n for n, checkpoint in copied.items() if checkpoint == obsolete]:
                del known[name]

    def _copy_file(self, remote: RemoteDirectory, name: str) -> None:
        """Copy a file if it has changed. Raises NotFound if it no longer exists."""
        path, known = self._run_dir / name, self._copied_files
        assert known is not None
        try:
            found = path.stat()
        except FileNotFoundError:
            raise NotFound(f"{path} is missing") from None
        size, date = known.get(name, (-1, 0))
        if size == found.st_size and date in (0, found.st_mtime_ns):
            return
        self._require_open()
        remote.upload_file(name, path)
        known[name] = (found.st_size, found.st_mtime_ns)

    def _remove(self, remote: RemoteDirectory, name: str) -> None:
        self._require_open()
        remote.remove(name)

    def _require_open(self) -> None:
        """Raise Refused when nothing more is to be written."""
        if self._is_closed:
            raise Refused("the copy has been closed")


def _describe_incomplete(reason: str) -> str:
    return f"some files of the run are missing at its `out`: {reason}"


def _is_own_file(name: str) -> bool:
    """Return True if a run wrote the file, complete or partial; other files may share the URL."""
    if "/" in name:
        return name.startswith(tuple(f"{folder}/" for folder in (*FOLDERS, CHECKPOINTS)))
    records = (*RECORD_PATTERNS, SUMMARY_FILE)
    return any(fnmatch(name, of) or fnmatch(name, f"{of}.*{PART_SUFFIX}") for of in records)
