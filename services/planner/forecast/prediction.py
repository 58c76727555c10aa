"""Predicts the seconds of a job's step for any split of its workers, from what it has measured.

Steps are played ahead (`pipeline.py`): as many groups as the staleness gate admits go round between
engines, tools and the trainer. Where engines are many the time of a trajectory alone binds, and
another engine brings nothing; where they are few their throughput does. Training is what does not
get shorter with company and, divided by who computes, what does. No split makes a step shorter than
the host's cores take for all that its processes compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from meshrl.common.state.pool.demand.measured import Curve, Lengths
from meshrl.services.planner.forecast.accounts import Window
from meshrl.services.planner.forecast.degrees import weighted
from meshrl.services.planner.forecast.pipeline import played_s
from meshrl.services.planner.forecast.quantities import Demand, Split, StepRates, StepTerms, share

REACHED = 0.95  # share of a host's cores that its processes can keep busy together
OFF = 0.1  # share of a step that the model is usually off by


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step and of its stages."""

    rollout_s: float
    train_s: float
    host_s: float  # the host's cores would take it, all busy; 0: not known
    step_s: float

    @property
    def binds(self) -> str:
        """What a step waits for most: rollout, training or cores."""
        if self.host_s >= max(self.rollout_s, self.train_s):
            return "cores"
        return "rollout" if self.rollout_s >= self.train_s else "training"

    def rounded(self) -> dict[str, float]:
        """It for an event, in seconds."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def demand(window: Window, terms: StepTerms, lengths: Lengths | None = None) -> Demand | None:
    """What a step of the window asked for; None where too little ended in it."""
    work = window.work
    if min(work.groups, work.trajectories, work.sampled) <= 0:
        return None
    return Demand(
        trajectories=terms.groups * work.trajectories / work.groups,
        sampled=work.sampled / work.trajectories,
        tool_s=work.tool_s / work.trajectories,
        trained=work.tokens / window.steps,
        shape=lengths.sampled if lengths is not None else (),
    )


def rates(
    window: Window,
    now: Demand,
    terms: StepTerms,
    split: Split,
    curves: Sequence[Curve],
    cores: float,
) -> StepRates | None:
    """How fast the window's work, `now` a step, was done with this split; None where too little was
    seen.
    """
    work = window.work
    if min(work.sampled, work.engine_s, work.busy_s) <= 0 or not split.engines:
        return None
    alone_s = work.work_s / window.steps
    busy_s = (work.busy_s - work.held_s) / window.steps
    curve = mean(curves, now.sampled / 2)
    batch = min(work.engine_s / window.seconds / split.engines, float(terms.slots))
    return StepRates(
        curve=curve,
        friction=work.engine_s / work.sampled / curve.step_s(batch),
        work_s=alone_s,
        fixed_s=max(0.0, busy_s - alone_s * share(split.trainers, now.trained, terms)),
        cores=cores,
    )


def predicted(
    now: Demand, then: StepRates, split: Split, terms: StepTerms, step_s: float
) -> Prediction:
    """Seconds of a step of this demand with another split. `step_s` was measured with the rates: of
    it the host's cores were busy for their share.
    """
    return Prediction(
        rollout_s=played_s(now, replace(then, work_s=0.0, fixed_s=0.0), split, terms),
        train_s=then.fixed_s + then.work_s * share(split.trainers, now.trained, terms),
        host_s=_host_s(then, step_s),
        step_s=stepped_s(now, then, split, terms, step_s),
    )


def stepped_s(now: Demand, then: StepRates, split: Split, terms: StepTerms, step_s: float) -> float:
    """The seconds of a step alone."""
    return max(played_s(now, then, split, terms), _host_s(then, step_s))


def corrected(model_s: float, now_s: float, step_s: float, error: float) -> float:
    """What a step takes that is predicted as `model_s`, where the same model says `now_s` of what
    was measured as `step_s`, give or take `error` as a share of it. The measurement counts for as
    much as it is surer than the model, which is surely further off than usual where the two differ
    by more than twice the error. Time that the model does not know of stays as it is; what it sees
    too much of shrinks in proportion.
    """
    apart = math.log(step_s / now_s)
    off = max(OFF**2, apart**2 - (2 * error) ** 2)
    here_s = now_s * math.exp(apart * off / (off + error**2))
    return model_s + here_s - now_s if here_s > now_s else model_s * here_s / now_s


def _host_s(then: StepRates, step_s: float) -> float:
    return step_s * then.cores / REACHED


def scaled(before: StepRates, then: Demand, now: Demand) -> StepRates:
    """The rates for another demand: gradients take longer in proportion to what is trained."""
    ratio = then.trained / now.trained if now.trained > 0 and then.trained > 0 else 1.0
    return replace(before, work_s=before.work_s * ratio)


def mean(curves: Sequence[Curve], context: float = 0.0) -> Curve:
    """The curve of an engine among these, for sequences of so many tokens of context; where nobody
    has one, a step takes as long whatever is in it, which says that latency alone binds.
    """
    known = [curve for curve in curves if curve.steps > 0 and curve.base_s >= 0]
    if not known:
        return Curve("", 1, 1.0)
    found = weighted(known)
    sequence_s = found.sequence_s + context * found.context_s
    if found.base_s + sequence_s <= 0:
        return Curve("", 1, 1.0)
    return replace(found, sequence_s=sequence_s, context_s=0.0, prefill_tokens_per_s=0.0)
