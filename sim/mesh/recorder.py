"""The recorder of a virtual mesh: it writes the event stream to `events.jsonl`, as `meshrl run`
does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from common.clock import Clock
from common.errors import StateUnavailable, StorageFull
from common.state import events
from common.state.client import State
from meshrl.observe.recorder import LOOK_S, append_lines, read_events


class VirtualRecorder:
    """Goes on where an earlier one has stopped."""

    def __init__(self, state: State, clock: Clock, run_dir: Path, job: str) -> None:
        self._state, self._clock, self._run_dir, self._job = state, clock, run_dir, job
        known = read_events(run_dir)
        self._last = known[-1].id if known else "0"

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
            append_lines(self._run_dir / "events.jsonl", [asdict(event) for event in mine])
        if new:
            self._last = new[-1].id
