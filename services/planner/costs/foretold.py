"""What a job's training takes before anybody has measured it: by the pace that it imitates, or by
the cost model of its shape on accelerators of its kind, corrected by what was observed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware import profiles
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.pace import training_profile
from meshrl.services.planner.costs.correction import Correction, CorrectionKey
from meshrl.services.planner.costs.training import TrainingLayout, TrainingWork, step_s, update_s


@dataclass(frozen=True, slots=True)
class TrainingQuery:
    """What is to be foretold: a step of a model's training on one worker of a kind."""

    model: str
    kind: str  # of accelerators, as their driver calls them
    shape: ModelShape | None
    pace: str  # that is imitated; empty: none is

    @property
    def key(self) -> CorrectionKey:
        """What has a factor of its own."""
        return CorrectionKey(" ".join(filter(None, (self.model, self.pace))), self.kind, "training")


@dataclass(frozen=True, slots=True)
class PredictedTraining:
    """Seconds of a step on one worker."""

    work_s: float  # gradients, which are divided
    fixed_s: float  # the update, which is not


def training(asked: TrainingQuery, sequences: float, tokens: float) -> PredictedTraining | None:
    """By the cost model alone, for a step of so many tokens; None where it knows nothing of the
    model or its accelerators.
    """
    if asked.pace:
        try:
            pace = training_profile(asked.pace)
        except ConfigError:  # a pace that this version does not know
            return None
        return PredictedTraining(tokens / pace.tokens_per_s, pace.update_s)
    on = profiles.declared().get(profiles.kind_of(asked.kind))
    if asked.shape is None or on is None or min(sequences, tokens) <= 0:
        return None
    layout = TrainingLayout(on.kind)
    work = TrainingWork(max(1, round(sequences)), tokens, tokens * tokens / sequences)
    update = update_s(asked.shape, on, layout)
    return PredictedTraining(step_s(asked.shape, on, layout, work) - update, update)


def believed(
    asked: TrainingQuery, sequences: float, tokens: float, correction: Correction
) -> PredictedTraining | None:
    """The same, corrected; None as well where a profile has not been held against a measurement
    yet, or is of workers that share what they compute with.
    """
    found, factor = training(asked, sequences, tokens), correction.factor(asked.key)
    checked = factor.count > 0 and profiles.kind_of(asked.kind) != profiles.CPU
    if found is None or not (asked.pace or checked):
        return None
    return replace(found, work_s=found.work_s * factor.value)
