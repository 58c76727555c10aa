"""Shows a run's figures in trackers beside `metrics.jsonl`: TensorBoard, Weights & Biases, trackio.

Each has a process of its own (`tracking.py`), so that one that hangs or fails costs
nothing but what it does not show. What is to be shown waits in a bounded queue; `RUN/tracking.json`
says how far each tracker has come, and a resumed run goes on from there.
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
from meshrl.common.mesh.process.starting import Spawning
from meshrl.directory.places import write_json
from meshrl.job.checks.file.extras import TRACKERS
from meshrl.view.guard import WarningGuard
from meshrl.view.history import samples

if TYPE_CHECKING:
    from meshrl.common.base.clock import Clock
    from meshrl.common.mesh.process.handle import Child
    from meshrl.common.mesh.process.host import Host
    from meshrl.common.state.events import Event

TRACKING = "tracking.json"  # of a run: how far its trackers are
NICE = 10

BATCH = 64  # records in one frame
SAMPLES = 24  # of an evaluation that are shown: those of two sets and more

TrackerRecord = dict[
    str, Any
]  # kind: row | evaluation | rewind; step; of what is shown: values, wall, id, samples


@dataclass(frozen=True)
class TrackerLimits:
    """What a tracker is allowed before it counts as broken."""

    queue: int = 4096  # records that wait; beyond, the oldest are dropped
    start_s: float = 120.0  # for a package to be imported and to reach its server
    show_s: float = 60.0  # for one frame
    close_s: float = 30.0  # for what waits at the end of a run, and as long to finish
    retry_s: float = 2.0
    failures: int = 3  # in a row, until it is given up


@dataclass
class TrackerProgress:
    """How far one tracker has come; kept in the run directory."""

    id: str  # the run's id, as the tracker knows it
    step: int = 0  # rows up to this one are shown
    evaluations: list[str] = field(default_factory=list)  # tags that are shown
    dropped: int = 0  # records that were never shown
    trouble: str = ""  # the last


def scalars(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All finite numbers of nested tables, by their path: `workers/g1`. None and texts are left
    out.
    """
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and abs(value) < float("inf"):  # not for NaN either
            found[prefix + key] = float(value)
    return found


