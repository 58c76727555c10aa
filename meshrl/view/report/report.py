"""Writes what a run leaves: `report.html`, also while it goes on, `model/`, and `summary.json`."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files import documents
from meshrl.common.mesh.process.ends.failure import NO_ROOM
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.lifecycle.accounting import WRONG
from meshrl.directory.exporting import command
from meshrl.directory.places import write_json
from meshrl.view.guard import WarningGuard
from meshrl.view.history import samples
from meshrl.view.history.run_snapshot import Evaluation, RunSnapshot
from meshrl.view.recording import audit, summary
from meshrl.view.recording.looking import RunningMesh
from meshrl.view.recording.recorded import rare_events, read_events, thinned
from meshrl.view.recording.recorder import Recorder
from meshrl.view.recording.room import RoomForWrites
from meshrl.view.report.page import html
from meshrl.view.trace import writing as traced

EXPORT, EXPORT_S = "export", 120.0
PAGE_S = 10.0  # between two pages of a run that goes on
PAGE_SHARE = 20  # times what a page takes that is between two: a twentieth of a core at most
EXPORTED_PHASES = (Phase.TRAINING, Phase.EVALUATION, Phase.FINISHED, Phase.STOPPED)


async def write(recorder: Recorder, given_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Writes what a run leaves behind, whatever its end; returns the summary. Waits for room on a
    full disk, until it is `given_up`.
    """
    room, guard = RoomForWrites(recorder.mesh.clock, given_up), WarningGuard()
    run_dir, document = recorder.run_dir, recorder.held["document"]
    events = read_events(run_dir)
    evaluations = list(recorder.shot.evaluations) if recorder.shot else []
    found = _summary(recorder, events, evaluations, guard)
    with guard("the report"):
        kept = samples.read(run_dir)
        rows = thinned(recorder.recorded.every_row())
        page = html(found, rows, evaluations, events, document, kept=kept)
        await room.write(lambda: write_page(run_dir, page))
    if document.get("tracking", {}).get("trace"):
        with guard("the trace, which `meshrl trace` writes at any time,"):
            await asyncio.to_thread(traced.write, run_dir, run_dir / traced.NAME, events)
    if found["phase"] in EXPORTED_PHASES and found["steps"]:
        with guard("the export of the model, which `meshrl export` repeats,"):
            await export_model(recorder.mesh, run_dir)
    # Last: who waits for it finds all the rest.
    await room.write(lambda: write_json(run_dir / "summary.json", found))
    return found


def _summary(
    recorder: Recorder, events: list[Event], evaluations: list[Evaluation], guard: WarningGuard
) -> dict[str, Any]:
    """Return a run's summary; how the run ended is in it even if the rest cannot be made."""
    shot, job = recorder.shot, recorder.job
    phase, seed = shot.phase if shot else Phase.QUEUED, int(recorder.held["document"]["seed"])
    account = audit.audited(recorder.run_dir, events, job)
    end = summary.RunEnd(job, phase, seed, recorder.wall_s, account)
    found = summary.outcome(end, shot.step if shot else 0)
    with guard("the rest of the summary"):
        rows = recorder.recorded.every_row()
        found = summary.summarize(end, rows, evaluations, events, recorder.tally)
    return found


class LivePage:
    """The report of a run that goes on, written now and then by a task beside who records it.

    What keeps a page from being written is said once, and the next one is tried.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._recorder, self._say = recorder, say
        self._due, self._said = 0.0, ""
        self._making: asyncio.Task[None] | None = None
        self._over, self._placing = False, threading.Lock()

    def look(self) -> None:
        """Begins a page if it is time and none is being made; long runs, whose page takes long, get
        it less often.
        """
        recorder = self._recorder
        if self._making is not None and not self._making.done():
            return
        if recorder.shot is None or recorder.mesh.clock.monotonic() < self._due:
            return
        making = self._make(recorder.shot)
        self._making = asyncio.create_task(making, name="live page")

    async def aclose(self) -> None:
        """From here on the page belongs to others: one that is being made is not written."""
        with self._placing:
            self._over = True
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait([self._making])

    async def _make(self, shot: RunSnapshot) -> None:
        clock = self._recorder.mesh.clock
        started, trouble = clock.monotonic(), ""
        try:
            await asyncio.to_thread(self._write, shot, self._recorder.wall_s)
        except StorageFull:  # shown anyway
            pass
        except Exception as error:  # whatever it is, the run goes on
            if not (isinstance(error, OSError) and error.errno in NO_ROOM):
                trouble = f"the report cannot be written now: {type(error).__name__}: {error}"
        if trouble and trouble != self._said:
            self._say(trouble)
        self._said = trouble
        now = clock.monotonic()
        self._due = now + max(PAGE_S, PAGE_SHARE * (now - started))

    def _write(self, shot: RunSnapshot, wall_s: float) -> None:
        """Reads the record line by line, since all of a long one would take hundreds of MB."""
        run_dir, recorded = self._recorder.run_dir, self._recorder.recorded
        job, document = self._recorder.job, self._recorder.held["document"]
        events = list(rare_events(run_dir))
        account = dict.fromkeys(WRONG, 0) | shot.counts | {"in_flight": shot.in_flight}
        end = summary.RunEnd(job, shot.phase, shot.seed, wall_s, account)
        tally = copy.deepcopy(self._recorder.tally)
        found = summary.summarize(end, recorded.every_row(), shot.evaluations, events, tally)
        found["lost"] = None  # known when nothing is in flight any more
        kept = samples.evaluated(run_dir)
        rows = thinned(recorded.every_row())
        page = html(found, rows, shot.evaluations, events, document, PAGE_S, kept)
        with self._placing:
            if not self._over:
                write_page(run_dir, page)


def write_page(run_dir: Path, page: str) -> None:
    """Whole or not at all: who opens it never sees half a page. StorageFull."""
    documents.put(run_dir / "report.html", page.encode(), durable=False)


async def export_model(mesh: RunningMesh, run_dir: Path) -> bool:
    """Write the last weights in Hugging Face's layout to `<run>/model`; print why if they cannot be
    written. Return True if they were.
    """
    log = mesh.place.log(EXPORT)
    try:
        exporting = mesh.start_program(command(run_dir, run_dir / "model"), EXPORT)
        try:
            status = await exporting.wait(EXPORT_S)
        finally:
            exporting.kill()
        words = log.read_text(errors="replace").strip().splitlines()
        said = "it took too long" if status is None else "".join(words[-1:])
    except OSError as error:
        status, said = 1, f"{log}: {error}"
    if status != 0:
        print(f"the model was not exported: {said}", file=sys.stderr)
    return status == 0
