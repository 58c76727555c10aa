"""`meshrl top`: all of a mesh in one frame, again and again on a terminal, or once.

With a token: its jobs on another user's mesh, as the gateway reports them. Gangs, engines and hosts
are the mesh's own user's to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshrl.client.client import Client, request
from meshrl.common.api.gateway import JobState
from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost, StateUnavailable
from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.store.explained import JUDGED
from meshrl.common.state.redis.client import State
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import shown
from meshrl.directory.target import place_of
from meshrl.run.following.looking import looks
from meshrl.run.outcome import INTERRUPTED
from meshrl.view.history import moves
from meshrl.view.live.top_screen import screen, tables
from meshrl.view.live.view import OneScreen
from meshrl.view.mesh.frames import CURVE, Frame, JobFrame, MeshWatcher
from meshrl.view.mesh.rates import steps_per_min, trained_rate, wait_share
from meshrl.view.recording.recorded import judged_moves
from meshrl.view.terminal import Console

RATE_S = 1.0  # between the two looks that a single frame's rates are of
LOOK_S = 1.0  # between two frames of a token's jobs
AGAIN_S = 1.0  # until a mesh that does not answer is asked again
WIDE = 200  # columns of a frame that no terminal bounds


class TopOnlooker:
    """Looks at all of a mesh."""

    def __init__(self, state: State, root: Path) -> None:
        self._state, self._watcher = state, MeshWatcher(state, shown(root))
        self._read: set[str] = set()  # jobs whose records have been read
        self._judged: list[Event] = []
        self._since = "0"

    async def look(self) -> Frame:
        """The mesh now. StateUnavailable, DeadlineExceeded.

        Judged moves that Redis has let go of are on the record of their jobs.
        """
        mesh = await self._watcher.look()
        found = await events.read_remaining(self._state, self._since)
        self._since = found[-1].id if found else self._since
        for row in mesh.jobs:
            if row.id not in self._read:
                self._read.add(row.id)
                found += await asyncio.to_thread(judged_moves, Path(row.run_dir))
        self._judged = moves.merged(self._judged, found)
        return self._watcher.frame(moves.judged(self._judged))


class TopScreen(OneScreen):
    """The last frame, redrawn with each look; above it why it is not of now, if it is not."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Frame | None = None

    def show(self, now: Frame) -> None:
        self._last = now
        self._draw(screen(now))

    def say(self, text: str) -> None:
        if self._last is None:
            super().say(text)
        else:
            self._draw(screen(self._last, trouble=text))


def top(chosen: Path | None, mesh: Path | None, once: bool, as_json: bool) -> int:
    """Shows a mesh until Ctrl-C or its end; one frame with `once`, and without a terminal."""
    place = place_of(chosen, mesh)
    if once or as_json or not sys.stdout.isatty():

        async def look_twice(state: State) -> Frame:
            onlooker = TopOnlooker(state, place.root)
            await onlooker.look()
            await asyncio.sleep(RATE_S)
            return await onlooker.look()

        tell(ask(place, look_twice, ANSWER_S), as_json)
        return 0

    async def watch() -> None:
        with TopScreen() as view:
            frames = looks(place, view.say, lambda state: TopOnlooker(state, place.root).look)
            async with aclosing(frames):
                async for frame in frames:
                    view.show(frame)

    try:
        asyncio.run(watch())
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"the mesh in {shown(place.root)} runs no more")
    return 0


def tell(found: Frame, as_json: bool) -> None:
    """Prints one frame."""
    if as_json:
        print(json.dumps(asdict(found)))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for part in tables(found):
        console.print(part)


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
                before = ""
                while (since := self._since.get(state.name, "0")) != before:
                    found, self._since[state.name] = await client.happened(state.name, since)
                    for event in found:
                        self._hear(state.name, event)
                    before = since
        jobs = tuple(self._job(state) for state in states)
        return Frame("", jobs, judged=tuple(moves.judged(self._judged)))

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


def top_by_token(token: str, once: bool, as_json: bool) -> int:
    """Shows the token's jobs until Ctrl-C; one frame with `once`, and without a terminal."""
    if once or as_json or not sys.stdout.isatty():
        tell(request(TokenOnlooker().look, token=token), as_json)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch_by_token(token))
    return INTERRUPTED


async def _watch_by_token(token: str) -> None:
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
                except (PeerLost, DeadlineExceeded, StateUnavailable) as error:
                    view.say(f"the mesh does not answer, asking again: {error.message}")
                    await asyncio.sleep(AGAIN_S)
