"""How fast a job's engines generate, by how many workers share its model: as measured, where there
has been such an engine, else as predicted from those of another degree.

Another degree's is in the proportion of the cost model (`costs/rollout.py`), where it knows the
model's shape and the accelerators; else a step of t workers reads a t-th of the weights and does a
t-th of the arithmetic, and waits for collectives (`common/job/pace.py`). How far off that is on
real gangs is learned when an engine of the degree exists, and corrects it for every job of the same
model (`costs/correction.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware import profiles
from meshrl.common.job.pace import COLLECTIVES_SHARE, Pace, profile
from meshrl.common.state.pool.demand.measured import Curve
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.services.planner.costs.correction import Correction, CorrectionKey
from meshrl.services.planner.costs.rollout import TYPICAL, EngineGang

Which = tuple[str, int]  # the kind of accelerators, and the degree
Curves = Mapping[Which, Curve]

NOTED = 256  # decode steps after which a curve is noted anew


def noted(known: Curves, now: Sequence[Curve]) -> Curves:
    """The curves of each kind and degree after another look: the means of those that engines have
    now, where they have been fitted to many more steps, and what was known of others.
    """
    found = dict(known)
    for which in dict.fromkeys((curve.kind, curve.degree) for curve in now):
        same = [one for one in now if (one.kind, one.degree) == which]
        before = found.get(which)
        if not any(one.steps for one in same):
            continue
        curve = weighted(same)
        if curve.base_s < 0 or curve.base_s + curve.sequence_s <= 0:
            continue
        curve = replace(curve, steps=curve.steps // len(same))
        changed = before is None or abs(curve.steps - before.steps) >= NOTED
        if changed and (before is None or curve.steps >= NOTED):  # one that began anew knows little
            found[which] = curve
    return found if found != known else known


def curve(which: Which, known: Curves, job: PlannedJob, correction: Correction) -> Curve | None:
    """That of a kind and degree; None where no engine of the kind was ever measured."""
    if which in known:
        return known[which]
    found = predicted(which, known, job)
    if found is None:
        return None
    factor = correction.factor(key(job.model, which)).value
    return _times(found, factor, factor, 1 / factor)


def predicted(which: Which, known: Curves, job: PlannedJob) -> Curve | None:
    """The curve of a degree by that of the smallest other one of the kind, without correction; None
    without one.
    """
    kind, degree = which
    others = [one for (of, other), one in known.items() if of == kind and other != degree]
    if not others:
        return None
    base = min(others, key=lambda one: one.degree)
    there, here = _modelled(kind, degree, job), _modelled(kind, base.degree, job)
    if there is not None and here is not None:
        steps = there.base_s / here.base_s
        prefill = there.prefill_tokens_per_s / here.prefill_tokens_per_s
    else:
        pace = _pace(job.pace)  # what collectives take of a decode step of one worker
        waits = pace.of_degree(2).collectives_s / pace.decode_s if pace else COLLECTIVES_SHARE
        steps = _step(degree, waits) / _step(base.degree, waits)
        rates = [
            pace.of_degree(one).prefill_tokens_per_s if pace else float(one)
            for one in (degree, base.degree)
        ]
        prefill = rates[0] / rates[1]
    found = _times(base, steps, base.degree / degree, prefill)
    return replace(found, degree=degree, steps=0)


def _modelled(kind: str, degree: int, job: PlannedJob) -> Curve | None:
    """The curve of the cost model; None where engines imitate a pace, or where it knows nothing of
    the model or its accelerators.
    """
    gang = _gang(kind, degree, job)
    return gang.curve() if gang is not None else None


def _gang(kind: str, degree: int, job: PlannedJob) -> EngineGang | None:
    on = profiles.declared().get(profiles.kind_of(kind))
    if job.pace or job.shape is None or on is None or not job.shape.splits(degree):
        return None
    return EngineGang(job.shape, on, degree)


def capacity(which: Which, job: PlannedJob) -> float:
    """Tokens whose keys and values an engine of a kind and degree has room for; infinite where
    engines imitate a pace, or where nothing is known of the model or its accelerators.
    """
    gang = _gang(*which, job)
    return gang.capacity() if gang is not None else math.inf


def observed(correction: Correction, job: PlannedJob, before: Curves, after: Curves) -> Correction:
    """The correction after curves were noted anew."""
    for which, one in sorted(after.items()):
        if before.get(which) == one:
            continue
        foretold = predicted(which, after, job)
        if foretold is not None and which[1] != _least(after, which[0]):
            correction = correction.seen(key(job.model, which), typical_s(foretold), typical_s(one))
    return correction


def compared(known: Curves, job: PlannedJob, correction: Correction) -> dict[str, dict[str, float]]:
    """For people: of each degree that was predicted and measured, the seconds of a typical decode
    step by both, and how far predictions have been off.
    """
    found = {}
    for which, one in sorted(known.items()):
        foretold = predicted(which, known, job)
        if foretold is None or which[1] == _least(known, which[0]):
            continue
        of = key(job.model, which)
        found[f"{of.role} on {of.kind}"] = {
            "predicted_s": float(f"{correction.predicted(of, typical_s(foretold)):.4g}"),
            "observed_s": float(f"{typical_s(one):.4g}"),
            "error": round(correction.error(of), 4),
        }
    return found


def key(model: str, which: Which) -> CorrectionKey:
    """What has a factor of its own."""
    return CorrectionKey(model, which[0], f"rollout:{which[1]}")


def typical_s(of: Curve) -> float:
    """Seconds of a decode step of many sequences."""
    return of.step_s(TYPICAL)


def _least(known: Curves, kind: str) -> int:
    """The degree that others of the kind are predicted from."""
    return min(degree for of, degree in known if of == kind)


def weighted(curves: Sequence[Curve]) -> Curve:
    """The mean of engines alike, by the steps that each was fitted to, some at least."""
    steps = sum(one.steps for one in curves)

    def of(name: str) -> float:
        return float(sum(getattr(one, name) * one.steps for one in curves) / steps)

    return Curve(
        curves[0].kind,
        curves[0].degree,
        of("base_s"),
        of("sequence_s"),
        of("context_s"),
        of("prefill_tokens_per_s"),
        steps,
        max(one.most_tokens_per_s for one in curves),
    )


def _times(of: Curve, base: float, each: float, prefill: float) -> Curve:
    return replace(
        of,
        base_s=base * of.base_s,
        sequence_s=each * of.sequence_s,
        context_s=each * of.context_s,
        prefill_tokens_per_s=prefill * of.prefill_tokens_per_s,
    )


def _step(degree: int, collectives: float) -> float:
    """A decode step of so many workers over one of a single one."""
    return 1 / degree + (collectives if degree > 1 else 0.0)


def _pace(text: str) -> Pace | None:
    try:
        return profile(text) if text else None
    except ConfigError:  # a pace that this version does not know
        return None
