"""Decides which workers of a job roll out and which train, and whether the last move paid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import Judge, Why
from meshrl.common.state.pool.store.explained import OPENING, STAGE_TIME
from meshrl.common.state.pool.workers.rows import Role
from meshrl.services.planner.balance import trials
from meshrl.services.planner.balance.learning import noted
from meshrl.services.planner.balance.opening import opened, opens
from meshrl.services.planner.balance.reshaping import back, pursue, reshape
from meshrl.services.planner.balance.standing import (
    LEAST_STEPS,
    Pressed,
    curves_of,
    explained,
    host_cores,
    imbalance,
    pressed,
    refused,
    split_of,
    terms_of,
    timed,
)
from meshrl.services.planner.balance.trials import TrialEvidence, Verdict
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.forecast.accounts import StepMark, Window, between
from meshrl.services.planner.forecast.prediction import demand, predicted, rates
from meshrl.services.planner.forecast.quantities import Split
from meshrl.services.planner.policies.moves import move
from meshrl.services.planner.pool.draft import Draft
from meshrl.services.planner.pool.team import Seated, Team

UNDO = "unpaid"
PLAYED_MS, PLAYED = 3000, 4  # between two looks at which a job's steps are played; jobs at a look
TIE = 0.99  # of a split that moves fewer workers, which another one takes at most to be better
FURTHER = 0.1  # share of a step that a prediction is less sure by, for e times as many engines


class Plays:
    """The jobs whose steps may be played ahead at a look, as each takes a while."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms, self._left = now_ms, PLAYED

    def take(self, watch: SplitWatch) -> SplitWatch | None:
        """The watch of a job that has its turn now; None for one that has not."""
        if not self._left or self._now_ms - watch.played_ms < PLAYED_MS:
            return None
        self._left -= 1
        return replace(watch, played_ms=self._now_ms)


def balance(
    draft: Draft, job: PlannedJob, watch: SplitWatch, correction: Correction, plays: Plays
) -> SplitWatch:
    """Moves engines or helpers of a job to the other side, or gives engines other degrees, where
    that is predicted to pay, undoes moves that did not, and returns what is to be remembered.
    `correction` is that of predicted curves; `plays`, of which jobs steps may be played ahead.
    """
    known = watch
    team, config, several = draft.team(job.id), job.config, job.need.degrees != (1,)
    if not job.need.helped:
        for seated in [one for one in team.helpers if not one.resident.pinned]:
            why = Why("unhelped", job.id)  # the core takes nothing of it
            draft.remove(seated, why)
            if job.need.smallest == 1:
                draft.seat(seated.workers, job.id, Role.ROLLOUT, why)
        if not several:
            return watch
    watch = timed(draft, job, watch)
    if job.phase != Phase.TRAINING or job.held or team.core is None or not team.core.awake:
        return watch.interrupted() if watch.older is not None else watch
    if watch.wish is not None:
        if several and config.moves:
            watch = pursue(draft, job, watch, round(watch.account.total.steps))
        else:
            watch = replace(watch, wish=None, trial=None)
    if draft.snapshot.now_ms - watch.observed_ms < 1000 * config.interval_s:
        return watch
    account = watch.account.credited(job.measured)
    mark = StepMark(round(account.total.steps), draft.snapshot.now_ms, account.total)
    split, terms = split_of(job, draft.team(job.id)), terms_of(job)
    watch = replace(watch, observed_ms=mark.ms)
    if config.moves and not several and opens(job, watch, mark) and (taken := plays.take(watch)):
        watch = taken
        found = opened(draft, job, watch, mark, correction)
        if found is not None:
            watch = _plan(draft, job, watch, mark, found, OPENING)
            if watch.trial is not None:
                return watch
    if watch.times.last == mark.step and split.same(watch.split):
        return watch  # counts of half a step fit no others
    watch = replace(watch, account=account)
    watch = watch.marked(mark, split, terms.max_staleness, config.window_steps)
    watch = noted(draft, job, known, watch, correction)
    if not config.moves or watch.wish is not None:
        return watch
    if watch.trial is not None:
        return _try(draft, job, watch, mark, plays)
    taken = plays.take(watch) if watch.window(mark, LEAST_STEPS) is not None else None
    if taken is None:
        return watch
    watch, found = pressed(draft, job, taken, mark)
    if found is None:
        return watch
    if several:
        return reshape(draft, job, watch, mark, found, correction)
    return _plan(draft, job, watch, mark, found)


# -- what a move brought ---------------------------------------------------------------------------


