"""Writes what a run leaves: `report.html`, also while it goes on, `model/`, `summary.json`, and a
table on the terminal.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import MeshError, StorageFull
from common.job.evaluation_plan import HELD_OUT
from common.process.failure import NO_ROOM
from common.records import documents
from common.state.accounting import WRONG
from common.state.events import Event
from common.state.gangs import Role
from common.state.jobs import Phase
from meshrl.exporting import command
from meshrl.launch.places import write_json
from meshrl.observe import audit, charts, samples, sections, summary
from meshrl.observe.charts import Series, Span
from meshrl.observe.failures import Failure, counted, counts, of_share
from meshrl.observe.recorded import rare_events, thinned
from meshrl.observe.recorder import Recorder, read_events
from meshrl.observe.room import Room
from meshrl.observe.sections import column
from meshrl.observe.view import clock
from meshrl.observe.watch import Evaluation, Snapshot, told, unforeseen

EXPORT_S = 120.0
PAGE_S = 10.0  # between two pages of a run that goes on
PAGE_SHARE = 20  # times what a page takes that is between two: a twentieth of a core at most
EXPORTED_PHASES = (Phase.TRAINING, Phase.EVALUATION, Phase.FINISHED, Phase.STOPPED)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin-top: 2em }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: #666 }
.grid { stroke: #e4e4e4 } .axis { stroke: #999 } .mark { stroke: #c00; stroke-dasharray: 2 2 }
.legend span { margin-right: 1.5em } .legend i { display: inline-block; width: 12px; height: 12px;
  margin-right: 6px; vertical-align: -1px }
table { border-collapse: collapse } td, th { padding: 2px 16px 2px 0; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums } .none, .note { color: #777 }
pre { background: #f6f6f6; padding: 1em; overflow: auto; font-size: 12px }
details pre { white-space: pre-wrap } pre.model { background: #eef6fb }
"""


