"""What a job's training takes before anybody has measured it: by the pace that it imitates, or by
the cost model of its shape on accelerators of its kind, corrected by what was observed.
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
    """What is to be foretold: a step of a model's training on one worker of a kind."""

    model: str
    kind: str  # of accelerators, as their driver calls them
    shape: ModelShape | None
    emulated_profile: str  # that is imitated; empty: none is

    @property
    def key(self) -> CorrectionKey:
        """What has a factor of its own."""
        return CorrectionKey(
            " ".join(filter(None, (self.model, self.emulated_profile))), self.kind, "training"
        )


@dataclass(frozen=True, slots=True)
class PredictedTraining:
    """Seconds of a step on one worker."""

    gradient_s: float  # gradients, which are divided
    fixed_s: float  # the update, which is not


def predict_training(
    query: TrainingQuery, sequences: float, tokens: float
) -> PredictedTraining | None:
    """By the cost model alone, for a step of so many tokens; None where it knows nothing of the
    model or its accelerators.
    """
    if query.emulated_profile:
        try:
            pace = parse_training_speed(query.emulated_profile)
        except ConfigError:  # a pace that this version does not know
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
    """The same, corrected; None as well where a profile has not been held against a measurement
    yet, or is of workers that share what they compute with.
    """
    found, factor = predict_training(query, sequences, tokens), correction.get_factor(query.key)
    checked = factor.count > 0 and accelerators.match_kind(query.kind) != accelerators.CPU
    if found is None or not (query.emulated_profile or checked):
        return None
    return replace(found, gradient_s=found.gradient_s * factor.value)
