"""Trackers of a run's figures beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

Each has a process of its own (`tracker_main.py`), so that one that hangs or fails costs only its
own figures. Records wait in a bounded queue. `RUN/tracking.json` stores each tracker's position,
from which a resumed run continues.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrl.common.base.errors import MeshError, PeerLost, StorageFull
from meshrl.common.base.files.documents import rename_keys
from meshrl.common.mesh.process.diagnosis.failure import read_log_end
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.directory.directory_paths import write_json
from meshrl.job.checks.job_file.optional_keys import TRACKERS
from meshrl.view.guard import WarningGuard
from meshrl.view.history import sample_files

if TYPE_CHECKING:
    from meshrl.common.base.clock import Clock
    from meshrl.common.mesh.process.child_handle import ChildProcess
    from meshrl.common.mesh.process.host import Host
    from meshrl.common.state.events import Event

PROGRESS_FILE = "tracking.json"  # of a run: how far its trackers are
NICENESS = 10

RECORDS_PER_FRAME = 64  # records in one frame
MAX_SAMPLES = 24  # of an evaluation that are shown: those of two sets and more

TrackerRecord = dict[
    str, Any
]  # kind: row | evaluation | rewind; step; of what is shown: values, wall, id, samples


@dataclass(frozen=True)
class TrackerLimits:
    """Limits of a tracker before it counts as broken."""

    max_queued: int = 4096  # records that wait; beyond, the oldest are dropped
    start_timeout_s: float = 120.0  # for a package to be imported and to reach its server
    show_timeout_s: float = 60.0  # for one frame
    close_timeout_s: float = 30.0  # for what waits at the end of a run, and as long to finish
    retry_s: float = 2.0
    max_failures: int = 3  # in a row, until it is given up


@dataclass
class TrackerProgress:
    """Position of one tracker; stored in the run directory."""

    id: str  # the run's id, as the tracker knows it
    step: int = 0  # rows up to this one are shown
    shown_evaluations: list[str] = field(default_factory=list)  # tags that are shown
    dropped: int = 0  # records that were never shown
    last_error: str = ""


_OLD_PROGRESS_KEYS = {"evaluations": "shown_evaluations", "trouble": "last_error"}


def flatten_scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return all finite numbers of nested tables, by their path: `workers/g1`.

    None and texts are left out.
    """
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten_scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and abs(value) < float("inf"):  # not for NaN either
            found[prefix + key] = float(value)
    return found