def _try(
    draft: Draft, job: PlannedJob, watch: SplitWatch, mark: StepMark, plays: Plays
) -> SplitWatch:
    trial, team, terms = watch.trial, draft.team(job.id), terms_of(job)
    assert trial is not None
    if not trial.after.same(watch.split):
        told = f"the move of step {trial.step} cannot be judged: the split has changed meanwhile"
        return explained(replace(watch, trial=None), None, told)
    trial = trials.began(trial, team.settled, mark, terms)
    watch = replace(watch, trial=trial)
    failures = watch.failures.get(trial.towards, 0)
    steps = job.config.window_steps * (1 + failures)
    window = between(trial.begins, mark) if trial.begins is not None else None
    if window is None or not window.long(steps) or window.step_s <= 0:
        return watch
    taken = plays.take(watch)
    if taken is None:
        return watch
    watch = taken
    verdict = _verdict(draft, job, watch, mark, window, steps)
    if verdict is None:
        return watch
    then = predicted(trial.demand, trial.rates, trial.before, terms, 0.0)
    watch = watch.convinced(verdict, imbalance(then), mark.step)
    draft.decide(Judge(job.id, verdict.told(), Why(verdict.rule, job.id)))
    if not verdict.paid:
        figures = {"regret_s": round(verdict.regret_s, 4), "step": job.steps_done}
        if trial.before.degrees:
            watch = back(draft, job, watch, trial.before, UNDO, figures)
        else:
            shifted = trial.after.trainers - trial.before.trainers
            _shift(draft, job, team, -shifted, UNDO, figures)
    did = "paid" if verdict.paid else "did not pay and is undone"
    told = (
        f"the move of step {verdict.step} to {verdict.towards} {did}: {verdict.observed_s:.3g} s "
        f"a step, {verdict.expected_s:.3g} s without it"
    )
    return explained(watch, None, told)


def _verdict(
    draft: Draft, job: PlannedJob, watch: SplitWatch, mark: StepMark, window: Window, steps: int
) -> Verdict | None:
    trial = watch.trial
    assert trial is not None and trial.begins is not None
    terms, cores = terms_of(job), host_cores(draft, draft.team(job.id))
    now = demand(window, terms, job.measured.lengths)
    if now is None:
        return None
    shown = TrialEvidence(window, now, watch.times.error(trial.begins.step, mark.step))
    if trial.rule == OPENING:
        measured = rates(window, now, terms, trial.after, curves_of(job, watch), cores)
        if measured is None:
            return None  # what was foretold is no witness of itself
        shown = replace(shown, rates=measured)
    return trials.judged(trial, shown, terms, steps)


# -- what a move would bring -----------------------------------------------------------------------


def _plan(
    draft: Draft,
    job: PlannedJob,
    watch: SplitWatch,
    mark: StepMark,
    found: Pressed,
    rule: str = STAGE_TIME,
) -> SplitWatch:
    team, split = draft.team(job.id), watch.split
    window, model = found.window, found.model
    assert split is not None
    shift, after_s, weighed_s = _best(watch, job, team, found)
    if not shift:
        return explained(watch, model, "no other split is predicted to be faster", window)
    towards = Role.TRAINING if shift > 0 else Role.ROLLOUT
    if why := refused(job, watch, team, found, weighed_s, towards, abs(shift)):
        return explained(watch, model, why, window)
    after = Split(split.engines - shift, split.trainers + shift)
    arrived = _shift(draft, job, team, shift, rule, found.figures(job, after, after_s))
    trial = found.trial(job, watch, rule, arrived[0].resident.id, after, after_s, abs(shift))
    told = f"{abs(shift)} moved to {towards}"
    return explained(watch.moved(mark.step, trial), model, told, window)


def _best(
    watch: SplitWatch, job: PlannedJob, team: Team, found: Pressed
) -> tuple[int, float, float]:
    """By how many workers training should grow, the seconds of a step then, and what it counts as:
    longer, the further its engines are from those that were measured. Of splits that are as good,
    the nearest.
    """
    split, terms = watch.split, terms_of(job)
    assert split is not None
    engines = min(len(_movable(team.engines)), split.engines - job.config.min_rollout)
    best = 0, found.stays_s, found.stays_s
    for shift in sorted(range(-len(_movable(team.helpers)), max(0, engines) + 1), key=abs):
        if not shift:
            continue
        other = Split(split.engines - shift, split.trainers + shift)
        towards = Role.TRAINING if shift > 0 else Role.ROLLOUT
        after_s = found.after_s(other, terms) * watch.bias.get(towards, 1.0)
        weighed_s = after_s * (1 + FURTHER * abs(math.log(other.engines / split.engines)))
        if weighed_s < TIE * best[2]:
            best = shift, after_s, weighed_s
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
