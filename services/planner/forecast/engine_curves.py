"""How fast a job's engines generate, by how many workers share its model: as measured, where there
has been such an engine, else as predicted from those of another degree.

Another degree's is in the proportion of the cost model (`costs/rollout_costs.py`), where it knows
the model's shape and the accelerators; else a step of t workers reads a t-th of the weights and
does a t-th of the arithmetic, and waits for collectives (`common/job/emulation.py`). How far off
that is on real gangs is learned when an engine of the degree exists, and corrects it for every job
of the same model (`costs/correction.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware import accelerators
from meshrl.common.job.emulation import COLLECTIVES_SHARE, EmulatedEngineSpeed, parse_engine_speed
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.services.planner.costs.correction import Correction, CorrectionKey
from meshrl.services.planner.costs.rollout_costs import TYPICAL_BATCH, EngineGang

EngineKind = tuple[str, int]  # the kind of accelerators, and the degree
Curves = Mapping[EngineKind, DecodeCurve]

MIN_CURVE_STEPS = 256  # decode steps after which a curve is noted anew


def update_curves(curves: Curves, measured: Sequence[DecodeCurve]) -> Curves:
    """The curves of each kind and degree after another look: the means of those that engines have
    now, where they have been fitted to many more steps, and what was known of others.
    """
    found = dict(curves)
    for which in dict.fromkeys((curve.kind, curve.degree) for curve in measured):
        same = [one for one in measured if (one.kind, one.degree) == which]
        before = found.get(which)
        if not any(one.steps for one in same):
            continue
        curve = average_by_steps(same)
        if curve.base_s < 0 or curve.base_s + curve.sequence_s <= 0:
            continue
        curve = replace(curve, steps=curve.steps // len(same))
        changed = before is None or abs(curve.steps - before.steps) >= MIN_CURVE_STEPS
        if changed and (
            before is None or curve.steps >= MIN_CURVE_STEPS
        ):  # one that began anew knows little
            found[which] = curve
    return found if found != curves else curves


def get_curve(
    engine_kind: EngineKind, curves: Curves, job: PlannedJob, correction: Correction
) -> DecodeCurve | None:
    """That of a kind and degree; None where no engine of the kind was ever measured."""
    if engine_kind in curves:
        return curves[engine_kind]
    found = predict_curve(engine_kind, curves, job)
    if found is None:
        return None
    factor = correction.get_factor(build_correction_key(job.model, engine_kind)).value
    return _scale_curve(found, factor, factor, 1 / factor)


def predict_curve(engine_kind: EngineKind, curves: Curves, job: PlannedJob) -> DecodeCurve | None:
    """The curve of a degree by that of the smallest other one of the kind, without correction; None
    without one.
    """
    kind, degree = engine_kind
    others = [one for (of, other), one in curves.items() if of == kind and other != degree]
    if not others:
        return None
    base = min(others, key=lambda one: one.degree)
    there, here = _model_curve(kind, degree, job), _model_curve(kind, base.degree, job)
    if there is not None and here is not None:
        steps = there.base_s / here.base_s
        prefill = there.prefill_tokens_per_s / here.prefill_tokens_per_s
    else:
        pace = _load_emulation(job.pace)  # what collectives take of a decode step of one worker
        waits = (
            pace.with_tensor_parallel(2).collectives_s / pace.decode_step_s
            if pace
            else COLLECTIVES_SHARE
        )
        steps = _compute_relative_step(degree, waits) / _compute_relative_step(base.degree, waits)
        rates = [
            pace.with_tensor_parallel(one).prefill_tokens_per_s if pace else float(one)
            for one in (degree, base.degree)
        ]
        prefill = rates[0] / rates[1]
    found = _scale_curve(base, steps, base.degree / degree, prefill)
    return replace(found, degree=degree, steps=0)


def _model_curve(kind: str, degree: int, job: PlannedJob) -> DecodeCurve | None:
    """The curve of the cost model; None where engines imitate a pace, or where it knows nothing of
    the model or its accelerators.
    """
    gang = _build_engine_gang(kind, degree, job)
    return gang.predict_curve() if gang is not None else None


def _build_engine_gang(kind: str, degree: int, job: PlannedJob) -> EngineGang | None:
    on = accelerators.load_accelerators().get(accelerators.match_kind(kind))
    if job.pace or job.shape is None or on is None or not job.shape.can_split(degree):
        return None
    return EngineGang(job.shape, on, degree)


def compute_kv_capacity(engine_kind: EngineKind, job: PlannedJob) -> float:
    """Tokens whose keys and values an engine of a kind and degree has room for; infinite where
    engines imitate a pace, or where nothing is known of the model or its accelerators.
    """
    gang = _build_engine_gang(*engine_kind, job)
    return gang.compute_kv_capacity() if gang is not None else math.inf


def update_correction(
    correction: Correction, job: PlannedJob, before: Curves, after: Curves
) -> Correction:
    """The correction after curves were noted anew."""
    for which, one in sorted(after.items()):
        if before.get(which) == one:
            continue
        foretold = predict_curve(which, after, job)
        if foretold is not None and which[1] != _find_base_degree(after, which[0]):
            correction = correction.observe(
                build_correction_key(job.model, which),
                compute_typical_step_s(foretold),
                compute_typical_step_s(one),
            )
    return correction


def compare_with_predictions(
    curves: Curves, job: PlannedJob, correction: Correction
) -> dict[str, dict[str, float]]:
    """For people: of each degree that was predicted and measured, the seconds of a typical decode
    step by both, and how far predictions have been off.
    """
    found = {}
    for which, one in sorted(curves.items()):
        foretold = predict_curve(which, curves, job)
        if foretold is None or which[1] == _find_base_degree(curves, which[0]):
            continue
        of = build_correction_key(job.model, which)
        found[f"{of.role} on {of.kind}"] = {
            "predicted_s": float(f"{correction.correct(of, compute_typical_step_s(foretold)):.4g}"),
            "observed_s": float(f"{compute_typical_step_s(one):.4g}"),
            "error": round(correction.compute_error(of), 4),
        }
    return found


def build_correction_key(model: str, engine_kind: EngineKind) -> CorrectionKey:
    """What has a factor of its own."""
    return CorrectionKey(model, engine_kind[0], f"rollout:{engine_kind[1]}")


def compute_typical_step_s(curve: DecodeCurve) -> float:
    """Seconds of a decode step of many sequences."""
    return curve.predict_step_s(TYPICAL_BATCH)


def _find_base_degree(curves: Curves, kind: str) -> int:
    """The degree that others of the kind are predicted from."""
    return min(degree for of, degree in curves if of == kind)


def average_by_steps(curves: Sequence[DecodeCurve]) -> DecodeCurve:
    """The mean of engines alike, by the steps that each was fitted to, some at least."""
    steps = sum(one.steps for one in curves)

    def of(name: str) -> float:
        return float(sum(getattr(one, name) * one.steps for one in curves) / steps)

    return DecodeCurve(
        curves[0].kind,
        curves[0].degree,
        of("base_s"),
        of("sequence_s"),
        of("context_s"),
        of("prefill_tokens_per_s"),
        steps,
        max(one.most_tokens_per_s for one in curves),
    )


def _scale_curve(
    curve: DecodeCurve, base_factor: float, sequence_factor: float, prefill_factor: float
) -> DecodeCurve:
    return replace(
        curve,
        base_s=base_factor * curve.base_s,
        sequence_s=sequence_factor * curve.sequence_s,
        context_s=sequence_factor * curve.context_s,
        prefill_tokens_per_s=prefill_factor * curve.prefill_tokens_per_s,
    )


def _compute_relative_step(degree: int, collectives_share: float) -> float:
    """A decode step of so many workers over one of a single one."""
    return 1 / degree + (collectives_share if degree > 1 else 0.0)


def _load_emulation(text: str) -> EmulatedEngineSpeed | None:
    try:
        return parse_engine_speed(text) if text else None
    except ConfigError:  # a pace that this version does not know
        return None
