"""Decides which workers of a job roll out and which train, and whether the last move paid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from common.pool.decisions import Finish, Judge, Why
from common.pool.needs import PlannedJob
from common.pool.rows import Role
from common.state.jobs import Phase
from services.planner.balance import trials, triggers
from services.planner.balance.accounts import Mark, Window
from services.planner.balance.prediction import (
    Demand,
    Prediction,
    Rates,
    Split,
    Terms,
    corrected,
    demand,
    predicted,
    rates,
)
from services.planner.balance.trials import Trial, Verdict
from services.planner.balance.watch import Watch
from services.planner.draft import Draft
from services.planner.policies.moves import move
from services.planner.team import Seated, Team

RULE, UNDO = "stage_time", "unpaid"
SWITCH_S = 3.0  # that a move takes where none was measured: to start a role process
WEIGHT = 0.3  # of the last move, in what a move takes
LEAST_STEPS = 2  # of a window by which anything is planned;
SURE = 0.25  # share of a step that a move must save which is decided on so few
FOREVER_S = 1e6
CHANGED = 1.5  # times the imbalance of a move that did not pay: it is another job by now


def balance(draft: Draft, job: PlannedJob, watch: Watch) -> Watch:
    """Moves engines or helpers of a job to the other side where that is predicted to pay, undoes
    moves that did not, and returns what is to be remembered.
    """
    team, config = draft.team(job.id), job.config
    if not job.need.helped:
        _dismiss(draft, job, team)
        return watch
    watch = _timed(draft, job, watch)
    if job.phase != Phase.TRAINING or job.held or team.core is None or not team.core.awake:
        return watch.interrupted() if watch.older is not None else watch
    if draft.snapshot.now_ms - watch.observed_ms < 1000 * config.interval_s:
        return watch
    account = watch.account.credited(job.measured)
    mark = Mark(round(account.total.steps), draft.snapshot.now_ms, account.total)
    split, terms = Split(len(team.engines), 1 + len(team.helpers)), _terms(job)
    watch = replace(watch, observed_ms=mark.ms)
    if watch.times.last == mark.step and watch.split == split:
        return watch  # counts of half a step fit no others
    watch = replace(watch, account=account)
    watch = watch.marked(mark, split, terms.max_staleness, config.window_steps)
    if not config.moves or job.need.degrees != (1,):
        return watch
    if watch.trial is not None:
        return _try(draft, job, watch, mark)
    return _plan(draft, job, watch, mark)


# -- what a move brought ---------------------------------------------------------------------------


def _try(draft: Draft, job: PlannedJob, watch: Watch, mark: Mark) -> Watch:
    trial, team, terms = watch.trial, draft.team(job.id), _terms(job)
    assert trial is not None
    if watch.split != trial.after:
        return replace(watch, trial=None)  # others have changed it: nobody can tell
    trial = trials.began(trial, team.settled, mark, terms)
    watch = replace(watch, trial=trial)
    failures = watch.failures.get(trial.towards, 0)
    steps = job.config.window_steps * (1 + failures)
    verdict = trials.judged(trial, mark, watch.times, terms, steps)
    if verdict is None:
        return watch
    imbalance = _imbalance(predicted(trial.demand, trial.rates, trial.before, terms, 0.0))
    watch = watch.convinced(verdict, imbalance, mark.step)
    draft.decide(Judge(job.id, verdict.told(), Why(verdict.rule, job.id)))
    if not verdict.paid:
        figures = {"regret_s": round(verdict.regret_s, 4), "step": job.steps_done}
        _shift(draft, job, team, -_shifted(trial), UNDO, figures)
    return _explain(watch, None, _judged_words(verdict))


def _shifted(trial: Trial) -> int:
    """Workers that a trial's move made train; negative: roll out."""
    return trial.after.trainers - trial.before.trainers


# -- what a move would bring -----------------------------------------------------------------------


