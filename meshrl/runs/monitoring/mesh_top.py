"""`meshrl top`: all of a mesh in one frame, repeatedly on a terminal, or once.

With a token: its jobs on another user's mesh, as the gateway reports them. Gangs, engines and hosts
are visible only to the mesh's own user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from meshrl.client.client import Client, run_request
from meshrl.common.api.gateway import JobState
from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost, StateUnavailable
from meshrl.common.state import events
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.store.planner_reports import MOVE_OUTCOME_EVENT
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.command_target import resolve_mesh
from meshrl.directory.directory_paths import format_path
from meshrl.directory.mesh_query import ANSWER_TIMEOUT_S, query_mesh
from meshrl.runs.monitoring.mesh_polling import poll_mesh
from meshrl.runs.monitoring.slice_observer import SliceObserver
from meshrl.runs.outcome import EXIT_INTERRUPTED
from meshrl.view.history import move_outcomes
from meshrl.view.json_output import to_json_document
from meshrl.view.live.run_view import ScreenView
from meshrl.view.live.top_screen import render_screen, render_tables
from meshrl.view.mesh.gang_slices import is_time_sliced
from meshrl.view.mesh.mesh_frames import CURVE_STEPS, JobFrame, MeshFrame, MeshWatcher
from meshrl.view.mesh.rates import compute_steps_per_min, compute_trained_rate, compute_wait_share
from meshrl.view.recording.run_record import read_move_outcomes
from meshrl.view.terminal import Console

RATE_INTERVAL_S = 1.0  # between the two polls that a single frame's rates come from
POLL_S = 1.0  # between two frames of a token's jobs
RETRY_INTERVAL_S = 1.0  # between requests to a mesh that does not answer
FRAME_COLUMNS = 200  # columns of a frame that no terminal bounds


class MeshObserver:
    """Observer of all of a mesh."""

    def __init__(self, state: StateClient, root: Path, slices: SliceObserver) -> None:
        self._state, self._watcher = state, MeshWatcher(state, format_path(root))
        self._slices = slices
        self._read_jobs: set[str] = set()  # jobs whose records have been read
        self._judged_moves: list[Event] = []
        self._event_cursor = "0"

    async def read_frame(self) -> MeshFrame:
        """Return the mesh's current frame. Raises StateUnavailable, DeadlineExceeded.

        Judged moves that Redis has trimmed come from the records of their jobs.
        """
        mesh = await self._watcher.poll()
        found = await events.read_remaining(self._state, self._event_cursor)
        self._event_cursor = found[-1].id if found else self._event_cursor
        for row in mesh.jobs:
            if row.id not in self._read_jobs:
                self._read_jobs.add(row.id)
                found += await asyncio.to_thread(read_move_outcomes, Path(row.run_dir))
        self._judged_moves = move_outcomes.merge_events(self._judged_moves, found)
        slices = await self._slices.read_frames(list(filter(is_time_sliced, mesh.gangs)))
        return self._watcher.build_frame(move_outcomes.list_outcomes(self._judged_moves), slices)


class TopScreen(ScreenView):
    """Screen of the last frame, redrawn with each poll; above it why it is outdated, if it is."""

    def __init__(self) -> None:
        super().__init__()
        self._last_frame: MeshFrame | None = None

    def show(self, now: MeshFrame) -> None:
        self._last_frame = now
        self._draw(render_screen(now))

    def print_line(self, text: str) -> None:
        if self._last_frame is None:
            super().print_line(text)
        else:
            self._draw(render_screen(self._last_frame, stale_reason=text))


def show_top(target: Path | None, mesh: Path | None, once: bool, as_json: bool) -> int:
    """Show a mesh until Ctrl-C or its end; one frame with `once`, and without a terminal."""
    place = resolve_mesh(target, mesh)
    if once or as_json or not sys.stdout.isatty():

        async def look_twice(state: StateClient) -> MeshFrame:
            async with SliceObserver(place) as slices:
                onlooker = MeshObserver(state, place.root, slices)
                await onlooker.read_frame()
                await asyncio.sleep(RATE_INTERVAL_S)
                return await onlooker.read_frame()

        print_frame(query_mesh(place, look_twice, ANSWER_TIMEOUT_S), as_json)
        return 0

    async def watch() -> None:
        with TopScreen() as view:
            async with SliceObserver(place) as slices:
                frames = poll_mesh(
                    place,
                    view.print_line,
                    lambda state: MeshObserver(state, place.root, slices).read_frame,
                )
                async with aclosing(frames):
                    async for frame in frames:
                        view.show(frame)

    try:
        asyncio.run(watch())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(f"the mesh in {format_path(place.root)} has stopped")
    return 0


def print_frame(frame: MeshFrame, as_json: bool) -> None:
    """Print one frame."""
    if as_json:
        print(json.dumps(to_json_document(frame)))
        return
    console = Console(width=None if sys.stdout.isatty() else FRAME_COLUMNS)
    for part in render_tables(frame):
        console.print(part)


class TokenJobsObserver:
    """Observer of a token's live jobs, and of those that have ended since its start."""

    def __init__(self) -> None:
        self._seen_jobs: set[str] = set()
        self._event_cursors: dict[str, str] = {}  # by job, up to where its events are read
        self._step_rows: dict[str, list[dict[str, Any]]] = {}
        self._judged_moves: list[Event] = []

    async def read_frame(self, client: Client) -> MeshFrame:
        """Return the current frame of the jobs."""
        states = [s for s in await client.jobs() if not s.over or s.name in self._seen_jobs]
        for state in states:
            self._seen_jobs.add(state.name)
            with contextlib.suppress(NotFound):  # it has been deleted since
                before = ""
                while (since := self._event_cursors.get(state.name, "0")) != before:
                    found, self._event_cursors[state.name] = await client.read_events(
                        state.name, since
                    )
                    for event in found:
                        self._apply_event(state.name, event)
                    before = since
        jobs = tuple(self._build_job_frame(state) for state in states)
        return MeshFrame(
            "", jobs, move_outcomes=tuple(move_outcomes.list_outcomes(self._judged_moves))
        )

    def _apply_event(self, job: str, event: Event) -> None:
        if event.kind == MOVE_OUTCOME_EVENT:
            self._judged_moves = move_outcomes.merge_events(self._judged_moves, [event])
        elif event.kind == "step":
            fields: Mapping[str, Any] = event.fields
            row = {**fields.get("metrics", {}), "step": fields["step"], "committed_ms": event.ms}
            known = [r for r in self._step_rows.get(job, []) if r["step"] < row["step"]]
            self._step_rows[job] = [*known, row][-CURVE_STEPS:]

    def _build_job_frame(self, state: JobState) -> JobFrame:
        rows = self._step_rows.get(state.name, [])
        rewards = tuple(float(row["reward"]) for row in rows if "reward" in row)
        is_halted = state.over or bool(state.held)
        timed = [row for row in rows if "wall" in row and "tokens_trained" in row]
        return JobFrame(
            job=state.name,
            phase=Phase(state.phase).value,
            phase_text=state.phase.replace("_", " "),
            block_reason=state.held,
            no_progress_reason="",
            error=state.error,
            step=state.step,
            steps=state.steps,
            steps_per_min=None
            if is_halted
            else compute_steps_per_min([r["committed_ms"] for r in rows], 0.0),
            reward=rewards[-1] if rewards else None,
            rewards=rewards,
            trained_tokens_per_s=0.0 if is_halted else compute_trained_rate(timed),
            wait_share=compute_wait_share(rows),
        )


def show_top_by_token(token: str, once: bool, as_json: bool) -> int:
    """Show the token's jobs until Ctrl-C; one frame with `once`, and without a terminal."""
    if once or as_json or not sys.stdout.isatty():
        print_frame(run_request(TokenJobsObserver().read_frame, token=token), as_json)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch_by_token(token))
    return EXIT_INTERRUPTED


async def _watch_by_token(token: str) -> None:
    """Show frames until it is cancelled. A mesh that does not answer at first is an error."""
    onlooker = TokenJobsObserver()
    async with Client(token=token) as client:
        first = await onlooker.read_frame(client)
        with TopScreen() as view:
            view.show(first)
            while True:
                await asyncio.sleep(POLL_S)
                try:
                    view.show(await onlooker.read_frame(client))
                except (PeerLost, DeadlineExceeded, StateUnavailable) as error:
                    view.print_line(f"the mesh does not answer; retrying: {error.message}")
                    await asyncio.sleep(RETRY_INTERVAL_S)