async def write(recorder: Recorder, given_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Writes what a run leaves behind, whatever its end; returns the summary. Waits for room on a
    full disk, until it is `given_up`.
    """
    room = Room(recorder.launcher.clock, given_up)
    run_dir = recorder.run_dir
    shot = recorder.shot
    job, document = recorder.job, recorder.held["document"]
    events = read_events(run_dir)
    evaluations = list(shot.evaluations) if shot else []
    found = summary.summarize(
        job=job,
        phase=shot.phase if shot else Phase.QUEUED,
        seed=int(document["seed"]),
        wall_s=recorder.wall_s,
        warm_start_cached=recorder.tally.warm_start_cached,
        rows=recorder.recorded.every_row(),
        evaluations=evaluations,
        events=events,
        tally=recorder.tally,
        account=audit.audited(run_dir, events, job),
    )
    kept = samples.read(run_dir)
    rows = thinned(recorder.recorded.every_row())
    page = html(found, rows, evaluations, events, document, kept=kept)
    await room.write(lambda: write_page(run_dir, page))
    if found["phase"] in EXPORTED_PHASES and found["steps"]:
        await export_model(run_dir)
    # Last: who waits for it finds all the rest.
    await room.write(lambda: write_json(run_dir / "summary.json", found))
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
        if self._making is not None:
            if not self._making.done():
                return
            self._making.result()  # raises what is a fault of ours
        if recorder.shot is None or recorder.launcher.clock.monotonic() < self._due:
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
            if not self._making.cancelled():
                self._making.result()

    async def _make(self, shot: Snapshot) -> None:
        clock = self._recorder.launcher.clock
        started, trouble = clock.monotonic(), ""
        try:
            await asyncio.to_thread(self._write, shot, self._recorder.wall_s)
        except (OSError, ValueError, MeshError) as error:
            full = isinstance(error, StorageFull)
            if not (
                full or (isinstance(error, OSError) and error.errno in NO_ROOM)
            ):  # shown anyway
                trouble = f"the report cannot be written now: {error}"
        if trouble and trouble != self._said:
            self._say(trouble)
        self._said = trouble
        now = clock.monotonic()
        self._due = now + max(PAGE_S, PAGE_SHARE * (now - started))

    def _write(self, shot: Snapshot, wall_s: float) -> None:
        """Reads the record line by line, since all of a long one would take hundreds of MB."""
        run_dir, recorded = self._recorder.run_dir, self._recorder.recorded
        job, document = self._recorder.job, self._recorder.held["document"]
        events = list(rare_events(run_dir))
        found = summary.summarize(
            job=job,
            phase=shot.phase,
            seed=shot.seed,
            wall_s=wall_s,
            warm_start_cached=self._recorder.tally.warm_start_cached,
            rows=recorded.every_row(),
            evaluations=shot.evaluations,
            events=events,
            tally=copy.deepcopy(self._recorder.tally),
            account=dict.fromkeys(WRONG, 0) | shot.counts | {"in_flight": shot.in_flight},
        )
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


async def export_model(run_dir: Path) -> bool:
    """Writes the last weights in Hugging Face's layout to `<run>/model`; says so when it cannot."""
    exporting = await asyncio.create_subprocess_exec(
        *command(run_dir, run_dir / "model"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(EXPORT_S):
            _, said = await exporting.communicate()
    except TimeoutError:
        exporting.kill()
        await exporting.wait()
        said = b"it took too long"
    if exporting.returncode != 0:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        print(f"the model was not exported: {' '.join(last)}", file=sys.stderr)
    return exporting.returncode == 0


def show(found: dict[str, Any], run_dir: Path) -> None:
    """The closing table."""
    table = Table(title=f"{found['job']}, seed {found['seed']}: {found['phase']}", box=None)
    table.title_justify = "left"
    table.add_column("", style="dim")
    table.add_column("")
    for name, value in facts(found):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print(f"{run_dir / 'report.html'}", soft_wrap=True, highlight=False)


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (what, value) for people."""

    lost = "" if found["lost"] is None else f"{found['lost']} lost, "

    def accuracy(key: str) -> str:
        held = found["held_out"][key]
        if not held:
            return "-"
        modes = ("sampled", "greedy")
        said = (f"{held[m]:.3f} {m}{of_share(held.get(f'{m}_share'))}" for m in modes)
        return ", ".join(said)

    cached = " (warm start from the cache)" if found["warm_start_cached"] else ""
    gap = found["logprob_gap_max"]
    return [
        ("held-out before", accuracy("before")),
        ("held-out after", accuracy("after")),
        ("steps", str(found["steps"])),
        *_evaluations(found),
        ("time", f"{clock(found['wall_s'])}{cached}; {found['cpu_total_s']:.0f} CPU-seconds"),
        (
            "tokens",
            f"{found['tokens_rolled_out']:,} rolled out, {found['tokens_trained']:,} trained",
        ),
        ("log-probability gap", "-" if gap is None else f"{gap:.1e} at most"),
        ("workers moved", f"{found['workers_moved']} times by stage time"),
        (
            "trajectories",
            f"{found['opened']} opened, {found['trained']} trained, {found['filtered']} filtered, "
            f"{found['stale_requeued'] + found['host_lost']} given back, "
            f"{found['typed_drops']} failed, {lost}"
            f"{found['trained_twice']} trained twice",
        ),
        *_failed(found),
    ]


def _failed(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The share of trajectories that failed, and why."""
    kinds = [Failure(**failure) for failure in found["failures"]]
    if not kinds and not found["typed_drops"]:
        return []
    why = counts(kinds).removeprefix("failed so far: ") if kinds else ""
    return [("failed", f"{100 * found['failed_share']:.1f} %" + (f": {why}" if why else ""))]


def _evaluations(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The best version, if the job asks for it, and what the last one came to elsewhere."""
    every = found["evaluations"]
    best = [e for e in every if e["step"] == found["best_version"]]
    last = [e for e in every if any(not n.startswith(f"{HELD_OUT}.") for n in e["figures"])]
    return [
        (what, f"{e['step']}: " + _figures(e))
        for what, rows in (("best version", best), ("evaluated last", last))
        for e in rows[-1:]
    ]


def _figures(e: dict[str, Any]) -> str:
    shares = e.get("shares", {})
    return ", ".join(f"{n} {v:.3f}{of_share(shares.get(n))}" for n, v in e["figures"].items())


def html(
    found: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    events: Sequence[Event],
    document: dict[str, Any],
    refresh_s: float = 0.0,
    kept: Sequence[dict[str, Any]] = (),
) -> str:
    """The report as one self-contained page, which loads itself again every `refresh_s` if that is
    not 0. `kept` are the run's samples.
    """
    start_ms = events[0].ms if events else 0
    end = (events[-1].ms - start_ms) / 1000 if events else 1.0
    news = [((e.ms - start_ms) / 1000, told(e)) for e in events]
    news = [(second, text) for second, text in news if text]
    faults = [((e.ms - start_ms) / 1000, told(e)) for e in events if unforeseen(e)]
    lengths = [
        Series("mean", column(rows, "length_mean")),
        Series("longest", column(rows, "length_max")),
    ]
    times = [
        Series("training", column(rows, "train_s")),
        Series("waiting for trajectories", column(rows, "wait_s")),
    ]
    gap = [Series("largest of the step", column(rows, "logprob_gap"))]
    every = [
        ("Summary", _table(facts(found))),
        *sections.learning(rows, evaluations),
        *_evaluated(evaluations),
        *_read(kept),
        *sections.health(rows, events),
        ("Length of trajectories, tokens", charts.lines(lengths, "step")),
        (
            "Staleness, versions",
            charts.lines([Series("mean over tokens", column(rows, "staleness"))], "step"),
        ),
        ("Log-probability gap between engine and trainer", charts.lines(gap, "step")),
        ("Who had which role when", charts.timeline(spans(events, start_ms, end), faults, end)),
        ("Seconds a step", charts.lines(times, "step")),
        *_failures(found),
        ("What happened", _table([(f"{second:.1f} s", text) for second, text in news])),
        ("CPU-seconds", _table([(n, f"{s:.1f}") for n, s in found["cpu_s"].items()])),
        ("Job", sections.job(document)),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in every)
    phase = f": {found['phase'].replace('_', ' ')}" if refresh_s else ""
    title = f"{escape(found['job'])}, seed {found['seed']}{phase}"
    again = f'<meta http-equiv="refresh" content="{refresh_s:.0f}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1>{body}</html>\n"
    )


def _read(kept: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Trajectories of evaluations, for reading."""
    shown = samples.section(kept)
    return [("Trajectories of evaluations", shown)] if shown else []


def _failures(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What failed in the job's own code, by kind and place."""
    kinds = [Failure(**failure) for failure in found["failures"]]
    rows = [(counted(f), ". ".join(filter(None, (f.text, f.fix)))) for f in kinds]
    return [("Failed trajectories", _table(rows))] if rows else []


def _evaluated(evaluations: Sequence[Evaluation]) -> list[tuple[str, str]]:
    """A section with the figures of the datasets beside the held-out set, if there are any."""
    names = {n: 0 for e in evaluations for n in e.figures if not n.startswith(f"{HELD_OUT}.")}
    curves = [
        Series(n, [(float(e.step), e.figures[n]) for e in evaluations if n in e.figures], dots=True)
        for n in names
    ]
    return [("Evaluation", charts.lines(curves, "step"))] if curves else []


def spans(events: Sequence[Event], start_ms: int, end: float) -> list[Span]:
    """Each gang's roles over time, from what the workers reported."""
    found: list[Span] = []
    current: dict[str, tuple[str, str, float]] = {}
    for event in events:
        if event.kind not in ("actual", "lost"):
            continue
        gang, at = str(event.fields["gang"]), (event.ms - start_ms) / 1000
        if gang in current:
            role, state, since = current.pop(gang)
            found.append(Span(gang, role, state, since, at))
        if event.kind == "actual" and event.fields["role"] != Role.IDLE:
            current[gang] = (str(event.fields["role"]), str(event.fields["status"]), at)
    found += [Span(gang, role, state, at, end) for gang, (role, state, at) in current.items()]
    return found


def _table(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return '<p class="none">nothing</p>'
    cells = (f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"
