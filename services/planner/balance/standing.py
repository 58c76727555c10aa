"""How a job stands at a look: what its window says, and whether anything presses for another split.
Both the policy of engines of one worker and that of several go by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from meshrl.common.state.pool.demand.measured import Curve
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import FinishMove
from meshrl.services.planner.balance import triggers
from meshrl.services.planner.balance.trials import Trial
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.forecast.accounts import StepMark, Window
from meshrl.services.planner.forecast.degrees import NOTED
from meshrl.services.planner.forecast.prediction import (
    Prediction,
    corrected,
    demand,
    predicted,
    rates,
    stepped_s,
)
from meshrl.services.planner.forecast.quantities import Demand, Split, StepRates, StepTerms
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Team

SWITCH_S = 3.0  # that a move takes where none was measured: to start a role process
WEIGHT = 0.3  # of the last move, in what a move takes
LEAST_STEPS = 2  # of a window by which anything is planned;
SURE = 0.2  # share of a step that a move must save which is decided on so few
CHANGED = 1.5  # times the imbalance of a move that did not pay: it is another job by now


@dataclass(frozen=True, slots=True)
class Pressed:
    """A job for which another split is to be looked for."""

    window: Window  # of no steps, where none was measured yet
    error: float  # of its steps' mean time, as a share of it
    demand: Demand
    rates: StepRates
    model: Prediction  # of the split that it has
    trigger: str

    @property
    def step_s(self) -> float:
        """Seconds of a step, as measured, or else as predicted."""
        return self.window.step_s if self.window.steps else self.model.step_s

    @property
    def stays_s(self) -> float:
        """What a step takes with this split: as measured, or less, as far as it can be believed."""
        believed_s = corrected(self.model.step_s, self.model.step_s, self.step_s, self.error)
        return min(self.step_s, believed_s)

    def after_s(self, split: Split, terms: StepTerms) -> float:
        """What it takes with another one."""
        model_s = stepped_s(self.demand, self.rates, split, terms, self.step_s)
        return corrected(model_s, self.model.step_s, self.step_s, self.error)

    def figures(self, job: PlannedJob, after: Split, after_s: float) -> dict[str, Any]:
        """What a move to another split is decided by."""
        model = self.model
        then = predicted(self.demand, self.rates, after, terms_of(job), self.step_s)
        return model.rounded() | {
            "rollout_s": model.rollout_s,
            "train_s": model.train_s,
            "before_s": round(self.step_s, 4),
            "trigger": self.trigger,
            "predicted_s": round(after_s, 4),
            "then_rollout_s": round(then.rollout_s, 4),
            "then_train_s": round(then.train_s, 4),
            "step": job.steps_done,
        }

    def trial(
        self,
        job: PlannedJob,
        watch: SplitWatch,
        rule: str,
        resident: str,
        after: Split,
        after_s: float,
        moved: int,
    ) -> Trial:
        """The trial of a move to another split, with the first resident that arrived."""
        assert watch.split is not None
        trial = Trial(
            rule,
            resident,
            watch.split,
            after,
            job.steps_done,
            self.step_s,
            after_s,
            1.0,
            self.demand,
            self.rates,
            moved,
            self.error,
        )
        return replace(trial, bias=watch.bias.get(trial.towards, 1.0))


def pressed(
    draft: Draft, job: PlannedJob, watch: SplitWatch, mark: StepMark
) -> tuple[SplitWatch, Pressed | None]:
    """The watch of a job, and what presses; None where nothing does, or it rests."""
    team, config, terms, split = draft.team(job.id), job.config, terms_of(job), watch.split
    window = watch.window(mark, LEAST_STEPS)
    assert split is not None
    told = {d.move.id for d in draft.decisions if isinstance(d, FinishMove)}
    moving = {one.gang for one in draft.snapshot.moves if one.id not in told}
    if window is None or any(one.gang in moving for one in team.all):
        return watch, None
    now, cores = demand(window, terms, job.measured.lengths), host_cores(draft, team)
    found = rates(window, now, terms, split, curves_of(job, watch), cores) if now else None
    if now is None or found is None or window.step_s <= 0:
        return explained(watch, None, "too little has been measured"), None
    model = predicted(now, found, split, terms, window.step_s)
    for towards, then in watch.failed_at.items():  # the job has become another one since
        change = imbalance(model) / max(then, 1e-9)
        if change >= CHANGED or change <= 1 / CHANGED:
            watch = replace(watch, failures={**watch.failures, towards: 0})
    rejected, since_planned = job.rejected - watch.rejected, mark.step - watch.planned_step
    pressing = triggers.pressing(window, split, terms, model, config, rejected, since_planned)
    failures = max(watch.failures.values(), default=0)
    since = mark.step - watch.moved_step if watch.moved_step is not None else None
    if why := triggers.rests(job.steps_done, since, config, failures):
        return explained(watch, model, why, window), None
    if not pressing:
        return explained(watch, model, "nothing presses for another split", window), None
    watch = replace(watch, planned_step=mark.step, rejected=job.rejected)
    first = watch.older.step if watch.older is not None else mark.step
    error = watch.times.error(first, mark.step)
    return watch, Pressed(window, error, now, found, model, pressing)


def refused(
    job: PlannedJob,
    watch: SplitWatch,
    team: Team,
    found: Pressed,
    after_s: float,
    towards: str,
    n: int,
) -> str:
    """Why a move of `n` workers to a step of `after_s` is not made; empty: it is."""
    window, config, step_s = found.window, job.config, found.stays_s
    left = job.steps - job.steps_done if job.steps else 1 << 30
    switch_s = (watch.switch_s or SWITCH_S) * n / max(1, team.workers)
    saved_s = step_s - after_s
    if window.steps < config.window_steps and saved_s < SURE * step_s:
        return f"{window.steps} steps are too few to tell"
    failures = watch.failures.get(towards, 0)
    why = triggers.worth(saved_s, step_s, config, failures, left, switch_s)
    return f"{n} more to {towards}: {why}" if why else ""


def terms_of(job: PlannedJob) -> StepTerms:
    """What a job's file says of a step."""
    return StepTerms(
        job.groups_per_step, job.group_size, job.max_staleness, job.slots, job.bin_tokens
    )


