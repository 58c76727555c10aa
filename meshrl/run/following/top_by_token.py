"""`meshrl top` with a token: its jobs on somebody else's mesh, as the gateway tells of them. Gangs,
engines and hosts are the mesh's own user's to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from common.api.gateway import JobState
from common.base.errors import DeadlineExceeded, NotFound, PeerLost, StateUnavailable
from common.state.events import Event
from common.state.jobs import Phase
from common.state.pool.store.explained import JUDGED
from meshrl.client.client import Client
from meshrl.run.following.top import TopScreen, tell
from meshrl.run.outcome import INTERRUPTED
from meshrl.view.frames.frame import CURVE, Frame, JobFrame
from meshrl.view.history import moves
from meshrl.view.mesh.rates import steps_per_min, trained_rate, wait_share

LOOK_S = 1.0
AGAIN_S = 1.0  # until a mesh that does not answer is asked again
SILENT = (PeerLost, DeadlineExceeded, StateUnavailable)


class TokenOnlooker:
    """Looks at the jobs of a token that go on, and at those that have ended since it began."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._since: dict[str, str] = {}  # by job, up to where its events are read
        self._steps: dict[str, list[dict[str, Any]]] = {}
        self._judged: list[Event] = []

    async def look(self, client: Client) -> Frame:
        """The jobs now."""
        states = [s for s in await client.jobs() if not s.over or s.name in self._shown]
        for state in states:
            self._shown.add(state.name)
            with contextlib.suppress(NotFound):  # it has been deleted since
                await self._follow(client, state.name)
        jobs = tuple(self._job(state) for state in states)
        return Frame("", jobs, judged=tuple(moves.judged(self._judged)))

    async def _follow(self, client: Client, job: str) -> None:
        """Hears all that has happened to a job since the last look."""
        while True:
            since = self._since.get(job, "0")
            found, self._since[job] = await client.happened(job, since)
            for event in found:
                self._hear(job, event)
            if self._since[job] == since:
                return

    def _hear(self, job: str, event: Event) -> None:
        if event.kind == JUDGED:
            self._judged = moves.merged(self._judged, [event])
        elif event.kind == "step":
            fields: Mapping[str, Any] = event.fields
            row = {**fields.get("metrics", {}), "step": fields["step"], "committed_ms": event.ms}
            known = [r for r in self._steps.get(job, []) if r["step"] < row["step"]]
            self._steps[job] = [*known, row][-CURVE:]

    def _job(self, state: JobState) -> JobFrame:
        rows = self._steps.get(state.name, [])
        rewards = tuple(float(row["reward"]) for row in rows if "reward" in row)
        stands = state.over or bool(state.held)
        timed = [row for row in rows if "wall" in row and "tokens_trained" in row]
        return JobFrame(
            job=state.name,
            phase=Phase(state.phase).value,
            held=state.held,
            quiet="",
            error=state.error,
            step=state.step,
            steps=state.steps,
            steps_per_min=None if stands else steps_per_min([r["committed_ms"] for r in rows], 0.0),
            reward=rewards[-1] if rewards else None,
            rewards=rewards,
            trained_s=0.0 if stands else trained_rate(timed),
            wait_share=wait_share(rows),
        )


def top(token: str, once: bool, as_json: bool) -> int:
    """Shows the token's jobs until Ctrl-C; one frame with `once`, and without a terminal."""
    if once or as_json or not sys.stdout.isatty():
        tell(asyncio.run(_once(token)), as_json)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(token))
    return INTERRUPTED


async def _once(token: str) -> Frame:
    async with Client(token=token) as client:
        return await TokenOnlooker().look(client)


async def _watch(token: str) -> None:
    """Shows frames until it is cancelled. A mesh that does not answer at first is an error."""
    onlooker = TokenOnlooker()
    async with Client(token=token) as client:
        first = await onlooker.look(client)
        with TopScreen() as view:
            view.show(first)
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    view.show(await onlooker.look(client))
                except SILENT as error:
                    view.say(f"the mesh does not answer, asking again: {error.message}")
                    await asyncio.sleep(AGAIN_S)