def _plan(draft: Draft, job: PlannedJob, watch: Watch, mark: Mark) -> Watch:
    team, config, terms, split = draft.team(job.id), job.config, _terms(job), watch.split
    window = watch.window(mark, LEAST_STEPS)
    assert split is not None
    if window is None or any(one.gang in _under_way(draft) for one in team.all):
        return watch
    now = demand(window, terms)
    first = watch.older.step if watch.older is not None else mark.step
    vary = watch.times.spread(first, mark.step)
    found = rates(window, terms, split, job.measured.curves, _cores(draft, team), vary)
    if now is None or found is None or window.step_s <= 0:
        return _explain(watch, None, "too little has been measured")
    model = predicted(now, found, split, terms, window.step_s)
    watch = _forgiven(watch, _imbalance(model))
    pressing = triggers.fired(
        triggers.pressure(window, split, terms, model, job.rejected - watch.rejected),
        config,
        mark.step - watch.planned_step,
    )
    failures = max(watch.failures.values(), default=0)
    since = mark.step - watch.moved_step if watch.moved_step is not None else None
    if why := triggers.rests(job.steps_done, since, config, failures):
        return _explain(watch, model, why, window)
    if not pressing:
        return _explain(watch, model, "nothing presses for another split", window)
    watch = replace(watch, planned_step=mark.step, rejected=job.rejected)
    shift, after_s = _best(watch, job, team, model, window, now, found)
    if not shift:
        return _explain(watch, model, "no other split is predicted to be faster", window)
    towards = Role.TRAINING if shift > 0 else Role.ROLLOUT
    failures = watch.failures.get(towards, 0)
    left = job.steps - job.steps_done if job.steps else 1 << 30
    switch_s = (watch.switch_s or SWITCH_S) * abs(shift) / max(1, team.workers)
    saved_s = window.step_s - after_s
    if window.steps < config.window_steps and saved_s < SURE * window.step_s:
        return _explain(watch, model, f"{window.steps} steps are too few to tell", window)
    if why := triggers.worth(saved_s, window.step_s, config, failures, left, switch_s):
        return _explain(watch, model, f"{abs(shift)} more to {towards}: {why}", window)
    after = Split(split.engines - shift, split.trainers + shift)
    then = predicted(now, found, after, terms, window.step_s)
    figures = model.rounded() | {
        "rollout_s": model.rollout_s,
        "train_s": model.train_s,
        "before_s": round(window.step_s, 4),
        "predicted_s": round(after_s, 4),
        "then_rollout_s": round(then.rollout_s, 4),
        "then_train_s": round(then.train_s, 4),
        "trigger": pressing,
        "step": job.steps_done,
    }
    arrived = _shift(draft, job, team, shift, RULE, figures)
    trial = Trial(
        RULE,
        arrived[0].resident.id,
        split,
        after,
        job.steps_done,
        window.step_s,
        after_s,
        watch.bias.get(towards, 1.0),
        now,
        found,
        abs(shift),
        _spread(watch, mark),
    )
    return _explain(
        watch.moved(mark.step, trial), model, f"{abs(shift)} moved to {towards}", window
    )


def _best(
    watch: Watch,
    job: PlannedJob,
    team: Team,
    model: Prediction,
    window: Window,
    now: Demand,
    found: Rates,
) -> tuple[int, float]:
    """By how many workers training should grow, and the seconds of a step then; of splits that are
    as good, the nearest.
    """
    split, terms = watch.split, _terms(job)
    assert split is not None
    engines = min(len(_movable(team.engines)), split.engines - job.config.min_rollout)
    best = 0, window.step_s
    for shift in sorted(range(-len(_movable(team.helpers)), max(0, engines) + 1), key=abs):
        if not shift:
            continue
        other = Split(split.engines - shift, split.trainers + shift)
        towards = Role.TRAINING if shift > 0 else Role.ROLLOUT
        step_s = corrected(
            predicted(now, found, other, terms, window.step_s), model, window.step_s
        ) * watch.bias.get(towards, 1.0)
        if step_s < 0.99 * best[1]:
            best = shift, step_s
    return best


