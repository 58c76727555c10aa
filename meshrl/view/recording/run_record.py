"""Record of a run's events and metrics in files: appended while it runs, rebuilt when corrupt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import CorruptData, HistoryLost
from meshrl.common.base.files import corruption
from meshrl.common.base.files.json_lines import LineFile, Row, iterate_rows, read_lines
from meshrl.common.job.evaluation_plan import AFTER
from meshrl.common.mesh.process.host import Host
from meshrl.common.state import events, readers, steps
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.planner_reports import MOVE_OUTCOME_EVENT
from meshrl.common.state.redis.client import StateClient
from meshrl.directory import job_file
from meshrl.directory.directory_paths import read_json
from meshrl.view.history.job_events import JobEventFilter

MAX_ROWS_IN_MEMORY = 1000  # rows that are held in memory, of 7 KB each; the others are in the file
# Recorded events that are retained: they determine which evaluations are valid.
EVALUATION_EVENTS = ("evaluation", "changed", "lineage")
FREQUENT_EVENTS = ("opened", "ready", "stale", "requeued", "dropped", "filtered", "step")
# For what one part of a mend does to a file: 25 MB/s make 90 GB. A thread cannot be ended, and a
# second one beside it would write the same file.
REPAIR_TIMEOUT_S = 3600.0
EVENTS_FILE, METRICS_FILE, RECORD_END_FILE = "events.jsonl", "metrics.jsonl", "in_flight.json"


@dataclass(frozen=True)
class RecordEnd:
    """End of the record when its mesh was last stopped, and the trajectories in flight then."""

    event: str = "0"  # the last one
    event_count: int = 0  # lines
    in_flight: int = 0

    @classmethod
    def read(cls, run_dir: Path) -> RecordEnd | None:
        """Read the record's end; None if there is none, as after a crash. Raises CorruptData."""
        path = run_dir / RECORD_END_FILE
        if not path.is_file():
            return None
        document = read_json(path)
        try:
            return cls(
                str(document["event"]), int(document.get("events", 0)), int(document["samples"])
            )
        except (KeyError, ValueError) as error:
            raise CorruptData(f"it has no {error}", where=str(path)) from error


def parse_event(row: Row) -> Event:
    """Return the event of a line."""
    return Event(str(row["id"]), int(row["ms"]), str(row["kind"]), row["fields"])


def read_rare_events(run_dir: Path) -> Iterator[Event]:
    """Yield the events of a run, but of each group and step only the first."""
    known_kinds: set[str] = set()
    for row in iterate_rows(run_dir / EVENTS_FILE):
        kind = str(row["kind"])
        if kind not in FREQUENT_EVENTS or kind not in known_kinds:
            known_kinds.add(kind)
            yield parse_event(row)


def read_move_outcomes(run_dir: Path) -> list[Event]:
    """Return the judged moves in the record of a run on this host."""
    return read_recorded_events(run_dir, [MOVE_OUTCOME_EVENT], f'"{MOVE_OUTCOME_EVENT}"')


def read_recorded_events(run_dir: Path, kinds: Collection[str], text: str) -> list[Event]:
    """Return the events of these kinds that contain a text, in the record of a run on this host.

    Redis retains events for some minutes only.
    """
    rows = iterate_rows(run_dir / EVENTS_FILE, text)
    return [parse_event(row) for row in rows if row["kind"] in kinds]


def find_last_step(rows: Sequence[Row]) -> int:
    """Return the last step of ordered rows; 0 when there is none."""
    return int(rows[-1]["step"]) if rows else 0


def find_last_recorded_step(rows: Iterable[Row]) -> int:
    """Return the last step that the event lines of the current lineage record."""
    done = 0
    for row in rows:
        if row["kind"] == "step":
            done = int(row["fields"]["step"])
        elif row["kind"] in ("lineage", "restored"):
            done = int(row["fields"]["version"])
    return done


def thin_rows(rows: Iterable[Row], min_rows: int = MAX_ROWS_IN_MEMORY) -> list[Row]:
    """Return some rows for a curve, evenly spaced, and the last one.

    Of more than `min_rows` rows, between `min_rows` and twice as many remain.
    """
    retained: list[Row] = []
    every, last = 1, None
    for place, row in enumerate(rows):
        last = row
        if place % every == 0:
            retained.append(row)
        if len(retained) > 2 * min_rows:
            retained, every = retained[::2], 2 * every
    return retained if last is None or retained[-1] is last else [*retained, last]


