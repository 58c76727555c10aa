"""A run's events and metrics in files: appended to while it goes on, made again when they are
damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import Damaged, HistoryLost
from meshrl.common.base.files import damage
from meshrl.common.base.files.lines import LineFile, Row, read, whole
from meshrl.common.job.evaluation_plan import AFTER
from meshrl.common.mesh.process.host import Host
from meshrl.common.state import events, readers, steps
from meshrl.common.state.events import Event
from meshrl.common.state.pool.store.explained import JUDGED
from meshrl.common.state.redis.client import State
from meshrl.directory import job_file
from meshrl.directory.places import read_json
from meshrl.view.history.belonging import Belonging

RECENT = 1000  # rows that are held in memory, of 7 KB each; the others are in the file
# What is kept of events that were recorded before: what tells which evaluations stand.
STANDING = ("evaluation", "changed", "lineage")
FREQUENT = ("opened", "ready", "stale", "requeued", "dropped", "filtered", "step")
# For what one part of a mend does to a file: 25 MB/s make 90 GB. A thread cannot be ended, and a
# second one beside it would write the same file.
MEND_S = 3600.0
EVENTS, METRICS, MARK = "events.jsonl", "metrics.jsonl", "in_flight.json"


@dataclass(frozen=True)
class RecordMark:
    """Where the record stood when its mesh was stopped last, and what was in flight then."""

    event: str = "0"  # the last one
    events: int = 0  # lines
    samples: int = 0

    @classmethod
    def of(cls, run_dir: Path) -> RecordMark | None:
        """None: there is none, as after a crash. Damaged."""
        path = run_dir / MARK
        if not path.is_file():
            return None
        held = read_json(path)
        try:
            return cls(str(held["event"]), int(held.get("events", 0)), int(held["samples"]))
        except (KeyError, ValueError) as error:
            raise Damaged(f"it has no {error}", where=str(path)) from error


def event_of(row: Row) -> Event:
    """The event of a line."""
    return Event(str(row["id"]), int(row["ms"]), str(row["kind"]), row["fields"])


def rare_events(run_dir: Path) -> Iterator[Event]:
    """The events of a run, less those of each group and step but the first of them."""
    seen: set[str] = set()
    for row in whole(run_dir / EVENTS):
        kind = str(row["kind"])
        if kind not in FREQUENT or kind not in seen:
            seen.add(kind)
            yield event_of(row)


def judged_moves(run_dir: Path) -> list[Event]:
    """What the record of a run on this host tells of judged moves: Redis keeps what has happened
    for some minutes only.
    """
    return [
        event_of(row) for row in whole(run_dir / EVENTS, f'"{JUDGED}"') if row["kind"] == JUDGED
    ]


def last_step(rows: Sequence[Row]) -> int:
    """Of rows of steps in order; 0 when there is none."""
    return int(rows[-1]["step"]) if rows else 0


def steps_of(found: Iterable[Row]) -> int:
    """The last step of those that the lines of events tell of, in the lineage that stands."""
    done = 0
    for row in found:
        if row["kind"] == "step":
            done = int(row["fields"]["step"])
        elif row["kind"] in ("lineage", "restored"):
            done = int(row["fields"]["version"])
    return done


def thinned(rows: Iterable[Row], most: int = RECENT) -> list[Row]:
    """Some rows for a curve, evenly spaced, `most` to twice as many where there are more, and the
    last one.
    """
    kept: list[Row] = []
    every, last = 1, None
    for place, row in enumerate(rows):
        last = row
        if place % every == 0:
            kept.append(row)
        if len(kept) > 2 * most:
            kept, every = kept[::2], 2 * every
    return kept if last is None or kept[-1] is last else [*kept, last]


@dataclass
class Recorded:
    """The two files of one run. `wrong` is what has to be mended, by the file's name."""

    run_dir: Path
    job: str
    wrong: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events = LineFile(self.run_dir / EVENTS)
        self._metrics = LineFile(self.run_dir / METRICS)
        for file in (self._events, self._metrics):
            if file.found.damage:
                self.wrong[file.path.name] = file.found.damage
        found = self._events.found.rows
        self.known = [event_of(row) for row in found if row["kind"] in STANDING]
        self._belonging = Belonging(self.job, map(event_of, found))
        self.rows = self._metrics.found.rows[-RECENT:]  # the last ones
        done, there = steps_of(found), last_step(self.rows)
        if there < done:  # rows are written before the events of their steps
            self.wrong.setdefault(
                METRICS, f"it ends with step {there} of {done} that were recorded"
            )
        self.last = str(found[-1]["id"]) if found else "0"
        self._expected = self._events.found.next  # lines up to `last`
        self._told_lost = ""  # the last event of a record of which Redis knows that some are lost
        self._events.let_go()
        self._metrics.let_go()

    def see(self, mark: RecordMark | None) -> None:
        """Takes in where an earlier session stood: what ends before it is an older copy, or cut."""
        if mark is not None and events.order(mark.event) > events.order(self.last):
            self.wrong.setdefault(EVENTS, f"it ends before event {mark.event}, which was recorded")
            self.last, self._expected = mark.event, mark.events

    @property
    def lines(self) -> int:
        """Lines of events."""
        return self._events.next

    def look(self) -> None:
        """Notes a file that somebody else has changed or removed."""
        for file in (self._events, self._metrics):
            try:
                file.check()
            except Damaged as error:
                self.wrong.setdefault(file.path.name, error.message)

    def add_events(self, new: Sequence[Event]) -> None:
        """StorageFull, with nothing added."""
        self._events.append([asdict(event) for event in new])
        self.last, self._expected = new[-1].id, self._events.next

    def add_rows(self, new: Sequence[Row]) -> None:
        """StorageFull, with nothing added."""
        self._metrics.append(new)
        self.rows += new
        if len(self.rows) > 2 * RECENT:
            del self.rows[:-RECENT]

    def every_row(self) -> Iterator[Row]:
        """All rows, one by one from the file."""
        return whole(self._metrics.path)

    def keep_rows(self, last: int) -> None:
        """Cuts off the rows of steps after `last`; StorageFull, with nothing changed."""
        kept = [row for row in self.every_row() if row["step"] <= last]
        self._metrics.replace(kept)
        self.rows = kept[-RECENT:]

    def mine(self, found: Sequence[Event]) -> list[Event]:
        """Those that are the run's, of events that follow those of before."""
        return [event for event in found if self._belonging.takes(event)]

    async def mend_events(self, state: State, host: Host) -> dict[str, Any]:
        """Makes a damaged file again from what is readable in it and what Redis has; the fields of
        an event. StateUnavailable, DeadlineExceeded or StorageFull, with all to be done again.

        The file's work is done off the loop, and what comes after it cannot fail: a file that has
        been put in place is never taken for a damaged one.
        """
        why = self.wrong[EVENTS]
        found = await host.run_blocking(read, self._events.path, deadline_s=MEND_S)
        streamed = await events.read_remaining(state)
        known, gone = await host.run_blocking(self._with, found.rows, streamed, deadline_s=MEND_S)
        then = "made again from the event stream in Redis"
        if gone > 0:
            then = f"{gone} of its events are lost: the event stream in Redis has them no more"
        if gone > 0 and self._told_lost != self.last:
            since = str(found.rows[found.before - 1]["id"]) if found.before else "0"
            lost = HistoryLost(then, since=since, through=self.last)
            await readers.history_lost(state, self.job, str(self.run_dir), lost)
            self._told_lost = self.last
        rewrite = partial(self._events.replace, [asdict(event) for event in known])
        aside = await host.run_blocking(rewrite, self.run_dir, deadline_s=MEND_S)
        del self.wrong[EVENTS]
        self.known = [event for event in known if event.kind in STANDING]
        self._belonging = Belonging(self.job, known)
        self.last = known[-1].id if known else "0"
        self._expected = self._events.next
        return damage.fields("events", self._events.path, why, then, job=self.job, aside=aside)

    def _with(self, rows: list[Row], streamed: list[Event]) -> tuple[list[Event], int]:
        """The events of lines and those of the stream that are the run's, each once, in order; how
        many more there were.
        """
        written = {str(row["id"]) for row in rows}
        union = {event.id: event for event in (*map(event_of, rows), *streamed)}
        in_order = sorted(union.values(), key=lambda event: events.order(event.id))
        belonging = Belonging(self.job)
        known = [event for event in in_order if belonging.takes(event) or event.id in written]
        last = events.order(self.last)
        return known, self._expected - sum(events.order(event.id) <= last for event in known)

    async def mend_metrics(self, state: State, host: Host) -> dict[str, Any]:
        """The same of the rows of steps."""
        why = self.wrong[METRICS]
        known = await steps.step_rows(state, self.job)

        def union() -> list[Row]:
            """All rows that are readable or `known`, each once, in order."""
            found = {int(row["step"]): row for row in (*self.every_row(), *self.rows, *known)}
            return [found[step] for step in sorted(found)]

        kept = await host.run_blocking(union, deadline_s=MEND_S)
        then = "made again from the steps in Redis"
        if len(kept) < last_step(kept):
            then = f"{last_step(kept) - len(kept)} of its steps are lost: Redis has them no more"
        aside = await host.run_blocking(
            self._metrics.replace, kept, self.run_dir, deadline_s=MEND_S
        )
        del self.wrong[METRICS]
        self.rows = kept[-RECENT:]
        return damage.fields("metrics", self._metrics.path, why, then, job=self.job, aside=aside)