def split_of(job: PlannedJob, team: Team) -> Split:
    """Who does what now."""
    degrees: tuple[int, ...] = ()
    if job.need.degrees != (1,):
        degrees = tuple(sorted((len(one.workers) for one in team.engines), reverse=True))
    return Split(len(team.engines), job.need.ranks + len(team.helpers), degrees)


def timed(draft: Draft, job: PlannedJob, watch: SplitWatch) -> SplitWatch:
    """Takes in what the moves of a job took that are complete by this look."""
    for one in draft.decisions:
        if isinstance(one, FinishMove) and not one.undone and one.move.back.get("job") == job.id:
            took_s = (draft.snapshot.now_ms - one.move.started_ms) / 1000
            known = watch.switch_s
            watch = replace(watch, switch_s=known + WEIGHT * (took_s - known) if known else took_s)
    return watch


def imbalance(model: Prediction) -> float:
    """Rollout over training."""
    return model.rollout_s / max(model.train_s, 1e-9)


def explained(
    watch: SplitWatch, model: Prediction | None, verdict: str, window: Window | None = None
) -> SplitWatch:
    """Says to people what is predicted, and why this is done."""
    binds = model.binds if model is not None else ""
    told: dict[str, Any] = dict(watch.explained)
    if model is not None and window is not None and window.steps:
        told |= model.rounded() | {"binds": binds, "measured_s": round(window.step_s, 4)}
    errors = [one.error for one in watch.verdicts]
    told |= {"verdict": verdict, "error": round(median(errors), 4) if errors else None}
    return replace(watch, explained=told)


def curves_of(job: PlannedJob, watch: SplitWatch) -> Sequence[Curve]:
    """Those of its engines; while all of them have begun anew, what was known of them before."""
    sure = [curve for curve in job.measured.curves if curve.steps >= NOTED]
    return sure or list(watch.curves.values()) or job.measured.curves


def host_cores(draft: Draft, team: Team) -> float:
    """The share of its cores that the busiest host of a job keeps busy; 0: not known."""
    there = {draft.workers[worker].host for seated in team.all for worker in seated.workers}
    hosts = [host for host in draft.snapshot.hosts if host.name in there and host.cores > 0]
    return max((min(1.0, host.busy_cores / host.cores) for host in hosts), default=0.0)
