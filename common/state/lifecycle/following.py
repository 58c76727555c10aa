"""What is told of one job to who follows it: how it stands, and what happens to it."""

from __future__ import annotations

from meshrl.common.api.gateway import JobState
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import HistoryLost
from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.redis.client import State

LOOK_S = 0.25  # between two looks for something new
LOST = "history_lost"  # kind of the event that stands for those that are gone


def standing(row: JobRow) -> JobState:
    """How a job stands, by its row."""
    return JobState(
        name=row.id,
        phase=row.phase.value,
        held=row.held,
        step=row.steps_done,
        steps=row.document["budget"]["steps"],
        version=row.version,
        trained=row.trained,
        error=row.error,
        run_dir=row.run_dir,
        over=row.ended,
    )


async def happened(
    state: State, clock: Clock, job: str, since: str, wait_s: float
) -> tuple[list[Event], str]:
    """The job's events after `since`, one page of them, and where to go on; none when there was no
    event of it for `wait_s`. One of kind `history_lost` stands for those that are gone.
    """
    until = clock.monotonic() + wait_s
    while True:
        try:
            page = await events.read(state, since)
        except HistoryLost as lost:
            gone = {"since": lost.since, "through": lost.through}
            return [Event(lost.through, 0, LOST, gone)], lost.through
        found = [event for event in page if event.fields.get("job") == job]
        since = page[-1].id if page else since
        if found or clock.monotonic() + LOOK_S > until:
            return found, since
        if not page:
            await clock.sleep(LOOK_S)
