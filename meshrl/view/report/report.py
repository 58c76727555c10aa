"""Results of a run: `report.html`, also while it runs, `model/`, and `summary.json`."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import StorageFull
from meshrl.common.base.files import documents
from meshrl.common.job.evaluation_plan import LOSS_METRIC
from meshrl.common.mesh.process.diagnosis.failure import DISK_FULL_ERRNOS
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import VIOLATIONS
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.store.planner_reports import OPENING, SPEEDUP_RULES
from meshrl.common.state.pool.workers.rows import Role
from meshrl.directory.directory_paths import write_json
from meshrl.directory.model_export import build_export_command
from meshrl.view.guard import WarningGuard
from meshrl.view.health.findings import find_problems
from meshrl.view.health.run_figures import RunFigures
from meshrl.view.history.blocked_jobs import sum_blocked_s
from meshrl.view.history.event_text import is_unexpected_exit
from meshrl.view.history.job_failures import summarize_failures
from meshrl.view.history.lost_hosts import count_lost_hosts
from meshrl.view.history.run_snapshot import Evaluation, RunSnapshot
from meshrl.view.history.sample_files import iterate_samples
from meshrl.view.mesh import prefix_stats
from meshrl.view.mesh.rates import is_supervised_step
from meshrl.view.mesh.slice_lanes import read_lanes
from meshrl.view.recording import audit
from meshrl.view.recording.disk_space import DiskSpaceWaiter
from meshrl.view.recording.job_usage import JobUsage
from meshrl.view.recording.recorder import Recorder
from meshrl.view.recording.run_record import read_events, read_rare_events, thin_rows
from meshrl.view.recording.shared_snapshot import RunningMesh
from meshrl.view.report.report_page import render_page
from meshrl.view.report.trajectory_table import select_report_samples
from meshrl.view.trace import trace_writer as traced

TRADED_ROLES = {Role.ROLLOUT, Role.TRAINING}


ACCOUNT_TERMS = (
    *("opened", "trained", "filtered", "stale_requeued", "host_lost", "in_flight"),
    *("lost", "trained_twice", "opened_twice", "committed_twice", "typed_drops"),
)


@dataclass(frozen=True)
class RunResult:
    """State of a run when it is summarized."""

    job: str
    phase: Phase
    seed: int
    wall_s: float
    account: dict[str, int]
    document: Mapping[str, Any] = field(default_factory=dict)  # of the job


def summarize_result(result: RunResult, steps: int) -> dict[str, Any]:
    """Return the part of a summary about the run's end; `steps` are those that are done."""
    identity = {"job": result.job, "phase": result.phase, "seed": result.seed, "steps": steps}
    return (
        identity
        | {"wall_s": round(result.wall_s, 1)}
        | {term: result.account[term] for term in ACCOUNT_TERMS}
    )


