"""Predicted training time of a job before any measurement. It uses the emulated speed, or the cost
model of the shape and accelerators, corrected by observations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware import accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.emulation import parse_training_speed
from meshrl.services.planner.costs.correction import Correction, CorrectionKey
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    predict_step_s,
    predict_update_s,
)


@dataclass(frozen=True, slots=True)
class TrainingQuery:
    """Query for a prediction: a training step of a model on one worker of a kind."""

    model: str
    kind: str  # of accelerators, as reported by their driver
    shape: ModelShape | None
    emulated_profile: str  # empty: no emulation

    @property
    def key(self) -> CorrectionKey:
        """Key of the correction factor."""
        return CorrectionKey(
            " ".join(filter(None, (self.model, self.emulated_profile))), self.kind, "training"
        )


@dataclass(frozen=True, slots=True)
class PredictedTraining:
    """Seconds of a step on one worker."""

    gradient_s: float  # gradients, divided among workers
    fixed_s: float  # the update, not divided


def predict_training(
    query: TrainingQuery, sequences: float, tokens: float
) -> PredictedTraining | None:
    """Predict a step of `tokens` tokens by the cost model alone. Return None if the model or its
    accelerators are unknown.
    """
    if query.emulated_profile:
        try:
            pace = parse_training_speed(query.emulated_profile)
        except ConfigError:  # an emulation profile of another version
            return None
        return PredictedTraining(tokens / pace.tokens_per_s, pace.update_s)
    on = accelerators.load_accelerators().get(accelerators.match_kind(query.kind))
    if query.shape is None or on is None or min(sequences, tokens) <= 0:
        return None
    layout = TrainingLayout(on.kind)
    work = TrainingWork(max(1, round(sequences)), tokens, tokens * tokens / sequences)
    update = predict_update_s(query.shape, on, layout)
    return PredictedTraining(predict_step_s(query.shape, on, layout, work) - update, update)


def predict_corrected_training(
    query: TrainingQuery, sequences: float, tokens: float, correction: Correction
) -> PredictedTraining | None:
    """Predict a step with correction. Also return None if the model is uncorrected and not
    emulated, or if workers share a CPU.
    """
    found, factor = predict_training(query, sequences, tokens), correction.get_factor(query.key)
    checked = factor.count > 0 and accelerators.match_kind(query.kind) != accelerators.CPU
    if found is None or not (query.emulated_profile or checked):
        return None
    return replace(found, gradient_s=found.gradient_s * factor.value)
