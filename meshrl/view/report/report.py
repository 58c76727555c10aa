"""Writes what a run leaves: `report.html`, also while it goes on, `model/`, and `summary.json`."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files import documents
from meshrl.common.mesh.process.ends.failure import NO_ROOM
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import Phase
from meshrl.common.state.lifecycle.accounting import WRONG
from meshrl.common.state.pool.store.explained import OPENING, PLANNED
from meshrl.common.state.pool.workers.rows import Role
from meshrl.directory.exporting import command
from meshrl.directory.places import write_json
from meshrl.view.guard import WarningGuard
from meshrl.view.history import samples
from meshrl.view.history.failures import listed
from meshrl.view.history.held import held_s
from meshrl.view.history.news import unforeseen
from meshrl.view.history.run_snapshot import Evaluation, RunSnapshot
from meshrl.view.mesh import prefixes
from meshrl.view.recording import audit
from meshrl.view.recording.looking import RunningMesh
from meshrl.view.recording.recorded import rare_events, read_events, thinned
from meshrl.view.recording.recorder import Recorder
from meshrl.view.recording.room import RoomForWrites
from meshrl.view.recording.usage import Tally
from meshrl.view.report.page import html
from meshrl.view.trace import writing as traced

TRADED = {Role.ROLLOUT, Role.TRAINING}


ACCOUNT = (
    *("opened", "trained", "filtered", "stale_requeued", "host_lost", "in_flight"),
    *("lost", "trained_twice", "opened_twice", "committed_twice", "typed_drops"),
)


@dataclass(frozen=True)
class RunEnd:
    """How a run stands when it is summarized."""

    job: str
    phase: Phase
    seed: int
    wall_s: float
    account: dict[str, int]


def outcome(end: RunEnd, steps: int) -> dict[str, Any]:
    """The part of a summary that says how a run ended; `steps` are those that are done."""
    told = {"job": end.job, "phase": end.phase, "seed": end.seed, "steps": steps}
    return told | {"wall_s": round(end.wall_s, 1)} | {term: end.account[term] for term in ACCOUNT}


def summarize(
    end: RunEnd,
    rows: Iterable[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    events: Sequence[Event],
    tally: Tally,
) -> dict[str, Any]:
    """The summary of a run from its record; rows are gone through once."""
    cpu_s = tally.cpu_by_name()
    steps = tokens = tokens_trained = 0
    gap: float | None = None
    for row in rows:
        steps += 1
        tokens += int(row["tokens"])
        tokens_trained += int(row["tokens_trained"])
        if row.get("logprob_gap") is not None:
            gap = max(gap or 0.0, float(row["logprob_gap"]))
    ended = sum(end.account[fate] for fate in ("trained", "filtered", "typed_drops"))
    return outcome(end, steps) | {
        "held_out": {
            "before": _accuracy(evaluations, "before"),
            "after": _accuracy(evaluations, "after"),
        },
        "evaluations": [_evaluation(e) for e in evaluations],
        "best_version": next((e.step for e in reversed(evaluations) if e.best), None),
        "warm_start_cached": tally.warm_start_cached,
        "cpu_s": cpu_s,
        "cpu_total_s": round(sum(cpu_s.values()), 1),
        "cpu_shared_s": round(tally.shared_s, 1),
        "accelerator_s": round(tally.accelerator_s, 1),
        **{
            f"{state}_s": round(seconds, 1)
            for state, seconds in held_s(events, end.job, sessions=tally.sessions).items()
        },
        "tokens_rolled_out": tokens,
        "tokens_sampled": tally.total_tokens("rollout/"),
        "tokens_trained": tokens_trained,
        "prefixes": prefixes.summed(tally.prefixes.values()),
        # Of the trajectories that have ended, those without a reward.
        "failed_share": round(end.account["typed_drops"] / max(1, ended), 4),
        "failures": listed(events),
        "workers_moved": len(planned_moves(events)),
        "hosts_lost": sum(event.kind == "host_lost" for event in events),
        "logprob_gap_max": gap,
        "processes_ended": sum(int(e.fields.get("count", 1)) for e in events if unforeseen(e)),
    }


def moves(events: Sequence[Event]) -> list[Event]:
    """Completed moves of gangs between rollout and training, whoever decided them."""
    return [e for e in events if e.kind == "move" and {e.fields["from"], e.fields["to"]} == TRADED]


def planned_moves(events: Sequence[Event]) -> list[Event]:
    """The moves that the planner decided for faster steps, each once, while
    every other gang went on: it generated, computed bins or committed between start and end.
    """
    first = next((e.ms for e in events if e.kind == "step"), None)
    if first is None:
        return []
    found = {
        e.fields["resident"]: e
        for e in moves(events)
        if e.fields.get("policy") in PLANNED
        and not e.fields["undone"]
        and (e.fields["policy"] == OPENING or float(e.fields["started_ms"]) > first)
        and all(other["after"] > other["before"] for other in e.fields.get("others", {}).values())
    }
    return list(found.values())


def _evaluation(e: Evaluation) -> dict[str, Any]:
    """Its figures, and of which share of their samples they are where that is not all."""
    missing = {name: share for name, share in e.shares.items() if share < 1.0}
    found: dict[str, Any] = {"tag": e.tag, "step": e.step, "figures": e.figures}
    return found | ({"shares": missing, "reasons": e.reasons} if missing else {})


def _accuracy(evaluations: Sequence[Evaluation], tag: str) -> dict[str, float] | None:
    found = next((e for e in evaluations if e.tag == tag), None)
    if found is None or found.sampled is None:
        return None
    shares = {name.rpartition(".")[2]: s for name, s in found.shares.items() if s < 1.0}
    missing = {f"{name}_share": s for name, s in shares.items() if name in ("sampled", "greedy")}
    return {"sampled": found.sampled, "greedy": found.greedy or 0.0} | missing


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
    end = RunEnd(job, phase, seed, recorder.wall_s, account)
    found = outcome(end, shot.step if shot else 0)
    with guard("the rest of the summary"):
        rows = recorder.recorded.every_row()
        found = summarize(end, rows, evaluations, events, recorder.tally)
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
        end = RunEnd(job, shot.phase, shot.seed, wall_s, account)
        tally = copy.deepcopy(self._recorder.tally)
        found = summarize(end, recorded.every_row(), shot.evaluations, events, tally)
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
