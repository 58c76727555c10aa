"""Block reasons of the jobs of one mesh: which waits or is paused, why, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from meshrl.common.state.events import Event
from meshrl.common.state.jobs import TERMINAL_PHASES, JobRow
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot

WAITING, PAUSED = "waiting", "paused"
ADMISSION = "admission"


def find_block_reason(job: JobRow) -> str:
    """Return `waiting: WHY` or `paused: WHY` of a job; empty when it runs or has ended."""
    return "" if job.is_terminal else job.block_reason


def format_other_jobs(mesh: MeshSnapshot, job: str) -> Iterator[str]:
    """Yield a line for each other job that has not ended, in the order of their submission."""
    for row in mesh.live_jobs:
        if row.id != job:
            state = find_block_reason(row) or row.phase_text
            step = f"step {row.steps_done}/{row.document['budget']['steps']}"
            workers = len(mesh.find_workers(row.id))
            yield f"{row.id}: {state}, {step}, {workers} worker{'s' if workers != 1 else ''}"


def sum_blocked_s(
    events: Iterable[Event],
    job: str,
    end_ms: int | None = None,
    sessions: Sequence[Sequence[int]] = (),
) -> dict[str, float]:
    """Return the seconds that a job has waited and was paused, from its events.

    A block that has not ended counts up to `end_ms`, or else to the last event. Time between two
    `sessions` of its mesh, each (first, last) in milliseconds, in their order, does not count.
    """
    down = [(before[1], after[0]) for before, after in pairwise(sessions)]
    sums = dict.fromkeys((WAITING, PAUSED), 0.0)
    state, since, last = "", 0, 0
    for event in events:
        last = event.ms
        changed = _read_state_after(event, job)
        if changed is None:
            continue
        if state in sums:
            sums[state] += _measure_uptime_ms(since, event.ms, down) / 1000
        state, since = changed, event.ms
    if state in sums:
        sums[state] += _measure_uptime_ms(since, last if end_ms is None else end_ms, down) / 1000
    return {state: round(seconds, 3) for state, seconds in sums.items()}


def _measure_uptime_ms(since: int, until: int, down: Iterable[tuple[int, int]]) -> int:
    """Return the milliseconds between two moments, without the periods in `down`."""
    away = sum(max(0, min(until, end) - max(since, start)) for start, end in down)
    return max(0, until - since - away)


class UnpausedClock:
    """Clock of a job that stops while the job is paused."""

    def __init__(self, job: str) -> None:
        self._job, self._paused_total_ms = job, 0
        self._paused_since_ms: int | None = None  # when it was paused

    def elapsed_ms(self, event: Event) -> int:
        """Return the milliseconds that the job had run by this event, from an arbitrary origin."""
        now = event.ms if self._paused_since_ms is None else self._paused_since_ms
        unpaused_ms = now - self._paused_total_ms
        state = _read_state_after(event, self._job)
        if state == PAUSED and self._paused_since_ms is None:
            self._paused_since_ms = event.ms
        elif state is not None and state != PAUSED and self._paused_since_ms is not None:
            self._paused_total_ms += event.ms - self._paused_since_ms
            self._paused_since_ms = None
        return unpaused_ms


def _read_state_after(event: Event, job: str) -> str | None:
    """Return `waiting`, `paused` or an empty text; None if the event does not change the state."""
    fields = event.fields
    if fields.get("job") != job:
        return None
    if event.kind == ADMISSION:
        return str(fields["held"]).partition(":")[0]
    if event.kind == "phase" and fields["phase"] in TERMINAL_PHASES:
        return ""
    return None
