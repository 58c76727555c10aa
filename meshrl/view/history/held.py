"""How jobs of one mesh stand beside each other: which waits or is paused, why, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from meshrl.common.state.events import Event
from meshrl.common.state.jobs import ENDED, JobRow
from meshrl.view.mesh.snapshot import MeshSnapshot

WAITING, PAUSED = "waiting", "paused"
ADMISSION = "admission"


def reason(job: JobRow) -> str:
    """`waiting: WHY` or `paused: WHY` of a job; empty when it runs or has ended."""
    return "" if job.ended else job.held


def others(mesh: MeshSnapshot, job: str) -> Iterator[str]:
    """The jobs beside `job` that have not ended, in the order in which they were submitted: a line
    each.
    """
    for row in mesh.live_jobs:
        if row.id != job:
            state = reason(row) or row.phase.replace("_", " ")
            step = f"step {row.steps_done}/{row.document['budget']['steps']}"
            workers = len(mesh.workers_of(row.id))
            yield f"{row.id}: {state}, {step}, {workers} worker{'s' if workers != 1 else ''}"


def held_s(
    events: Iterable[Event],
    job: str,
    end_ms: int | None = None,
    sessions: Sequence[Sequence[int]] = (),
) -> dict[str, float]:
    """Seconds that a job has waited, and that it was paused, by its events; what lasts still is
    counted up to `end_ms`, or else to the last event. Between two `sessions` of its mesh, each
    (first, last) in milliseconds, in their order, nobody waits.
    """
    down = [(before[1], after[0]) for before, after in pairwise(sessions)]
    sums = dict.fromkeys((WAITING, PAUSED), 0.0)
    state, since, last = "", 0, 0
    for event in events:
        last = event.ms
        changed = _state_after(event, job)
        if changed is None:
            continue
        if state in sums:
            sums[state] += _up_ms(since, event.ms, down) / 1000
        state, since = changed, event.ms
    if state in sums:
        sums[state] += _up_ms(since, last if end_ms is None else end_ms, down) / 1000
    return {state: round(seconds, 3) for state, seconds in sums.items()}


def _up_ms(since: int, until: int, down: Iterable[tuple[int, int]]) -> int:
    """Of the time between two moments, that without what lies in `down`."""
    away = sum(max(0, min(until, end) - max(since, start)) for start, end in down)
    return max(0, until - since - away)


class Going:
    """The time of a job that stands still while the job is paused."""

    def __init__(self, job: str) -> None:
        self._job, self._stood_ms = job, 0
        self._since: int | None = None  # when it was paused

    def at(self, event: Event) -> int:
        """Milliseconds that the job had gone on for by this event, from wherever it began."""
        now = event.ms if self._since is None else self._since
        went_ms = now - self._stood_ms
        state = _state_after(event, self._job)
        if state == PAUSED and self._since is None:
            self._since = event.ms
        elif state is not None and state != PAUSED and self._since is not None:
            self._stood_ms += event.ms - self._since
            self._since = None
        return went_ms


def _state_after(event: Event, job: str) -> str | None:
    """`waiting`, `paused` or nothing; None: the event tells nothing of it."""
    fields = event.fields
    if fields.get("job") != job:
        return None
    if event.kind == ADMISSION:
        return str(fields["held"]).partition(":")[0]
    if event.kind == "phase" and fields["phase"] in ENDED:
        return ""
    return None
