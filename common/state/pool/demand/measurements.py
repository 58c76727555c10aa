"""What the processes of a job have measured of their own work, as the planner reads it.

Counts only grow while a process lives. They are kept by process, so that what one brings when it
comes, or takes when it goes, is told from what the others did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

DECIMALS = 3  # of a published count, after the point: of seconds and of tokens that suffices
SIGNIFICANT_DIGITS = 4  # of a published coefficient that count


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """What has been done so far: counts and seconds, of one process or of several together."""

    # by shards
    groups: float = 0.0  # complete
    trajectories: float = 0.0  # ended, of groups that may be trained
    sampled: float = 0.0  # tokens that the model generated for them
    flight_s: float = 0.0  # summed over trajectories: from its opening to its end
    engine_s: float = 0.0  # of that: at an engine, computing or computed beside others
    queue_s: float = 0.0  # of that: without an engine that takes it
    tool_s: float = 0.0  # of that: in tools, environments and rewards
    shut_s: float = 0.0  # wall time in which the staleness gate admitted nothing
    # by the core of the training
    steps: float = 0.0
    busy_s: float = 0.0  # wall time of its steps but for what they waited for groups
    wait_s: float = 0.0  # wall time that they waited for groups
    held_s: float = 0.0  # of busy_s: waited for an evaluation
    work_s: float = 0.0  # gradients, summed over the workers of the core and its helpers
    tokens: float = 0.0  # trained
    prompted: float = 0.0  # by shards: tokens of the prompts of ended trajectories

    def __add__(self, other: MeasuredWork) -> MeasuredWork:
        return MeasuredWork(*(getattr(self, n) + getattr(other, n) for n in WORK_FIELDS))

    def __sub__(self, other: MeasuredWork) -> MeasuredWork:
        return MeasuredWork(*(getattr(self, n) - getattr(other, n) for n in WORK_FIELDS))


WORK_FIELDS = tuple(one.name for one in fields(MeasuredWork))


def encode_work(work: MeasuredWork) -> dict[str, float]:
    """What a process publishes as `work`: what is not zero, as the leader reads it of thousands."""
    found = ((name, round(getattr(work, name), DECIMALS)) for name in WORK_FIELDS)
    return {name: value for name, value in found if value}


def decode_work(published: Mapping[str, Any]) -> MeasuredWork:
    """The counts that `told` made a document of; what a newer process counts beside is left out."""
    return MeasuredWork(
        **{name: float(published[name]) for name in WORK_FIELDS if name in published}
    )


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """How fast a gang of engines' workers generates, as one of its engines has measured it: a
    decode step takes `base_s` and, for each sequence, `sequence_s`, and for each token of their
    contexts together, `context_s`.
    """

    kind: str  # of the accelerators
    degree: int  # of tensor parallelism
    base_s: float
    sequence_s: float = 0.0
    context_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # 0: not known
    steps: int = 0  # that it was fitted to
    # that no batch exceeds, as measured where throughput no longer grew; 0: it grew as far as seen
    most_tokens_per_s: float = 0.0

    def predict_step_s(self, batch: float, context: float = 0.0) -> float:
        """Seconds of a decode step of `batch` sequences with so many tokens of context each."""
        grows_s = self.base_s + batch * (self.sequence_s + context * self.context_s)
        return max(grows_s, batch / self.most_tokens_per_s) if self.most_tokens_per_s else grows_s

    def encode(self) -> list[float]:
        """What an engine publishes as `curve`, without its accelerators' kind, which it does not
        know.
        """
        steps = self.base_s, self.sequence_s, self.context_s, self.prefill_tokens_per_s
        figures = (float(f"{x:.{SIGNIFICANT_DIGITS}g}") for x in steps)
        most = (
            [float(f"{self.most_tokens_per_s:.{SIGNIFICANT_DIGITS}g}")]
            if self.most_tokens_per_s
            else []
        )
        return [self.degree, *figures, self.steps, *most]


def parse_accelerator_kind(accelerator: str) -> str:
    """The kind of a worker's accelerator: `cpu` of "cpu:0", `NVIDIA H200` of
    "cuda:0 NVIDIA H200".
    """
    place, _, name = accelerator.partition(" ")
    return name or place.partition(":")[0]


def decode_curve(kind: str, published: Sequence[float]) -> DecodeCurve:
    """The curve that an engine on accelerators of this kind has `told`."""
    degree, base_s, sequence_s, context_s, prefill, steps, *most = published
    known = kind, int(degree), base_s, sequence_s, context_s, prefill, int(steps)
    return DecodeCurve(*known, *most)


# Shares of trajectories that are shorter than a published length: closer where the long ones are,
# whose tokens one after the other a step waits for.
QUANTILES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 0.985, 0.995, 1.0)


@dataclass(frozen=True, slots=True)
class LengthQuantiles:
    """How long a job's latest trajectories were."""

    count: int  # trajectories
    sampled: tuple[float, ...]  # tokens of one, at each of `LEVELS`
    prompt: float = 0.0  # tokens of a prompt, mean

    def encode(self) -> list[float]:
        """What a shard publishes as `lengths`."""
        return [self.count, *(round(tokens, 1) for tokens in self.sampled), round(self.prompt, 1)]


def decode_lengths(published: Sequence[float]) -> LengthQuantiles:
    """The lengths that a shard has `told`."""
    count, *sampled, prompt = published
    return LengthQuantiles(int(count), tuple(sampled), prompt)


def merge_lengths(shards: Sequence[LengthQuantiles]) -> LengthQuantiles | None:
    """Those of several shards as one: means of each level, by their trajectories, as the shards of
    a job have the same prompts. None without any.
    """
    count = sum(one.count for one in shards)
    if not count:
        return None
    levels = zip(*(one.sampled for one in shards), strict=True)
    sampled = (
        sum(one.count * tokens for one, tokens in zip(shards, level, strict=True)) / count
        for level in levels
    )
    prompt = sum(one.count * one.prompt for one in shards) / count
    return LengthQuantiles(count, tuple(sampled), prompt)


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that a job's live processes say of their work."""

    work: Mapping[str, MeasuredWork] = field(default_factory=dict)  # by process and incarnation
    curves: tuple[DecodeCurve, ...] = ()  # of its engines, one for each that has one
    lengths: LengthQuantiles | None = None  # of its shards together
    # what a mixture costs on kinds of accelerators, by their names, as ranks have measured it
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
