"""`meshrl top`: all of a mesh in one frame, again and again on a terminal, or once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from common.state import events
from common.state.events import Event
from common.state.jobs import JobRow
from common.state.pool.store.explained import JUDGED
from common.state.redis.client import State
from meshrl.directory.asking import ANSWER_S, ask
from meshrl.directory.places import MeshPlace, shown
from meshrl.directory.target import place_of
from meshrl.run.following.looking import looks
from meshrl.run.outcome import INTERRUPTED
from meshrl.view.frames.frame import Frame
from meshrl.view.frames.watcher import MeshWatcher
from meshrl.view.history import moves
from meshrl.view.live.top_screen import screen, tables
from meshrl.view.live.view import OneScreen
from meshrl.view.recording.recorded import judged_moves
from meshrl.view.terminal import Console

RATE_S = 1.0  # between the two looks that a single frame's rates are of
WIDE = 200  # columns of a frame that no terminal bounds


class TopOnlooker:
    """Looks at all of a mesh."""

    def __init__(self, state: State, root: Path) -> None:
        self._state, self._watcher = state, MeshWatcher(state, shown(root))
        self._read: set[str] = set()  # jobs whose records have been read
        self._judged: list[Event] = []
        self._since = "0"

    async def look(self) -> Frame:
        """The mesh now. StateUnavailable, DeadlineExceeded."""
        mesh = await self._watcher.look()
        await self._hear(mesh.jobs)
        return self._watcher.frame(moves.judged(self._judged))

    async def _hear(self, rows: Iterable[JobRow]) -> None:
        """Which moves were judged: by the records of jobs that are new, and by what is news."""
        found = await self._news()
        for row in rows:
            if row.id not in self._read:
                self._read.add(row.id)
                found += await asyncio.to_thread(judged_moves, Path(row.run_dir))
        self._judged = moves.merged(self._judged, found)

    async def _news(self) -> list[Event]:
        """Judged moves that are news; those that Redis has let go of are on the jobs' records."""
        new = await events.read_remaining(self._state, self._since)
        self._since = new[-1].id if new else self._since
        return [event for event in new if event.kind == JUDGED]


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
        tell(ask(place, lambda state: _once(state, place), ANSWER_S), as_json)
        return 0
    try:
        asyncio.run(_watch(place))
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


async def _once(state: State, place: MeshPlace) -> Frame:
    onlooker = TopOnlooker(state, place.root)
    await onlooker.look()
    await asyncio.sleep(RATE_S)
    return await onlooker.look()


async def _watch(place: MeshPlace) -> None:
    with TopScreen() as view:
        frames = looks(place, view, lambda state: TopOnlooker(state, place.root).look)
        async with aclosing(frames):
            async for frame in frames:
                view.show(frame)
