"""State and events of one job, for the processes that follow it."""

from __future__ import annotations

from meshrl.common.api.gateway import JobState
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import HistoryLost
from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.redis.client import StateClient

POLL_S = 0.25  # between two polls for new events
HISTORY_LOST_EVENT = "history_lost"  # kind of the event that stands for trimmed events


def to_job_state(row: JobRow) -> JobState:
    """Return the state of a job from its row."""
    return JobState(
        name=row.id,
        phase=row.phase.value,
        held=row.block_reason,
        step=row.steps_done,
        steps=row.document["budget"]["steps"],
        version=row.version,
        trained=row.trained,
        error=row.error,
        run_dir=row.run_dir,
        over=row.is_terminal,
    )


async def wait_for_events(
    state: StateClient, clock: Clock, job: str, since: str, wait_s: float
) -> tuple[list[Event], str]:
    """Return one page of the job's events after `since`, and the cursor to continue from.

    No events: there was none of this job for `wait_s`. An event of kind `history_lost` stands for
    events that are gone.
    """
    until = clock.monotonic() + wait_s
    while True:
        try:
            page = await events.read_page(state, since)
        except HistoryLost as lost:
            fields = {"since": lost.since, "through": lost.through}
            return [Event(lost.through, 0, HISTORY_LOST_EVENT, fields)], lost.through
        found = [event for event in page if event.fields.get("job") == job]
        since = page[-1].id if page else since
        if found or clock.monotonic() + POLL_S > until:
            return found, since
        if not page:
            await clock.sleep(POLL_S)
