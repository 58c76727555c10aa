"""Predicts the seconds of a job's step for any split of its workers, from what it has measured.

Rollout is a closed network (Reiser and Lavenberg 1980, mean value analysis): as many trajectories
as the staleness gate admits go round between engines, where each waits for tokens one after the
other, and tools. Where engines are many the time of a trajectory alone binds, and another engine
brings nothing; where they are few their throughput does. Training is what does not get shorter with
company and, divided by who computes, what does. The two overlap (an iteration takes the longer one:
Libra, arXiv 2606.03077) where versions may lag, and follow one another where they may not. No split
makes a step shorter than the host's cores take for all that its processes compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.pool.measured import Curve, Work
from services.planner.balance.accounts import Window

FLYING = 0.6  # share of an open group's members that are under way where nobody has measured it
SURE_WAIT = 0.3  # share of a step that the trainer waits, from which on rollout surely binds
REACHED = 0.95  # share of a host's cores that its processes can keep busy together
# Stages that vary wait for each other although neither binds: the power mean of the two has this
# over the variation of steps as its power, so that equal stages take 1.26 of either at 0.4.
OVERLAP, SHARP, BLUNT = 1.2, 16.0, 2.5


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job's file says of a step."""

    groups: int  # of a step
    group_size: int
    max_staleness: int
    slots: int  # of an engine
    bin_tokens: int  # of a bin, which one worker computes; 0: gradients are divided at will


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step asks for, whoever does it."""

    trajectories: float  # of a step
    sampled: float  # tokens of a trajectory
    tool_s: float  # of a trajectory
    trained: float  # tokens of a step


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast it is done, as measured with one split."""

    curve: Curve  # of its engines
    friction: float  # seconds of a trajectory's token over those of a step of the curve
    flight: float  # trajectories under way while rollout binds
    work_s: float  # gradients of a step's tokens, by one worker
    fixed_s: float  # of a step, whoever computes
    cores: float  # share of the host's cores that were busy; 0: not known
    vary: float  # deviation of a step's time, as a share of it


@dataclass(frozen=True, slots=True)
class Split:
    """Who does what: engines, and workers that train, the core as one.

    Where engines may be of several workers, `degrees` say of how many each is, and `engines` are
    how many there were when rates were measured: what others bring is in `speed`, as they change
    what a token takes, and with it what a closed network of equal engines goes by.
    """

    engines: int
    trainers: int
    degrees: tuple[int, ...] = ()  # falling; empty: one worker each
    speed: float = 1.0  # at which it rolls out, over that of the split that rates are of

    def same(self, other: Split | None) -> bool:
        """Whether the same workers do the same, whatever they were compared with."""
        if other is None or (self.trainers, self.degrees) != (other.trainers, other.degrees):
            return False
        return bool(self.degrees) or self.engines == other.engines

    @property
    def named(self) -> str:
        """Its engines, for people."""
        return f"rollout of {','.join(map(str, self.degrees))}"

    def document(self) -> dict[str, Any]:
        """It as JSON has it."""
        return asdict(self) | {"degrees": list(self.degrees)}

    @classmethod
    def of(cls, document: Mapping[str, Any] | None) -> Split | None:
        """The split of a document; None for none."""
        if document is None:
            return None
        return cls(**dict(document) | {"degrees": tuple(document.get("degrees", ()))})


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


def demand(window: Window, terms: Terms) -> Demand | None:
    """What a step of the window asked for; None where too little ended in it."""
    work = window.work
    if min(work.groups, work.trajectories, work.sampled) <= 0:
        return None
    return Demand(
        trajectories=terms.groups * work.trajectories / work.groups,
        sampled=work.sampled / work.trajectories,
        tool_s=work.tool_s / work.trajectories,
        trained=work.tokens / window.steps,
    )


def rates(
    window: Window,
    terms: Terms,
    split: Split,
    curves: Sequence[Curve],
    cores: float,
    vary: float,
) -> Rates | None:
    """How fast the window's work was done with this split; None where too little was seen."""
    work = window.work
    if min(work.sampled, work.engine_s, work.busy_s) <= 0 or not split.engines:
        return None
    curve = mean(curves, work.sampled / max(1.0, work.trajectories) / 2)
    batch = work.engine_s / window.seconds / split.engines
    token_s = work.engine_s / work.sampled
    alone_s = work.work_s / window.steps
    busy_s = (work.busy_s - work.held_s) / window.steps
    return Rates(
        curve=curve,
        friction=token_s / curve.step_s(min(batch, terms.slots)),
        flight=_flight(window, terms),
        work_s=alone_s,
        fixed_s=max(
            0.0, busy_s - alone_s * _share(split.trainers, work.tokens / window.steps, terms)
        ),
        cores=cores,
        vary=vary,
    )