@dataclass
class RunRecordWriter:
    """Writer of the two files of one run. `faults`: problems to repair, by the file's name."""

    run_dir: Path
    job: str
    faults: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events = LineFile(self.run_dir / EVENTS_FILE)
        self._metrics = LineFile(self.run_dir / METRICS_FILE)
        for file in (self._events, self._metrics):
            if file.content.corruption:
                self.faults[file.path.name] = file.content.corruption
        found = self._events.content.rows
        self.evaluation_events = [
            parse_event(row) for row in found if row["kind"] in EVALUATION_EVENTS
        ]
        self._job_filter = JobEventFilter(self.job, map(parse_event, found))
        self.recent_rows = self._metrics.content.rows[-MAX_ROWS_IN_MEMORY:]  # the last ones
        done, there = find_last_recorded_step(found), find_last_step(self.recent_rows)
        if there < done:  # rows precede the events of their steps
            self.faults.setdefault(
                METRICS_FILE, f"it ends at step {there}, but {done} steps were recorded"
            )
        self.last_event_id = str(found[-1]["id"]) if found else "0"
        self._expected_events = self._events.content.next_number  # lines up to `last`
        self._reported_loss_at = (
            ""  # the last event of a record of which Redis knows that some are lost
        )
        self._events.release_rows()
        self._metrics.release_rows()

    def apply_record_end(self, record_end: RecordEnd | None) -> None:
        """Apply the end of an earlier session: a file that ends before it is an older copy, or
        truncated.
        """
        if record_end is not None and events.parse_event_id(
            record_end.event
        ) > events.parse_event_id(self.last_event_id):
            self.faults.setdefault(
                EVENTS_FILE, f"it ends before the recorded event {record_end.event}"
            )
            self.last_event_id, self._expected_events = record_end.event, record_end.event_count

    @property
    def event_count(self) -> int:
        """Number of event lines."""
        return self._events.next_number

    def check_files(self) -> None:
        """Record a fault for each file that another process has changed or removed."""
        for file in (self._events, self._metrics):
            try:
                file.require_unchanged()
            except CorruptData as error:
                self.faults.setdefault(file.path.name, error.message)

    def add_events(self, new_events: Sequence[Event]) -> None:
        """Append events. Raises StorageFull, with nothing added."""
        self._events.append([asdict(event) for event in new_events])
        self.last_event_id, self._expected_events = new_events[-1].id, self._events.next_number

    def add_rows(self, new_rows: Sequence[Row]) -> None:
        """Append rows. Raises StorageFull, with nothing added."""
        self._metrics.append(new_rows)
        self.recent_rows += new_rows
        if len(self.recent_rows) > 2 * MAX_ROWS_IN_MEMORY:
            del self.recent_rows[:-MAX_ROWS_IN_MEMORY]

    def iterate_rows(self) -> Iterator[Row]:
        """Yield all rows, one by one from the file."""
        return iterate_rows(self._metrics.path)

    def truncate_rows(self, last_step: int) -> None:
        """Remove the rows of steps after `last_step`. Raises StorageFull, with nothing changed."""
        retained = [row for row in self.iterate_rows() if row["step"] <= last_step]
        self._metrics.replace(retained)
        self.recent_rows = retained[-MAX_ROWS_IN_MEMORY:]

    def select_own(self, candidates: Sequence[Event]) -> list[Event]:
        """Return the run's own events, of events that follow the earlier ones."""
        return [event for event in candidates if self._job_filter.accept(event)]

    async def repair_events(self, state: StateClient, host: Host) -> dict[str, Any]:
        """Rebuild a corrupt file from its readable lines and Redis; return the fields of an event.

        Raises StateUnavailable, DeadlineExceeded or StorageFull; then the whole repair is to be
        repeated. The work on the file runs off the event loop. What follows cannot fail: an
        installed file is never taken for a corrupt one.
        """
        why = self.faults[EVENTS_FILE]
        found = await host.run_blocking(read_lines, self._events.path, deadline_s=REPAIR_TIMEOUT_S)
        streamed = await events.read_remaining(state)
        known, lost_count = await host.run_blocking(
            self._merge_events, found.rows, streamed, deadline_s=REPAIR_TIMEOUT_S
        )
        then = "rebuilt from the event stream in Redis"
        if lost_count > 0:
            then = (
                f"{lost_count} of its events are lost: the event stream in Redis no longer has them"
            )
        if lost_count > 0 and self._reported_loss_at != self.last_event_id:
            since = str(found.rows[found.intact_rows - 1]["id"]) if found.intact_rows else "0"
            history_loss = HistoryLost(then, since=since, through=self.last_event_id)
            await readers.record_history_loss(state, self.job, str(self.run_dir), history_loss)
            self._reported_loss_at = self.last_event_id
        rewrite = partial(self._events.replace, [asdict(event) for event in known])
        quarantined_path = await host.run_blocking(
            rewrite, self.run_dir, deadline_s=REPAIR_TIMEOUT_S
        )
        del self.faults[EVENTS_FILE]
        self.evaluation_events = [event for event in known if event.kind in EVALUATION_EVENTS]
        self._job_filter = JobEventFilter(self.job, known)
        self.last_event_id = known[-1].id if known else "0"
        self._expected_events = self._events.next_number
        return corruption.make_event_fields(
            "events", self._events.path, why, then, job=self.job, quarantined_path=quarantined_path
        )

    def _merge_events(self, rows: list[Row], streamed: list[Event]) -> tuple[list[Event], int]:
        """Return the run's events of lines and stream, each once, in order, and the number lost."""
        written = {str(row["id"]) for row in rows}
        union = {event.id: event for event in (*map(parse_event, rows), *streamed)}
        in_order = sorted(union.values(), key=lambda event: events.parse_event_id(event.id))
        belonging = JobEventFilter(self.job)
        known = [event for event in in_order if belonging.accept(event) or event.id in written]
        last = events.parse_event_id(self.last_event_id)
        return known, self._expected_events - sum(
            events.parse_event_id(event.id) <= last for event in known
        )

    async def repair_metrics(self, state: StateClient, host: Host) -> dict[str, Any]:
        """Rebuild a corrupt file of step rows; return the fields of an event."""
        why = self.faults[METRICS_FILE]
        known = await steps.read_step_rows(state, self.job)

        def union() -> list[Row]:
            """Return all rows that are readable or `known`, each once, in order."""
            found = {
                int(row["step"]): row for row in (*self.iterate_rows(), *self.recent_rows, *known)
            }
            return [found[step] for step in sorted(found)]

        rows = await host.run_blocking(union, deadline_s=REPAIR_TIMEOUT_S)
        then = "rebuilt from the steps in Redis"
        if len(rows) < find_last_step(rows):
            then = (
                f"{find_last_step(rows) - len(rows)} of its steps are lost: Redis no longer "
                "has them"
            )
        quarantined_path = await host.run_blocking(
            self._metrics.replace, rows, self.run_dir, deadline_s=REPAIR_TIMEOUT_S
        )
        del self.faults[METRICS_FILE]
        self.recent_rows = rows[-MAX_ROWS_IN_MEMORY:]
        return corruption.make_event_fields(
            "metrics",
            self._metrics.path,
            why,
            then,
            job=self.job,
            quarantined_path=quarantined_path,
        )


