"""Reads the progress of a run from Redis as plain data, which `recorder` keeps and `view` shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.api.stats import CoreStats
from meshrl.common.state.events import Event
from meshrl.common.state.jobs import ENDED, JobRow, Phase
from meshrl.common.state.lifecycle.accounting import COUNTED
from meshrl.common.state.registry import Entry
from meshrl.view.history.failures import FailureKind, Heard
from meshrl.view.history.held import others, reason
from meshrl.view.history.news import ALERTS, is_worth_a_line, told
from meshrl.view.mesh import prefixes
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import quiet_text
from meshrl.view.mesh.rates import TokenRate, time_to_go, trained_rate
from meshrl.view.mesh.snapshot import MeshSnapshot
from meshrl.view.mesh.workers import WorkerLine, WorkerSums, worker_lines

CURVE = 500  # the last steps whose rewards are shown


@dataclass(frozen=True)
class Evaluation:
    tag: str  # before | step-10 | after
    step: int
    sampled: float | None  # mean reward on the held-out set; None: the job has none
    greedy: float | None  # before, after, and when the best version is chosen by it
    figures: dict[str, float] = field(default_factory=dict)  # figures of all datasets, by name
    best: bool = False  # it is the best version so far
    shares: dict[str, float] = field(default_factory=dict)  # of the samples that each figure is of
    reasons: dict[str, int] = field(default_factory=dict)  # why samples are in no figure


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment."""

    job: str
    phase: Phase
    seed: int
    step: int
    steps: int
    elapsed_s: float
    eta_s: float | None = None  # None: too early to say
    warm_start: float = 0.0  # share done
    rewards: tuple[float, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    rolled_out_s: float = 0.0  # tokens/s
    trained_s: float = 0.0
    staleness: float = 0.0
    max_staleness: int = 0
    logprob_gap: float | None = None  # gap in the last step that could be measured
    entropy: float = 0.0
    workers: tuple[WorkerLine, ...] = ()  # those of the job, and idle ones
    elsewhere: WorkerSums = field(default_factory=WorkerSums)  # the others
    others: tuple[str, ...] = ()  # jobs on the same mesh that have not ended, a line each
    held: str = ""  # why the job waits or is paused; empty: it runs
    prefixes: dict[str, float] = field(default_factory=dict)  # loaded, of the engines that live
    in_flight: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # trajectories by what became of them
    bounds: tuple[int, ...] = ()  # upper lengths of the histogram's buckets
    histogram: tuple[int, ...] = ()
    news: tuple[str, ...] = ()  # the last events worth a line
    alerts: tuple[str, ...] = ()  # every process that ended unasked, and the like, so far
    failures: tuple[FailureKind, ...] = ()  # what failed in the job's own code in this session
    trouble: str = ""  # why this is not up to date
    full: str = ""  # which disk is full, and what to do
    quiet: str = ""  # since when the job has made no progress, if that is too long
    error: str = ""  # why the job failed

    @property
    def over(self) -> bool:
        return self.phase in ENDED


@dataclass
class RunReading:
    """What one look at Redis returned of a run."""

    at: float  # seconds since the run's start
    job: JobRow
    rows: Sequence[dict[str, Any]]  # all step rows so far
    mesh: MeshSnapshot
    evaluations: Sequence[Evaluation]
    events: Sequence[Event]  # new since the last look

    @property
    def own(self) -> list[Entry]:
        """The processes of this job, and those that serve all."""
        return [entry for entry in self.mesh.entries if owner(entry) in ("", self.job.id)]


@dataclass
class RunHistory:
    """What a series of readings needs to remember for rates and news."""

    tokens: TokenRate = field(default_factory=TokenRate)
    news: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    alerts: list[str] = field(default_factory=list)
    failures: Heard = field(default_factory=Heard)

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            self.failures.hear(event)
            if line := told(event):
                self.news.append(line)
                if event.kind in ALERTS and is_worth_a_line(int(event.fields.get("times", 1))):
                    self.alerts.append(line)


def snapshot(reading: RunReading, history: RunHistory) -> RunSnapshot:
    """The run at the time of `reading`; `history` is brought up to date."""
    history.hear(reading.events)
    document = reading.job.document
    rows, steps = reading.rows, int(document["budget"]["steps"])
    own = reading.own
    rollouts = [e for e in own if e.alive and e.kind == "rollout"]
    last = rows[-1] if rows else {}
    tokens = sum(e.stats.get("tokens", 0) for e in rollouts)
    workers, elsewhere = worker_lines(reading.mesh, reading.job.id)
    quiet = quiet_text(reading.job, reading.mesh.renewed_ms)
    shot = RunSnapshot(
        job=reading.job.id,
        phase=reading.job.phase,
        seed=int(document["seed"]),
        step=reading.job.steps_done,
        steps=steps,
        elapsed_s=reading.at,
        eta_s=time_to_go(rows, steps),
        warm_start=max((CoreStats.of(e.stats).warm_start for e in own), default=0),
        rewards=tuple(float(row["reward"]) for row in rows[-CURVE:]),
        evaluations=tuple(reading.evaluations),
        rolled_out_s=history.tokens.see(reading.at, tokens),
        trained_s=trained_rate(rows),
        staleness=float(last.get("staleness", 0)),
        max_staleness=int(document["algorithm"]["max_staleness"]),
        logprob_gap=next((r["logprob_gap"] for r in reversed(rows) if r["logprob_gap"]), None),
        entropy=float(last.get("entropy", 0)),
        workers=tuple(workers),
        elsewhere=elsewhere,
        others=tuple(others(reading.mesh, reading.job.id)),
        held=reason(reading.job),
        prefixes=prefixes.of_engines(own),
        in_flight=sum(int(e.stats.get("in_flight", 0)) for e in rollouts),
        counts={term: getattr(reading.job, term) for term in COUNTED},
        news=tuple(history.news),
        alerts=tuple(history.alerts),
        failures=history.failures.all,
        error=reading.job.error,
        quiet=f"{quiet}. `meshrl status --stalled` says more." if quiet else "",
    )
    return replace(shot, full=_without_room(own) or prefixes.trouble(own), **_histogram(rollouts))


def evaluations_of(events: Iterable[Event]) -> list[Evaluation]:
    """What events `evaluation` tell of, the last of each tag."""
    by_tag = {event.fields["tag"]: event.fields for event in events}
    return list(map(evaluation, by_tag.values()))


def evaluation(row: dict[str, Any]) -> Evaluation:
    """The evaluation that the fields of an event `evaluation` tell of."""
    sampled, greedy = row.get("sampled"), row.get("greedy")
    return Evaluation(
        tag=str(row["tag"]),
        step=int(row["step"]),
        sampled=None if sampled is None else float(sampled),
        greedy=None if greedy is None else float(greedy),
        figures={name: float(value) for name, value in row.get("figures", {}).items()},
        best=bool(row.get("best", False)),
        shares={name: float(share) for name, share in row.get("shares", {}).items()},
        reasons={kind: int(n) for kind, n in row.get("reasons", {}).items()},
    )


def _without_room(entries: Sequence[Entry]) -> str:
    """Which process waits for room on a disk, if one does."""
    waits = ((e.name, str(w["what"])) for e in entries if e.alive for w in e.waits)
    for name, what in waits:
        if what.startswith("room "):
            return f"a disk is full: {name} waits for {what}. Make room: it goes on by itself."
    return ""


def _histogram(rollouts: Sequence[Entry]) -> dict[str, Any]:
    """Trajectories in flight by length, summed over the shards (all have the same buckets)."""
    counted = [e.stats for e in rollouts if e.stats.get("histogram")]
    if not counted:
        return {}
    columns = zip(*(stats["histogram"] for stats in counted), strict=False)
    bounds = tuple(int(b) for b in counted[0].get("bounds", ()))
    return {"histogram": tuple(int(sum(column)) for column in columns), "bounds": bounds}