def damaged(run_dir: Path) -> list[str]:
    """What is damaged among the files of a run, a sentence each; nothing is changed."""
    found = [
        f"{run_dir / name}: {why}"
        for name in (EVENTS, METRICS)
        if (why := read(run_dir / name).damage)
    ]
    for name in (MARK, "job.json", "usage.json", "summary.json"):
        try:
            if (run_dir / name).is_file():
                read_json(run_dir / name)
        except Damaged as error:
            found.append(f"{run_dir / name}: {error.message}")
    return found


def read_events(run_dir: Path) -> list[Event]:
    """The events of a run as they were recorded, as far as they can be read."""
    return [event_of(row) for row in read(run_dir / EVENTS).rows]


def job_of(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """(job id, submitted document) of a run directory; Damaged."""
    held = job_file.read(run_dir / job_file.NAME)
    return str(held["job"]), held["document"]


def last_standing_step(steps_done: int, new: list[events.Event], job: str) -> int:
    """The last step that stands: later ones were left behind by a new lineage."""
    left = [
        int(event.fields["version"])
        for event in new
        if event.kind in ("lineage", "restored") and event.fields.get("job") == job
    ]
    return max(0, min([steps_done, *left]))


def evaluated(known: list[events.Event], job: str) -> list[events.Event]:
    """The evaluations among events, where they outlive Redis; not those of versions that a new
    lineage has abandoned, and no other one is the best then if one of those was.
    """
    found: list[events.Event] = []
    for event in known:
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
