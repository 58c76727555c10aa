"""Progress of a run, read from Redis as plain data; `recorder` stores it and `view` shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.api.stats import CoreStats
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle.trajectory_accounting import TERMS
from meshrl.common.state.jobs import TERMINAL_PHASES, JobRow, Phase
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.common.state.registry import RegistryEntry
from meshrl.view.health.findings import Finding, find_problems
from meshrl.view.health.run_figures import RunFigures, compute_truncated_share, extend_figures
from meshrl.view.history.blocked_jobs import ADMISSION, find_block_reason, format_other_jobs
from meshrl.view.history.early_stop import EarlyStop
from meshrl.view.history.event_text import ALERT_KINDS, format_event, should_print
from meshrl.view.history.job_failures import FailureCounter, FailureKind
from meshrl.view.mesh import prefix_stats
from meshrl.view.mesh.job_progress import describe_no_progress
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.process_usage import find_owner_job
from meshrl.view.mesh.rates import TokenRate, compute_trained_rate, estimate_remaining_s
from meshrl.view.mesh.slice_frames import GangSlicesFrame
from meshrl.view.mesh.slow_calls import find_slow_calls
from meshrl.view.mesh.worker_lines import HiddenWorkers, WorkerLine, select_worker_lines

NEWS_MS = 60_000  # for which an event has a line
MAX_CURVE_STEPS = 500  # the last steps whose rewards are shown


@dataclass(frozen=True)
class Evaluation:
    tag: str  # before | step-10 | after
    step: int
    sampled_reward: float | None  # mean reward on the held-out set; None: the job has none
    greedy_reward: float | None  # before, after, and when the best version is chosen by it
    figures: dict[str, float] = field(default_factory=dict)  # figures of all datasets, by name
    is_best: bool = False  # it is the best version so far
    early_stop: EarlyStop | None = None  # end of the run that it decided
    # of the samples that each figure is of
    scored_shares: dict[str, float] = field(default_factory=dict)
    unscored_reasons: dict[str, int] = field(default_factory=dict)  # why samples are in no figure


@dataclass(frozen=True)
class RunSnapshot:
    """Snapshot of a run at one moment."""

    job: str
    phase: Phase
    phase_text: str  # for people
    seed: int
    step: int
    steps: int
    elapsed_s: float
    eta_s: float | None = None  # None: too early to say
    warm_start_share: float = 0.0  # share done
    rewards: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    is_supervised: bool = False  # it learns answers: losses are shown instead of rewards
    evaluations: tuple[Evaluation, ...] = ()
    rollout_tokens_per_s: float = 0.0  # tokens/s
    trained_tokens_per_s: float = 0.0
    staleness: float = 0.0
    max_staleness: int = 0
    logprob_gap: float | None = None  # gap in the last step that could be measured
    entropy: float = 0.0
    reward_spread: float | None = None  # of the last step, as the two below
    truncated_share: float | None = None
    failed_share: float | None = None
    findings: tuple[Finding, ...] = ()  # about the run's health
    worker_lines: tuple[WorkerLine, ...] = ()  # those of the job, and idle ones
    hidden_workers: HiddenWorkers = field(default_factory=HiddenWorkers)  # the others
    other_jobs: tuple[str, ...] = ()  # jobs on the same mesh that have not ended, a line each
    shared_gangs: tuple[Gang, ...] = ()  # gangs of the job that instances share by time slices
    slices: tuple[GangSlicesFrame, ...] = ()  # of these gangs, for a view that shows them
    block_reason: str = ""  # why the job waits or is paused; empty: it runs
    # loaded, of the engines that live
    prefix_figures: dict[str, float] = field(default_factory=dict)
    in_flight: int = 0
    trajectory_counts: dict[str, int] = field(default_factory=dict)  # trajectories by outcome
    histogram_bounds: tuple[int, ...] = ()  # upper lengths of the histogram's buckets
    histogram: tuple[int, ...] = ()
    news: tuple[str, ...] = ()  # the last events worth a line
    alerts: tuple[str, ...] = ()  # unexpected exits and similar events so far
    failures: tuple[FailureKind, ...] = ()  # what failed in the job's own code in this session
    stale_reason: str = ""  # why the snapshot is outdated
    disk_full_reason: str = ""  # which disk is full, and the fix
    no_progress_reason: str = ""  # since when the job has made no progress, if that is too long
    error: str = ""  # why the job failed

    @property
    def is_terminal(self) -> bool:
        return self.phase in TERMINAL_PHASES


@dataclass
class RunReading:
    """Rows of a run from one read of Redis."""

    elapsed_s: float  # seconds since the run's start
    job: JobRow
    step_rows: Sequence[dict[str, Any]]  # all step rows so far
    mesh: MeshSnapshot
    evaluations: Sequence[Evaluation]
    events: Sequence[Event]  # new since the last poll

    @property
    def own_processes(self) -> list[RegistryEntry]:
        """Processes of this job, and those that serve all jobs."""
        return [entry for entry in self.mesh.entries if find_owner_job(entry) in ("", self.job.id)]


@dataclass
class RunHistory:
    """State between readings, for rates and news."""

    token_rate: TokenRate = field(default_factory=TokenRate)
    news: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=4))  # (ms, line)
    alerts: list[str] = field(default_factory=list)
    slow_calls: set[str] = field(default_factory=set)  # functions that have been reported
    failures: FailureCounter = field(default_factory=FailureCounter)
    figures: RunFigures = field(default_factory=RunFigures)

    def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            self.failures.add(event)
            if line := format_event(event):
                if event.kind != ADMISSION:  # the block reason has a line of its own
                    self.news.append((event.ms, line))
                if event.kind in ALERT_KINDS and should_print(int(event.fields.get("times", 1))):
                    self.alerts.append(line)

    def add_slow_calls(self, lines: Mapping[str, str], now_ms: float) -> None:
        """Report each function that does not return, once."""
        for function, line in lines.items():
            if function not in self.slow_calls:
                self.slow_calls.add(function)
                self.news.append((round(now_ms), line))
                self.alerts.append(line)

    def list_news(self, now_ms: float) -> tuple[str, ...]:
        """Return the lines of the last events, without old ones."""
        return tuple(line for ms, line in self.news if now_ms - ms < NEWS_MS)


def build_snapshot(reading: RunReading, history: RunHistory) -> RunSnapshot:
    """Return the snapshot at the time of `reading`, and update `history`."""
    history.add_events(reading.events)
    history.figures = extend_figures(history.figures, reading.step_rows)
    document = reading.job.document
    rows, steps = reading.step_rows, int(document["budget"]["steps"])
    own = reading.own_processes
    slow_calls = find_slow_calls(own, document, reading.mesh.now_ms)
    history.add_slow_calls(slow_calls, reading.mesh.now_ms)
    rollouts = [e for e in own if e.alive and e.kind == "rollout"]
    last = rows[-1] if rows else {}
    tokens = sum(e.stats.get("tokens", 0) for e in rollouts)
    workers, elsewhere = select_worker_lines(reading.mesh, reading.job.id)
    quiet = describe_no_progress(reading.job, reading.mesh.last_renewed_ms)
    counts = {term: int(getattr(reading.job, term)) for term in TERMS}
    is_over = reading.job.phase in (Phase.FINISHED, Phase.FAILED)
    shot = RunSnapshot(
        job=reading.job.id,
        phase=reading.job.phase,
        phase_text=reading.job.phase_text,
        seed=int(document["seed"]),
        step=reading.job.steps_done,
        steps=steps,
        elapsed_s=reading.elapsed_s,
        eta_s=None if reading.job.is_terminal else estimate_remaining_s(rows, steps),
        warm_start_share=max((CoreStats.decode(e.stats).warm_start for e in own), default=0),
        rewards=tuple(float(row["reward"]) for row in rows[-MAX_CURVE_STEPS:]),
        losses=tuple(float(row.get("loss") or 0.0) for row in rows[-MAX_CURVE_STEPS:]),
        is_supervised=document["algorithm"]["name"] == "sft",
        evaluations=tuple(reading.evaluations),
        rollout_tokens_per_s=history.token_rate.update(reading.elapsed_s, tokens),
        trained_tokens_per_s=compute_trained_rate(rows),
        staleness=float(last.get("staleness", 0)),
        max_staleness=int(document["algorithm"]["max_staleness"]),
        logprob_gap=next((r["logprob_gap"] for r in reversed(rows) if r["logprob_gap"]), None),
        entropy=float(last.get("entropy", 0)),
        reward_spread=last.get("reward_spread"),
        truncated_share=compute_truncated_share(last),
        failed_share=last.get("failed_share"),
        findings=find_problems(history.figures, document, counts, is_over),
        worker_lines=tuple(workers),
        hidden_workers=elsewhere,
        other_jobs=tuple(format_other_jobs(reading.mesh, reading.job.id)),
        shared_gangs=reading.mesh.find_shared_gangs(reading.job.id),
        block_reason=find_block_reason(reading.job),
        prefix_figures=prefix_stats.sum_engine_figures(own),
        in_flight=sum(int(e.stats.get("in_flight", 0)) for e in rollouts),
        trajectory_counts=counts,
        news=history.list_news(reading.mesh.now_ms),
        alerts=tuple(history.alerts),
        failures=history.failures.kinds,
        error=reading.job.error,
        no_progress_reason=f"{quiet}. Run `meshrl status --stalled` for details." if quiet else "",
    )
    return replace(
        shot,
        disk_full_reason=_find_disk_wait(own) or prefix_stats.find_offload_error(own),
        **_sum_histograms(rollouts),
    )


def parse_evaluations(events: Iterable[Event]) -> list[Evaluation]:
    """Return the last evaluation of each tag from `evaluation` events."""
    by_tag = {event.fields["tag"]: event.fields for event in events}
    return list(map(parse_evaluation, by_tag.values()))


def parse_evaluation(row: dict[str, Any]) -> Evaluation:
    """Return the evaluation in the fields of an `evaluation` event."""
    sampled, greedy = row.get("sampled"), row.get("greedy")
    return Evaluation(
        tag=str(row["tag"]),
        step=int(row["step"]),
        sampled_reward=None if sampled is None else float(sampled),
        greedy_reward=None if greedy is None else float(greedy),
        figures={name: float(value) for name, value in row.get("figures", {}).items()},
        is_best=bool(row.get("best", False)),
        early_stop=EarlyStop.from_event(row),
        scored_shares={name: float(share) for name, share in row.get("shares", {}).items()},
        unscored_reasons={kind: int(n) for kind, n in row.get("reasons", {}).items()},
    )


def _find_disk_wait(entries: Sequence[RegistryEntry]) -> str:
    """Return which process waits for disk space, or an empty text."""
    waits = ((e.name, str(w["what"])) for e in entries if e.alive for w in e.waits)
    for name, what in waits:
        if what.startswith(("room ", "disk space ")):
            return (
                f"a disk is full: {name} waits for {what}. Free disk space: it continues on "
                "its own."
            )
    return ""


def _sum_histograms(rollouts: Sequence[RegistryEntry]) -> dict[str, Any]:
    """Return the trajectories in flight by length, summed over the shards (all have the same
    buckets).
    """
    counted = [e.stats for e in rollouts if e.stats.get("histogram")]
    if not counted:
        return {}
    columns = zip(*(stats["histogram"] for stats in counted), strict=False)
    bounds = tuple(int(b) for b in counted[0].get("bounds", ()))
    return {"histogram": tuple(int(sum(column)) for column in columns), "histogram_bounds": bounds}
