"""Decode curves of a job's engines by degree: measured if such an engine existed, else predicted.

A prediction scales the curve of another degree. The ratio comes from the cost model
(`costs/rollout_costs.py`) if it knows the model's shape and the accelerators. Otherwise a step of t
workers reads a t-th of the weights, does a t-th of the arithmetic, and waits for collectives
(`common/job/emulation.py`). When an engine of the degree exists, its measured curve corrects the
predictions for every job of the same model (`costs/correction.py`).
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

EngineKind = tuple[str, int]  # (kind of accelerators, degree)
Curves = Mapping[EngineKind, DecodeCurve]

MIN_CURVE_STEPS = 256  # decode steps after which a curve is recorded again


def update_curves(curves: Curves, measured: Sequence[DecodeCurve]) -> Curves:
    """Return the curves of each kind and degree, updated by measurements. A curve is the mean over
    present engines once they have many more steps; other curves remain.
    """
    found = dict(curves)
    for which in dict.fromkeys(
        (curve.accelerator_kind, curve.tensor_parallel) for curve in measured
    ):
        same = [one for one in measured if (one.accelerator_kind, one.tensor_parallel) == which]
        before = found.get(which)
        if not any(one.fitted_steps for one in same):
            continue
        curve = average_by_steps(same)
        if curve.base_s < 0 or curve.base_s + curve.sequence_s <= 0:
            continue
        curve = replace(curve, fitted_steps=curve.fitted_steps // len(same))
        changed = before is None or abs(curve.fitted_steps - before.fitted_steps) >= MIN_CURVE_STEPS
        if changed and (
            before is None or curve.fitted_steps >= MIN_CURVE_STEPS
        ):  # a restarted curve is unreliable
            found[which] = curve
    return found if found != curves else curves


def get_curve(
    engine_kind: EngineKind, curves: Curves, job: PlannedJob, correction: Correction
) -> DecodeCurve | None:
    """Return the curve of a kind and degree; None if no engine of the kind was ever measured."""
    if engine_kind in curves:
        return curves[engine_kind]
    found = predict_curve(engine_kind, curves, job)
    if found is None:
        return None
    factor = correction.get_factor(build_correction_key(job.model_key, engine_kind)).value
    return _scale_curve(found, factor, factor, 1 / factor)


def predict_curve(engine_kind: EngineKind, curves: Curves, job: PlannedJob) -> DecodeCurve | None:
    """Predict the curve of a degree from the smallest other degree of the kind, without correction.
    Return None without one.
    """
    kind, degree = engine_kind
    others = [one for (of, other), one in curves.items() if of == kind and other != degree]
    if not others:
        return None
    base = min(others, key=lambda one: one.tensor_parallel)
    there, here = _model_curve(kind, degree, job), _model_curve(kind, base.tensor_parallel, job)
    if there is not None and here is not None:
        steps = there.base_s / here.base_s
        prefill = there.prefill_tokens_per_s / here.prefill_tokens_per_s
    else:
        pace = _load_emulation(
            job.emulated_engine
        )  # collectives' share of a decode step of one worker
        waits = (
            pace.with_tensor_parallel(2).collectives_s / pace.decode_step_s
            if pace
            else COLLECTIVES_SHARE
        )
        steps = _compute_relative_step(degree, waits) / _compute_relative_step(
            base.tensor_parallel, waits
        )
        rates = [
            pace.with_tensor_parallel(one).prefill_tokens_per_s if pace else float(one)
            for one in (degree, base.tensor_parallel)
        ]
        prefill = rates[0] / rates[1]
    found = _scale_curve(base, steps, base.tensor_parallel / degree, prefill)
    return replace(found, tensor_parallel=degree, fitted_steps=0)


def _model_curve(kind: str, degree: int, job: PlannedJob) -> DecodeCurve | None:
    """Return the curve of the cost model. Return None if engines are emulated, or if the model or
    its accelerators are unknown.
    """
    gang = _build_engine_gang(kind, degree, job)
    return gang.predict_curve() if gang is not None else None


def _build_engine_gang(kind: str, degree: int, job: PlannedJob) -> EngineGang | None:
    on = accelerators.load_accelerators().get(accelerators.match_kind(kind))
    if (
        job.emulated_engine
        or job.model_shape is None
        or on is None
        or not job.model_shape.can_split(degree)
    ):
        return None
    return EngineGang(job.model_shape, on, degree)


def compute_kv_capacity(engine_kind: EngineKind, job: PlannedJob) -> float:
    """Return the KV capacity in tokens of an engine of a kind and degree. It is infinite if engines
    are emulated, or if the model or its accelerators are unknown.
    """
    gang = _build_engine_gang(*engine_kind, job)
    return gang.compute_kv_capacity() if gang is not None else math.inf


def update_correction(
    correction: Correction, job: PlannedJob, before: Curves, after: Curves
) -> Correction:
    """Return the correction updated by newly recorded curves."""
    for which, one in sorted(after.items()):
        if before.get(which) == one:
            continue
        predicted_curve = predict_curve(which, after, job)
        if predicted_curve is not None and which[1] != _find_base_degree(after, which[0]):
            correction = correction.observe(
                build_correction_key(job.model_key, which),
                compute_typical_step_s(predicted_curve),
                compute_typical_step_s(one),
            )
    return correction


def compare_with_predictions(
    curves: Curves, job: PlannedJob, correction: Correction
) -> dict[str, dict[str, float]]:
    """Compare predicted and measured degrees for display: seconds of a typical decode step, and the
    mean error.
    """
    found = {}
    for which, one in sorted(curves.items()):
        predicted_curve = predict_curve(which, curves, job)
        if predicted_curve is None or which[1] == _find_base_degree(curves, which[0]):
            continue
        of = build_correction_key(job.model_key, which)
        found[f"{of.role} on {of.kind}"] = {
            "predicted_s": float(
                f"{correction.correct(of, compute_typical_step_s(predicted_curve)):.4g}"
            ),
            "observed_s": float(f"{compute_typical_step_s(one):.4g}"),
            "error": round(correction.compute_error(of), 4),
        }
    return found


def build_correction_key(model: str, engine_kind: EngineKind) -> CorrectionKey:
    """Build the key of the correction factor of an engine kind."""
    return CorrectionKey(model, engine_kind[0], f"rollout:{engine_kind[1]}")


def compute_typical_step_s(curve: DecodeCurve) -> float:
    """Compute the seconds of a decode step of many sequences."""
    return curve.predict_step_s(TYPICAL_BATCH)


def _find_base_degree(curves: Curves, kind: str) -> int:
    """Return the degree from which others of the kind are predicted."""
    return min(degree for of, degree in curves if of == kind)


def average_by_steps(curves: Sequence[DecodeCurve]) -> DecodeCurve:
    """Average curves of equal engines, weighed by their fitted steps; at least one curve has
    steps.
    """
    steps = sum(one.fitted_steps for one in curves)

    def average_field(name: str) -> float:
        return float(sum(getattr(one, name) * one.fitted_steps for one in curves) / steps)

    return DecodeCurve(
        curves[0].accelerator_kind,
        curves[0].tensor_parallel,
        average_field("base_s"),
        average_field("sequence_s"),
        average_field("context_s"),
        average_field("prefill_tokens_per_s"),
        steps,
        max(one.max_tokens_per_s for one in curves),
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
    """Return the seconds of a decode step of a degree, relative to one worker."""
    return 1 / degree + (collectives_share if degree > 1 else 0.0)


def _load_emulation(text: str) -> EmulatedEngineSpeed | None:
    try:
        return parse_engine_speed(text) if text else None
    except ConfigError:  # an emulated speed of another version
        return None