def _shift(
    draft: Draft, job: PlannedJob, team: Team, shift: int, rule: str, figures: dict[str, Any]
) -> list[Seated]:
    """Lets so many engines train, or helpers roll out (negative), the last ones; who arrives."""
    others = team.engines if shift > 0 else team.helpers
    role = Role.TRAINING if shift > 0 else Role.ROLLOUT
    leave = _movable(others)[::-1][: abs(shift)]
    arrived = []
    for seated in leave:
        sides = {"policy": rule, "from": seated.resident.role, "to": role}
        why = Why(rule, job.id, figures)
        arrived.append(move(draft, seated, role, why, sides | figures))
    return arrived


def _movable(seats: Sequence[Seated]) -> list[Seated]:
    """Those that people have not put there, and that are on one worker."""
    return [s for s in seats if not s.resident.pinned and len(s.workers) == 1]


def _dismiss(draft: Draft, job: PlannedJob, team: Team) -> None:
    """Helpers that the core takes nothing of roll out, but those that a person has put there."""
    for seated in [one for one in team.helpers if not one.resident.pinned]:
        why = Why("unhelped", job.id)
        draft.remove(seated, why)
        if job.need.smallest == 1:
            draft.seat(seated.workers, job.id, Role.ROLLOUT, why)


# -- what it goes by -------------------------------------------------------------------------------


def _terms(job: PlannedJob) -> Terms:
    return Terms(job.groups_per_step, job.group_size, job.max_staleness, job.slots, job.bin_tokens)


def _spread(watch: Watch, mark: Mark) -> float:
    """How far off the mean time of a step in the window may be; finite, for its record."""
    first = watch.older.step if watch.older is not None else mark.step
    return min(watch.times.error_s(first, mark.step), FOREVER_S)


def _under_way(draft: Draft) -> set[str]:
    """The gangs of moves that are not complete."""
    told = {d.move.id for d in draft.decisions if isinstance(d, Finish)}
    return {one.gang for one in draft.snapshot.moves if one.id not in told}


def _timed(draft: Draft, job: PlannedJob, watch: Watch) -> Watch:
    """Takes in what the moves of a job took that are complete by this look."""
    for took_s in _took(draft.decisions, job.id, draft.snapshot.now_ms):
        known = watch.switch_s
        watch = replace(watch, switch_s=known + WEIGHT * (took_s - known) if known else took_s)
    return watch


def _took(decisions: Iterable[Any], job: str, now_ms: int) -> list[float]:
    return [
        (now_ms - one.move.started_ms) / 1000
        for one in decisions
        if isinstance(one, Finish) and not one.undone and one.move.back.get("job") == job
    ]


def _cores(draft: Draft, team: Team) -> float:
    """The share of its cores that the busiest host of a job keeps busy; 0: not known."""
    there = {draft.workers[worker].host for seated in team.all for worker in seated.workers}
    hosts = [host for host in draft.snapshot.hosts if host.name in there and host.cores > 0]
    return max((min(1.0, host.busy_cores / host.cores) for host in hosts), default=0.0)


def _imbalance(model: Prediction) -> float:
    return model.rollout_s / max(model.train_s, 1e-9)


def _forgiven(watch: Watch, imbalance: float) -> Watch:
    """Moves that did not pay count no more when the job has become another one."""
    failures = dict(watch.failures)
    for towards, then in watch.failed_at.items():
        ratio = imbalance / max(then, 1e-9)
        if ratio >= CHANGED or ratio <= 1 / CHANGED:
            failures[towards] = 0
    return watch if failures == watch.failures else replace(watch, failures=failures)


def _explain(
    watch: Watch, model: Prediction | None, verdict: str, window: Window | None = None
) -> Watch:
    """Says to people what is predicted, and why this is done."""
    binds = model.binds if model is not None else ""
    told: dict[str, Any] = dict(watch.explained)
    if model is not None and window is not None:
        told |= model.rounded() | {"binds": binds, "measured_s": round(window.step_s, 4)}
    errors = [one.error for one in watch.verdicts]
    told |= {"verdict": verdict, "error": round(median(errors), 4) if errors else None}
    return replace(watch, explained=told)


def _judged_words(verdict: Verdict) -> str:
    did = "paid" if verdict.paid else "did not pay and is undone"
    return (
        f"the move of step {verdict.step} to {verdict.towards} {did}: {verdict.observed_s:.3g} s "
        f"a step, {verdict.expected_s:.3g} s without it"
    )