class TrackerProcess:
    """Queue and process of one tracker.

    `argv` runs the receiver of the frames (see `tracker_main.py`): first a description of the run,
    then lists of records; each frame is answered by one.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        description: Mapping[str, Any],
        progress: TrackerProgress,
        host: Host,
        clock: Clock,
        log: Path,
        limits: TrackerLimits | None = None,
    ) -> None:
        self._limits = limits or TrackerLimits()
        self.name, self.progress = name, progress
        self._argv, self._description = list(argv), dict(description)
        self._host, self._clock, self._log = host, clock, log
        self._queue: deque[TrackerRecord] = deque()
        self._wakeup = asyncio.Event()
        self._is_closing = False
        self._failure_count = 0  # in a row
        self._task: asyncio.Task[None] | None = None

    def enqueue(self, records: Iterable[TrackerRecord]) -> None:
        """Add records without waiting; skip those that are shown already."""
        for record in records:
            step, kind = int(record["step"]), record["kind"]
            if kind == "rewind":
                retained = (r for r in self._queue if r["kind"] == "rewind" or r["step"] <= step)
                self._queue = deque([*retained, record])
                self.progress.step = min(self.progress.step, step)
            elif kind == "row":
                self._queue += [record] if step > self.progress.step else []
            elif record["id"] not in self.progress.shown_evaluations:
                self._queue.append(record)
        while len(self._queue) > self._limits.max_queued:
            self._queue.popleft()
            self.progress.dropped += 1
        self._wakeup.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"tracker {self.name}")

    async def close(self) -> None:
        """Wait for the queued records, up to the deadline; the rest counts as dropped."""
        self._is_closing = True
        self._wakeup.set()
        task, self._task = self._task, None
        if task is not None:
            _, late = await asyncio.wait([task], timeout=2 * self._limits.close_timeout_s)
            if late:
                task.cancel()
                await asyncio.wait([task], timeout=1.0)
                own_words = read_log_end(self._log, 1) or "nothing yet"
                self.progress.last_error = f"no answer in time; {self._log} ends: {own_words}"
        self.progress.dropped += len(self._queue)
        self._queue.clear()

    async def _run(self) -> None:
        while self._failure_count < self._limits.max_failures:
            child: ChildProcess | None = None
            try:
                child = self._host.spawn(
                    self._argv,
                    name=self.name,
                    log=self._log,
                    options=SpawnOptions(own_session=True, niceness=NICENESS, has_channel=True),
                )
                await self._serve(child)
                return
            except (MeshError, OSError) as error:
                self._failure_count += 1
                own_words = read_log_end(self._log, 1)  # the package's error is its last line
                self.progress.last_error = ": ".join(filter(None, (str(error), own_words)))
                if self._is_closing:
                    return
            finally:
                if child is not None:
                    child.kill()
                    child.close()
            await self._clock.sleep(self._limits.retry_s)
        self.progress.last_error += f"; the tracker was abandoned, its log is {self._log}"

    async def _serve(self, child: ChildProcess) -> None:
        """Send the queued records, until the queue is closed and empty."""
        limits = self._limits
        await child.send(json.dumps(self._description).encode(), limits.show_timeout_s)
        await child.recv(limits.start_timeout_s)
        while True:
            while batch := list(itertools.islice(self._queue, RECORDS_PER_FRAME)):
                await child.send(json.dumps(batch).encode(), limits.show_timeout_s)
                await child.recv(
                    limits.close_timeout_s if self._is_closing else limits.show_timeout_s
                )
                self._mark_shown(batch)
            if self._is_closing:
                break
            self._wakeup.clear()
            await self._wakeup.wait()
        child.close()
        if await child.wait(limits.close_timeout_s) != 0:
            raise PeerLost("it exited with an error", where=self.name)

    def _mark_shown(self, batch: list[TrackerRecord]) -> None:
        self._failure_count = 0
        for record in batch:
            if record not in self._queue:
                continue  # a rewind has taken it back
            self._queue.remove(record)
            if record["kind"] == "row":
                self.progress.step = record["step"]
            elif record["kind"] == "evaluation":
                self.progress.shown_evaluations.append(record["id"])


class Trackers:
    """Trackers of one run."""

    def __init__(self, trackers: list[TrackerProcess], path: Path) -> None:
        self.trackers, self._path = trackers, path
        self._guard = WarningGuard()

    @classmethod
    def from_job_file(
        cls,
        run_dir: Path,
        job_file_content: Mapping[str, Any],
        stored_progress: Mapping[str, Any],
        host: Host,
        clock: Clock,
    ) -> Trackers:
        """Return the trackers that a run's job requests, at their positions from an earlier
        session.

        `job_file_content` is the content of `job.json`, `stored_progress` the positions that
        session wrote.
        """
        path, guard = run_dir / PROGRESS_FILE, WarningGuard()
        settings = job_file_content["document"].get("tracking", {})
        trackers = []
        for name in TRACKERS:
            if not settings.get(name):
                continue
            with guard(f"tracking by {name}"):
                own = stored_progress.get(name) or {
                    "id": f"{job_file_content['job']}-{uuid.uuid4().hex[:8]}"
                }
                progress = TrackerProgress(
                    **{**rename_keys(own, _OLD_PROGRESS_KEYS), "last_error": ""}
                )
                target = settings[name]
                if name == "tensorboard" and target is True:
                    target = run_dir / name
                elif name == "tensorboard":
                    target = Path(str(target)).expanduser().absolute()
                about = {
                    "target": str(target),
                    "id": progress.id,
                    "job": job_file_content["job"],
                    "run_dir": str(run_dir),
                    "document": job_file_content["document"],
                }
                argv = [sys.executable, "-m", "meshrl.view.trackers.tracker_main", name]
                log = run_dir / "mesh/logs" / f"{name}.log"
                trackers.append(TrackerProcess(name, argv, about, progress, host, clock, log))
        return cls(trackers, path)

    def enqueue(self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Event]) -> None:
        """Add records without waiting; each tracker skips those that it has shown."""
        with self._guard("tracking"):
            self._enqueue_all(self._build_records(rows, evaluations))

    def _build_records(
        self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Event]
    ) -> list[TrackerRecord]:
        """Return what trackers show of steps and evaluations."""
        records: list[TrackerRecord] = [
            {
                "kind": "row",
                "step": row["step"],
                "wall": row["wall"],
                "values": flatten_scalars(row),
            }
            for row in rows
        ]
        samples = (
            sample_files.read_samples(self._path.parent) if evaluations and self.trackers else []
        )
        for event in evaluations:
            fields = {k: v for k, v in event.fields.items() if k not in ("step", "lineage")}
            step, tag = int(event.fields["step"]), event.fields["tag"]
            evaluation_samples = [sample for sample in samples if sample.get("evaluation") == tag]
            table_rows = sample_files.make_table_rows(evaluation_samples[-MAX_SAMPLES:])
            if lineage := int(event.fields.get("lineage", 0)):
                tag += f"@{lineage}"  # it may have been shown in an abandoned one
            values = flatten_scalars(fields, "evaluation/")
            wall = event.ms / 1000
            record = {"kind": "evaluation", "step": step, "wall": wall, "values": values, "id": tag}
            records.append(record | {"samples": table_rows})
        return records

    def rewind(self, step: int) -> None:
        """Drop rows after `step`, which are not part of the run any more."""
        with self._guard("tracking"):
            self._enqueue_all([{"kind": "rewind", "step": step}])

    def _enqueue_all(self, records: list[TrackerRecord]) -> None:
        if records:
            for tracker in self.trackers:
                tracker.enqueue(records)
            self._write_progress()

    def _write_progress(self) -> None:
        """Write the progress; a full disk only delays it: a tracker may show a record twice."""
        if self.trackers:
            with suppress(StorageFull):
                write_json(self._path, {t.name: asdict(t.progress) for t in self.trackers})

    async def close(self) -> None:
        """Show the rest, within a minute, and print what could not be shown."""
        with self._guard("tracking"):
            await asyncio.gather(*(tracker.close() for tracker in self.trackers))
            self._write_progress()
        for tracker in self.trackers:
            if tracker.progress.dropped or tracker.progress.last_error:
                message = f"{tracker.name}: {tracker.progress.dropped} records were not shown"
                print(f"{message}. {tracker.progress.last_error}", file=sys.stderr)