def summarize(
    result: RunResult,
    rows: Iterable[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    events: Sequence[Event],
    usage: JobUsage,
) -> dict[str, Any]:
    """Return the summary of a run from its record; rows are read once."""
    cpu_s = usage.sum_cpu_by_name()
    steps = tokens = tokens_trained = 0
    gap: float | None = None
    staleness: int | None = None
    figures = RunFigures()
    losses: dict[str, float] = {}
    for row in rows:
        figures.add(row)
        steps += 1
        losses |= _read_losses(row, is_first=not losses)
        tokens += int(row["tokens"])
        tokens_trained += int(row["tokens_trained"])
        if row.get("logprob_gap") is not None:
            gap = max(gap or 0.0, float(row["logprob_gap"]))
        if row.get("staleness_max") is not None:
            staleness = max(staleness or 0, int(row["staleness_max"]))
    ended_count = sum(result.account[fate] for fate in ("trained", "filtered", "typed_drops"))
    return summarize_result(result, steps) | {
        "held_out": {
            "before": _summarize_held_out(evaluations, "before"),
            "after": _summarize_held_out(evaluations, "after"),
        },
        "loss": losses or None,
        "evaluations": [_summarize_evaluation(e) for e in evaluations],
        "best_version": next((e.step for e in reversed(evaluations) if e.is_best), None),
        "early_stop": _summarize_early_stop(evaluations, steps),
        "warm_start_cached": usage.warm_start_cached,
        "cpu_s": cpu_s,
        "cpu_total_s": round(sum(cpu_s.values()), 1),
        "cpu_shared_s": round(usage.shared_s, 1),
        "accelerator_s": round(usage.accelerator_s, 1),
        "cost": round(usage.cost, 6) if usage.cost else None,
        "cost_per_million_tokens": _divide_cost(usage.cost, tokens_trained),
        "slices": usage.sum_slices(),
        **{
            f"{state}_s": round(seconds, 1)
            for state, seconds in sum_blocked_s(events, result.job, sessions=usage.sessions).items()
        },
        "tokens_rolled_out": tokens,
        "tokens_sampled": usage.sum_tokens("rollout/"),
        "tokens_trained": tokens_trained,
        "prefixes": prefix_stats.sum_figures(usage.prefixes.values()),
        # Ended trajectories without a reward.
        "failed_share": round(result.account["typed_drops"] / max(1, ended_count), 4),
        "failures": summarize_failures(events),
        "health": summarize_health(figures, result),
        "workers_moved": len(list_planned_moves(events)),
        "hosts_lost": count_lost_hosts(events),
        "logprob_gap_max": gap,
        "staleness_max": staleness,
        "processes_ended": sum(
            int(e.fields.get("count", 1)) for e in events if is_unexpected_exit(e)
        ),
    }


def _divide_cost(cost: float, tokens_trained: int) -> float | None:
    """Return the cost of a million trained tokens; None without prices or tokens."""
    return round(cost / tokens_trained * 1e6, 6) if cost and tokens_trained else None


def summarize_health(figures: RunFigures, result: RunResult) -> list[dict[str, Any]]:
    """Return the findings about a run's health, failures first."""
    is_over = result.phase in (Phase.FINISHED, Phase.FAILED)
    found = find_problems(figures, result.document, result.account, is_over)
    return [finding.to_document() for finding in found]


def _read_losses(row: dict[str, Any], *, is_first: bool) -> dict[str, float]:
    """Return the losses of a step by their key in the summary; none unless it is supervised."""
    if not is_supervised_step(row):
        return {}
    found = {"first": row["loss"]} if is_first else {}
    held_out = {"held_out": row[LOSS_METRIC]} if row.get(LOSS_METRIC) is not None else {}
    return found | {"last": row["loss"]} | held_out


def list_role_moves(events: Sequence[Event]) -> list[Event]:
    """Return completed moves of gangs between rollout and training, by planner or user."""
    return [
        e for e in events if e.kind == "move" and {e.fields["from"], e.fields["to"]} == TRADED_ROLES
    ]


def list_planned_moves(events: Sequence[Event]) -> list[Event]:
    """Return the planner's moves for faster steps that did not stop other gangs, each once.

    Between start and end every other gang generated, computed bins or committed.
    """
    first = next((e.ms for e in events if e.kind == "step"), None)
    if first is None:
        return []
    found = {
        e.fields["resident"]: e
        for e in list_role_moves(events)
        if e.fields.get("policy") in SPEEDUP_RULES
        and not e.fields["undone"]
        and (e.fields["policy"] == OPENING or float(e.fields["started_ms"]) > first)
        and all(other["after"] > other["before"] for other in e.fields.get("others", {}).values())
    }
    return list(found.values())


def _summarize_evaluation(e: Evaluation) -> dict[str, Any]:
    """Return an evaluation's figures, and the share of samples of each that does not cover all."""
    missing = {name: share for name, share in e.scored_shares.items() if share < 1.0}
    found: dict[str, Any] = {"tag": e.tag, "step": e.step, "figures": e.figures}
    return found | ({"shares": missing, "reasons": e.unscored_reasons} if missing else {})


def _summarize_early_stop(evaluations: Sequence[Evaluation], steps: int) -> dict[str, Any] | None:
    stops = (e.early_stop for e in reversed(evaluations) if e.early_stop)
    return next(
        (asdict(stop) | {"reason": stop.reason} for stop in stops if stop.step == steps), None
    )


def _summarize_held_out(evaluations: Sequence[Evaluation], tag: str) -> dict[str, float] | None:
    found = next((e for e in evaluations if e.tag == tag), None)
    if found is None or found.sampled_reward is None:
        return None
    shares = {name.rpartition(".")[2]: s for name, s in found.scored_shares.items() if s < 1.0}
    missing = {f"{name}_share": s for name, s in shares.items() if name in ("sampled", "greedy")}
    return {"sampled": found.sampled_reward, "greedy": found.greedy_reward or 0.0} | missing


EXPORT_LOG, EXPORT_TIMEOUT_S = "export", 120.0
PAGE_INTERVAL_S = 10.0  # between two pages of a run that goes on
PAGE_COST_FACTOR = 20  # times what a page takes that is between two: a twentieth of a core at most
EXPORTED_PHASES = (Phase.TRAINING, Phase.EVALUATION, Phase.FINISHED, Phase.STOPPED)


async def write_results(
    recorder: Recorder, has_given_up: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Write the results of a run, at any kind of end, and return the summary.

    Waits for space on a full disk until `has_given_up`.
    """
    room, guard = DiskSpaceWaiter(recorder.mesh.clock, has_given_up), WarningGuard()
    run_dir, document = recorder.run_dir, recorder.job_file_content["document"]
    events = read_events(run_dir)
    evaluations = list(recorder.snapshot.evaluations) if recorder.snapshot else []
    found = _summarize_run(recorder, events, evaluations, guard)
    with guard("the report"):
        samples = select_report_samples(iterate_samples(run_dir))
        rows = thin_rows(recorder.record.iterate_rows())
        page = render_page(
            *(found, rows, evaluations, events, document),
            kept_samples=samples,
            lanes=read_lanes(run_dir),
        )
        await room.write_when_space(lambda: write_page(run_dir, page))
    if document.get("tracking", {}).get("trace"):
        with guard("the trace, which `meshrl trace` can write later,"):
            await asyncio.to_thread(
                traced.write_trace, run_dir, run_dir / traced.TRACE_FILE, events
            )
    if found["phase"] in EXPORTED_PHASES and found["steps"]:
        with guard("the export of the model, which `meshrl export` can repeat,"):
            await export_model(recorder.mesh, run_dir)
    # Last: a process that waits for the summary finds all other files.
    await room.write_when_space(lambda: write_json(run_dir / "summary.json", found))
    return found


def _summarize_run(
    recorder: Recorder, events: list[Event], evaluations: list[Evaluation], guard: WarningGuard
) -> dict[str, Any]:
    """Return a run's summary; how the run ended is in it even if the rest cannot be made."""
    shot, job = recorder.snapshot, recorder.job
    document = recorder.job_file_content["document"]
    phase, seed = shot.phase if shot else Phase.QUEUED, int(document["seed"])
    account = audit.account_for_run(recorder.run_dir, events, job)
    end = RunResult(job, phase, seed, recorder.wall_s, account, document)
    found = summarize_result(end, shot.step if shot else 0)
    with guard("the rest of the summary"):
        rows = recorder.record.iterate_rows()
        found = summarize(end, rows, evaluations, events, recorder.usage)
    return found


class LivePage:
    """Report of a running run, written periodically by a task beside its recorder.

    An error that blocks the page is printed once, and the next page is tried.
    """

    def __init__(self, recorder: Recorder, on_error: Callable[[str], None]) -> None:
        self._recorder, self._on_error = recorder, on_error
        self._next_page_at_s, self._last_error = 0.0, ""
        self._page_task: asyncio.Task[None] | None = None
        self._is_closed, self._write_lock = False, threading.Lock()

    def update_if_due(self) -> None:
        """Start a page if it is due and none is in progress; long runs, whose page is slow, get it
        less often.
        """
        recorder = self._recorder
        if self._page_task is not None and not self._page_task.done():
            return
        if recorder.snapshot is None or recorder.mesh.clock.monotonic() < self._next_page_at_s:
            return
        making = self._update(recorder.snapshot)
        self._page_task = asyncio.create_task(making, name="live page")

    async def aclose(self) -> None:
        """Release the page: one in progress is not written."""
        with self._write_lock:
            self._is_closed = True
        if self._page_task is not None:
            self._page_task.cancel()
            await asyncio.wait([self._page_task])

    async def _update(self, snapshot: RunSnapshot) -> None:
        clock = self._recorder.mesh.clock
        started, error_text = clock.monotonic(), ""
        try:
            await asyncio.to_thread(self._write, snapshot, self._recorder.wall_s)
        except StorageFull:  # a full disk is shown anyway
            pass
        except Exception as error:  # whatever it is, the run goes on
            if not (isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS):
                error_text = f"the report could not be written: {type(error).__name__}: {error}"
        if error_text and error_text != self._last_error:
            self._on_error(error_text)
        self._last_error = error_text
        now = clock.monotonic()
        self._next_page_at_s = now + max(PAGE_INTERVAL_S, PAGE_COST_FACTOR * (now - started))

    def _write(self, snapshot: RunSnapshot, wall_s: float) -> None:
        """Write the page; read the record line by line, since all of a long one would take hundreds
        of MB.
        """
        run_dir, recorded = self._recorder.run_dir, self._recorder.record
        job, document = self._recorder.job, self._recorder.job_file_content["document"]
        events = list(read_rare_events(run_dir))
        account = (
            dict.fromkeys(VIOLATIONS, 0)
            | snapshot.trajectory_counts
            | {"in_flight": snapshot.in_flight}
        )
        end = RunResult(job, snapshot.phase, snapshot.seed, wall_s, account, document)
        tally = copy.deepcopy(self._recorder.usage)
        found = summarize(end, recorded.iterate_rows(), snapshot.evaluations, events, tally)
        found["lost"] = None  # known when nothing is in flight any more
        samples = select_report_samples(iterate_samples(run_dir))
        rows = thin_rows(recorded.iterate_rows())
        page = render_page(
            *(found, rows, snapshot.evaluations, events, document),
            *(PAGE_INTERVAL_S, samples, read_lanes(run_dir)),
        )
        with self._write_lock:
            if not self._is_closed:
                write_page(run_dir, page)


def write_page(run_dir: Path, page: str) -> None:
    """Write the page atomically: no reader sees half a page. Raises StorageFull."""
    documents.write_bytes(run_dir / "report.html", page.encode(), durable=False)


async def export_model(mesh: RunningMesh, run_dir: Path) -> bool:
    """Write the last weights in Hugging Face's layout to `<run>/model`; print why if they cannot be
    written.

    Returns True if they were written.
    """
    log = mesh.mesh_paths.log_path(EXPORT_LOG)
    try:
        exporting = mesh.start_program(build_export_command(run_dir, run_dir / "model"), EXPORT_LOG)
        try:
            status = await exporting.wait(EXPORT_TIMEOUT_S)
        finally:
            exporting.kill()
        words = log.read_text(errors="replace").strip().splitlines()
        message = "the export exceeded its time limit" if status is None else "".join(words[-1:])
    except OSError as error:
        status, message = 1, f"{log}: {error}"
    if status != 0:
        print(f"the model was not exported: {message}", file=sys.stderr)
    return status == 0