def predicted(now: Demand, then: Rates, split: Split, terms: Terms, step_s: float) -> Prediction:
    """Seconds of a step of this demand with another split. `step_s` was measured with the rates: of
    it the host's cores were busy for their share.
    """
    rollout_s = now.trajectories / _per_s(now, then, split.engines, terms) / split.speed
    train_s = then.fixed_s + then.work_s * _share(split.trainers, now.trained, terms)
    host_s = step_s * then.cores / REACHED
    overlap = terms.max_staleness > 0
    stages_s = _longer(rollout_s, train_s, then.vary) if overlap else rollout_s + train_s
    return Prediction(rollout_s, train_s, host_s, max(stages_s, host_s))


def corrected(model: Prediction, now: Prediction, step_s: float) -> float:
    """What a step takes by a `model`, where the same model says `now` of what was measured as
    `step_s`. Time that the model does not know of stays as it is; what it sees too much of shrinks
    in proportion.
    """
    unknown_s = step_s - now.step_s
    return model.step_s + unknown_s if unknown_s > 0 else model.step_s * step_s / now.step_s


def scaled(before: Rates, then: Demand, now: Demand) -> Rates:
    """The rates for another demand: gradients take longer in proportion to what is trained."""
    share = then.trained / now.trained if now.trained > 0 and then.trained > 0 else 1.0
    document = asdict(before) | {"work_s": before.work_s * share, "curve": before.curve}
    return Rates(**document)


def mean(curves: Sequence[Curve], context: float = 0.0) -> Curve:
    """The curve of an engine among these, for sequences of so many tokens of context; where nobody
    has one, a step takes as long whatever is in it, which says that latency alone binds.
    """
    known = [curve for curve in curves if curve.steps > 0 and curve.base_s >= 0]
    weight = sum(curve.steps for curve in known)
    if not weight:
        return Curve("", 1, 1.0)

    def of(name: str) -> float:
        return float(sum(getattr(curve, name) * curve.steps for curve in known) / weight)

    base_s, sequence_s = of("base_s"), of("sequence_s") + context * of("context_s")
    if base_s + sequence_s <= 0:
        return Curve("", 1, 1.0)
    peaks = [curve.most_tokens_per_s for curve in known if curve.most_tokens_per_s]
    most = max(peaks, default=0.0)
    return Curve(known[0].kind, known[0].degree, base_s, sequence_s, 0.0, 0.0, weight, most)


def rates_of(document: dict[str, Any]) -> Rates:
    """The rates of a document."""
    return Rates(**document | {"curve": Curve(**document["curve"])})


def _per_s(now: Demand, then: Rates, engines: int, terms: Terms) -> float:
    """Trajectories a second with so many engines.

    With `b` trajectories at each of K engines and friction*(base + b*sequence) seconds a token, K*b
    are at engines and, by Little's law, K*b*tool_s / (tokens * token_s) in tools: a quadratic in b.
    """
    base_s = then.friction * then.curve.base_s * now.sampled
    each_s = then.friction * then.curve.sequence_s * now.sampled
    flight = max(then.flight, 1.0)
    linear = engines * (base_s + now.tool_s) - flight * each_s
    if each_s * engines > 1e-12:
        root = math.sqrt(linear * linear + 4 * engines * each_s * flight * base_s)
        batch = (root - linear) / (2 * engines * each_s)
    else:
        batch = flight * base_s / max(linear, 1e-12)
    batch = min(max(batch, 1e-9), float(terms.slots))
    per_s = engines * batch / max(base_s + each_s * batch, 1e-12)
    if not then.curve.most_tokens_per_s:
        return per_s
    most = then.curve.most_tokens_per_s / max(1.0, then.friction) / now.sampled
    return min(per_s, engines * most)


def _share(trainers: int, tokens: float, terms: Terms) -> float:
    """The share of a step's gradients that the busiest of its workers computes: whole bins."""
    bins = math.ceil(tokens / terms.bin_tokens) if terms.bin_tokens else 0
    return math.ceil(bins / trainers) / bins if bins else 1 / trainers


def _longer(one_s: float, other_s: float, vary: float) -> float:
    longest = max(one_s, other_s)
    power = min(SHARP, max(BLUNT, OVERLAP / max(vary, 1e-6)))
    shares = sum((s / longest) ** power for s in (one_s, other_s))
    return float(longest * shares ** (1 / power))


def admitted(work: Work, terms: Terms) -> float:
    """Trajectories under way when rollout binds, by what the gate admits: see `_flight`."""
    open_s = work.open_s * terms.group_size  # of their members, ended or not
    flying = min(1.0, work.flight_s / open_s) if open_s > 0 else FLYING
    return flying * (terms.max_staleness + 0.5) * terms.groups * terms.group_size


def _flight(window: Window, terms: Terms) -> float:
    """Trajectories under way when rollout binds: those that were, if it did; else those of the
    groups that the gate would let be open, half a step's groups being ready on average. Of an open
    group the members that have ended wait for the longest.
    """
    work, gate = window.work, admitted(window.work, terms)
    seen = work.flight_s / window.seconds
    waited = work.wait_s / max(1e-9, work.wait_s + work.busy_s - work.held_s)
    sure = min(1.0, waited / SURE_WAIT)
    return sure * seen + (1 - sure) * max(seen, gate)