class TrackerProcess:
    """One tracker's queue and process. `argv` runs what takes the frames (see
    `tracking.py`): first what the run is, then lists of records; each frame is answered by one.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        about: Mapping[str, Any],
        progress: TrackerProgress,
        host: Host,
        clock: Clock,
        log: Path,
        limits: TrackerLimits | None = None,
    ) -> None:
        self._limits = limits or TrackerLimits()
        self.name, self.progress = name, progress
        self._argv, self._about = list(argv), dict(about)
        self._host, self._clock, self._log = host, clock, log
        self._waiting: deque[TrackerRecord] = deque()
        self._came = asyncio.Event()
        self._closing = False
        self._failures = 0  # in a row
        self._task: asyncio.Task[None] | None = None

    def offer(self, records: Iterable[TrackerRecord]) -> None:
        """Never waits; what is shown already is left out."""
        for record in records:
            step, kind = int(record["step"]), record["kind"]
            if kind == "rewind":
                kept = (r for r in self._waiting if r["kind"] == "rewind" or r["step"] <= step)
                self._waiting = deque([*kept, record])
                self.progress.step = min(self.progress.step, step)
            elif kind == "row":
                self._waiting += [record] if step > self.progress.step else []
            elif record["id"] not in self.progress.evaluations:
                self._waiting.append(record)
        while len(self._waiting) > self._limits.queue:
            self._waiting.popleft()
            self.progress.dropped += 1
        self._came.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"tracker {self.name}")

    async def close(self) -> None:
        """Waits for what is still to be shown, up to the deadline; the rest counts as dropped."""
        self._closing = True
        self._came.set()
        task, self._task = self._task, None
        if task is not None:
            _, late = await asyncio.wait([task], timeout=2 * self._limits.close_s)
            if late:
                task.cancel()
                await asyncio.wait([task], timeout=1.0)
        self.progress.dropped += len(self._waiting)
        self._waiting.clear()

    async def _run(self) -> None:
        while self._failures < self._limits.failures:
            child: Child | None = None
            try:
                child = self._host.spawn(
                    self._argv,
                    name=self.name,
                    log=self._log,
                    how=Spawning(own_session=True, nice=NICE, pipe=True),
                )
                await self._serve(child)
                return
            except (MeshError, OSError) as error:
                self._failures += 1
                self.progress.trouble = str(error)
                if self._closing:
                    return
            finally:
                if child is not None:
                    child.kill()
                    child.close()
            await self._clock.sleep(self._limits.retry_s)
        self.progress.trouble += f"; given up, its log is {self._log}"

    async def _serve(self, child: Child) -> None:
        """Shows what waits, until the queue is closed and empty."""
        limits = self._limits
        await child.send(json.dumps(self._about).encode(), limits.show_s)
        await child.recv(limits.start_s)
        while True:
            while batch := list(itertools.islice(self._waiting, BATCH)):
                await child.send(json.dumps(batch).encode(), limits.show_s)
                await child.recv(limits.close_s if self._closing else limits.show_s)
                self._shown(batch)
            if self._closing:
                break
            self._came.clear()
            await self._came.wait()
        child.close()
        if await child.wait(limits.close_s) != 0:
            raise PeerLost("it did not finish in order", where=self.name)

    def _shown(self, batch: list[TrackerRecord]) -> None:
        self._failures = 0
        for record in batch:
            if record not in self._waiting:
                continue  # a rewind has taken it back
            self._waiting.remove(record)
            if record["kind"] == "row":
                self.progress.step = record["step"]
            elif record["kind"] == "evaluation":
                self.progress.evaluations.append(record["id"])


class Trackers:
    """The trackers of one run."""

    def __init__(self, trackers: list[TrackerProcess], path: Path) -> None:
        self.trackers, self._path = trackers, path
        self._guard = WarningGuard()

    @classmethod
    def of(
        cls,
        run_dir: Path,
        held: Mapping[str, Any],
        known: Mapping[str, Any],
        host: Host,
        clock: Clock,
    ) -> Trackers:
        """The trackers that the job of a run directory asks for, where an earlier session left
        them. `held` is what `job.json` says, `known` what that session wrote down.
        """
        path, guard = run_dir / TRACKING, WarningGuard()
        asked = held["document"].get("tracking", {})
        made = []
        for name in TRACKERS:
            if not asked.get(name):
                continue
            with guard(f"tracking by {name}"):
                own = known.get(name) or {"id": f"{held['job']}-{uuid.uuid4().hex[:8]}"}
                progress = TrackerProgress(**{**own, "trouble": ""})
                target = asked[name]
                if name == "tensorboard" and target is True:
                    target = run_dir / name
                elif name == "tensorboard":
                    target = Path(str(target)).expanduser().absolute()
                about = {
                    "target": str(target),
                    "id": progress.id,
                    "job": held["job"],
                    "run_dir": str(run_dir),
                    "document": held["document"],
                }
                argv = [sys.executable, "-m", "meshrl.view.trackers.tracking", name]
                log = run_dir / "mesh/logs" / f"{name}.log"
                made.append(TrackerProcess(name, argv, about, progress, host, clock, log))
        return cls(made, path)

    def offer(self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Event]) -> None:
        """Never waits; what a tracker has shown already it leaves out."""
        with self._guard("tracking"):
            self._tell(self._records(rows, evaluations))

    def _records(
        self, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Event]
    ) -> list[TrackerRecord]:
        """Return what trackers show of steps and evaluations."""
        records: list[TrackerRecord] = [
            {"kind": "row", "step": row["step"], "wall": row["wall"], "values": scalars(row)}
            for row in rows
        ]
        kept = samples.read(self._path.parent) if evaluations and self.trackers else []
        for event in evaluations:
            fields = {k: v for k, v in event.fields.items() if k not in ("step", "lineage")}
            step, tag = int(event.fields["step"]), event.fields["tag"]
            of_it = [sample for sample in kept if sample.get("evaluation") == tag]
            rows_of_it = samples.table(of_it[-SAMPLES:])
            if lineage := int(event.fields.get("lineage", 0)):
                tag += f"@{lineage}"  # it may have been shown in an abandoned one
            values = scalars(fields, "evaluation/")
            wall = event.ms / 1000
            record = {"kind": "evaluation", "step": step, "wall": wall, "values": values, "id": tag}
            records.append(record | {"samples": rows_of_it})
        return records

    def rewind(self, step: int) -> None:
        """Rows after `step` are not part of the run any more."""
        with self._guard("tracking"):
            self._tell([{"kind": "rewind", "step": step}])

    def _tell(self, records: list[TrackerRecord]) -> None:
        if records:
            for tracker in self.trackers:
                tracker.offer(records)
            self._keep()

    def _keep(self) -> None:
        """On a full disk the next time: a tracker is at worst shown something twice."""
        if self.trackers:
            with suppress(StorageFull):
                write_json(self._path, {t.name: asdict(t.progress) for t in self.trackers})

    async def close(self) -> None:
        """Shows what is left, within a minute, and says what could not be shown."""
        with self._guard("tracking"):
            await asyncio.gather(*(tracker.close() for tracker in self.trackers))
            self._keep()
        for tracker in self.trackers:
            if tracker.progress.dropped or tracker.progress.trouble:
                trouble = f"{tracker.name}: {tracker.progress.dropped} records were not shown"
                print(f"{trouble}. {tracker.progress.trouble}", file=sys.stderr)