def list_corrupt_files(run_dir: Path) -> list[str]:
    """Return the corrupt files of a run, a sentence each; change nothing."""
    found = [
        f"{run_dir / name}: {why}"
        for name in (EVENTS_FILE, METRICS_FILE)
        if (why := read_lines(run_dir / name).corruption)
    ]
    for name in (RECORD_END_FILE, "job.json", "usage.json", "summary.json"):
        try:
            if (run_dir / name).is_file():
                read_json(run_dir / name)
        except CorruptData as error:
            found.append(f"{run_dir / name}: {error.message}")
    return found


def read_events(run_dir: Path) -> list[Event]:
    """Return the recorded events of a run, as far as they are readable."""
    return [parse_event(row) for row in read_lines(run_dir / EVENTS_FILE).rows]


def read_job(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return (job id, submitted document) of a run directory. Raises CorruptData."""
    content = job_file.read_job_file(run_dir / job_file.JOB_FILE_NAME)
    return str(content["job"]), content["document"]


def find_last_valid_step(steps_done: int, new_events: list[events.Event], job: str) -> int:
    """Return the last valid step: a new lineage has abandoned later ones."""
    restored_steps = [
        int(event.fields["version"])
        for event in new_events
        if event.kind in ("lineage", "restored") and event.fields.get("job") == job
    ]
    return max(0, min([steps_done, *restored_steps]))


def select_evaluations(candidates: list[events.Event], job: str) -> list[events.Event]:
    """Return the evaluations among events, where they outlive Redis.

    Evaluations of versions that a new lineage has abandoned are left out. If one of those was the
    best, no other one becomes the best.
    """
    found: list[events.Event] = []
    for event in candidates:
        if event.fields.get("job") != job:
            continue
        if event.kind == "evaluation":
            found.append(event)
        elif event.kind == "changed" and event.fields.get("extended"):
            # Those after training are on the way by now: the run has gone on since.
            found = [
                replace(e, fields=e.fields | {"tag": f"step-{e.fields['step']}"})
                if e.fields["tag"] == AFTER
                else e
                for e in found
            ]
        elif event.kind == "lineage":
            version = int(event.fields["version"])
            best = next((e for e in reversed(found) if e.fields.get("best")), None)
            found = [e for e in found if int(e.fields["step"]) <= version]
            if best not in found:
                found = [replace(e, fields=e.fields | {"best": False}) for e in found]
    return found
