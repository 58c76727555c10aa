"""What is learnt of the cost model when what it predicts is measured: of the degrees of engines,
and of training on one worker. Both correct what is predicted of every job of the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.services.planner.balance.opening import asked_of
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.foretold import TrainingQuery, training
from meshrl.services.planner.forecast import degrees
from meshrl.services.planner.forecast.accounts import between
from meshrl.services.planner.pool.draft import Draft


def noted(
    draft: Draft, job: PlannedJob, before: SplitWatch, watch: SplitWatch, correction: Correction
) -> SplitWatch:
    """The watch after a look at what has been measured since `before`, which people are shown."""
    shown: dict[str, Any] = {}
    curves = degrees.noted(watch.curves, job.measured.curves)
    if curves is not watch.curves and (told := degrees.compared(curves, job, correction)):
        shown["degrees"] = told
    if trained := _trained(draft, job, before, watch):
        asked, foretold_s, observed_s = trained
        shown["training"] = {
            "kind": asked.kind,
            "predicted_s": float(f"{correction.predicted(asked.key, foretold_s):.4g}"),
            "observed_s": float(f"{observed_s:.4g}"),
            "error": round(correction.error(asked.key), 4),
        }
    if curves is watch.curves and not shown:
        return watch
    return replace(watch, curves=curves, explained=dict(watch.explained) | shown)


def learned(
    correction: Correction,
    draft: Draft,
    jobs: Iterable[PlannedJob],
    before: Mapping[str, SplitWatch],
    after: Mapping[str, SplitWatch],
) -> Correction:
    """The correction after a look at which something was measured anew."""
    for job in jobs:
        known, watch = before.get(job.id, SplitWatch()), after.get(job.id)
        if watch is None:
            continue
        if watch.curves != known.curves:
            correction = degrees.observed(correction, job, known.curves, watch.curves)
        if trained := _trained(draft, job, known, watch):
            asked, foretold_s, observed_s = trained
            correction = correction.seen(asked.key, foretold_s, observed_s)
    return correction


def _trained(
    draft: Draft, job: PlannedJob, before: SplitWatch, watch: SplitWatch
) -> tuple[TrainingQuery, float, float] | None:
    """What a step's gradients are foretold to take on one worker, and took in the window that has
    ended since `before`; None where none has, or nothing is foretold.
    """
    older, newer = watch.older, watch.newer
    if older is None or newer is None or newer == before.newer:
        return None
    window, asked = between(older, newer), asked_of(draft, job, draft.team(job.id))
    if window is None or asked is None:
        return None
    sequences, tokens = (n / window.steps for n in (window.work.trajectories, window.work.tokens))
    foretold = training(asked, sequences, tokens)
    if foretold is None:
        return None
    return asked, foretold.work_s, window.work.work_s / window.steps
