"""The recorder of a virtual mesh: it writes the event stream to `events.jsonl`, as `meshrl run`
does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from common.base.clock import Clock
from common.base.errors import StateUnavailable, StorageFull
from common.base.files.lines import LineFile
from common.state import events
from common.state.redis.client import State
from meshrl.view.recording.recorded import EVENTS, event_of
from meshrl.view.recording.recorder import LOOK_S


class VirtualRecorder:
    """Goes on where an earlier one has stopped."""

    def __init__(self, state: State, clock: Clock, run_dir: Path, job: str) -> None:
        self._state, self._clock, self._job = state, clock, job
        self._file = LineFile(run_dir / EVENTS)
        known = self._file.found.rows
        self._last = event_of(known[-1]).id if known else "0"

    async def run(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self._look()
            except (StateUnavailable, StorageFull):
                continue

    async def _look(self) -> None:
        new = await events.read_all(self._state, self._last)
        mine = [event for event in new if event.fields.get("job") in (None, "", self._job)]
        if mine:
            self._file.append([asdict(event) for event in mine])
        if new:
            self._last = new[-1].id
