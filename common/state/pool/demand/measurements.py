"""Measurements that the processes of a job publish of their own work, for the planner.

Counts only grow while a process lives. They are kept by process, so that the counts of a process
that starts or exits can be told from those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

DECIMALS = 3  # decimal places of a published count: enough for seconds and tokens
SIGNIFICANT_DIGITS = 4  # of a published coefficient


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """Cumulative work counters, counts and seconds, of one process or of several together."""

    # by shards
    groups: float = 0.0  # complete
    trajectories: float = 0.0  # finished, of groups that may be trained
    sampled: float = 0.0  # tokens that the model generated for them
    flight_s: float = 0.0  # summed over trajectories: from opening to end
    engine_s: float = 0.0  # of that: at an engine, alone or in a batch
    queue_s: float = 0.0  # of that: waiting for an engine
    tool_s: float = 0.0  # of that: in tools, environments and rewards
    shut_s: float = 0.0  # wall time while the staleness gate admitted nothing
    # by the core of the training
    steps: float = 0.0
    busy_s: float = 0.0  # wall time of its steps without wait_s
    wait_s: float = 0.0  # wall time of its steps while they waited for groups
    held_s: float = 0.0  # of busy_s: waiting for an evaluation
    work_s: float = 0.0  # gradients, summed over the workers of the core and its hybrids
    tokens: float = 0.0  # trained
    prompted: float = 0.0  # by shards: tokens of the prompts of finished trajectories
    idle_s: float = 0.0  # by shards: wall time without a trajectory in flight

    def __add__(self, other: MeasuredWork) -> MeasuredWork:
        return MeasuredWork(*(getattr(self, n) + getattr(other, n) for n in WORK_FIELDS))

    def __sub__(self, other: MeasuredWork) -> MeasuredWork:
        return MeasuredWork(*(getattr(self, n) - getattr(other, n) for n in WORK_FIELDS))


WORK_FIELDS = tuple(one.name for one in fields(MeasuredWork))


def encode_work(work: MeasuredWork) -> dict[str, float]:
    """Return the non-zero counters, published as `work`: the leader reads thousands of these."""
    found = ((name, round(getattr(work, name), DECIMALS)) for name in WORK_FIELDS)
    return {name: value for name, value in found if value}


def decode_work(published: Mapping[str, Any]) -> MeasuredWork:
    """Return the counters that `encode_work` encoded; fields of newer processes are ignored."""
    return MeasuredWork(
        **{name: float(published[name]) for name in WORK_FIELDS if name in published}
    )


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Generation speed of a gang of engines, measured by one of its engines.

    A decode step takes `base_s`, plus `sequence_s` for each sequence, plus `context_s` for each
    token of their contexts together.
    """

    accelerator_kind: str  # of the accelerators
    tensor_parallel: int  # of tensor parallelism
    base_s: float
    sequence_s: float = 0.0
    context_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # 0: not known
    fitted_steps: int = 0  # that it was fitted to
    # upper limit over all batch sizes, measured where throughput stopped growing; 0: no limit seen
    max_tokens_per_s: float = 0.0

    def predict_step_s(self, batch: float, context: float = 0.0) -> float:
        """Return the seconds of a decode step of `batch` sequences with `context` tokens each."""
        grows_s = self.base_s + batch * (self.sequence_s + context * self.context_s)
        return max(grows_s, batch / self.max_tokens_per_s) if self.max_tokens_per_s else grows_s

    def encode(self) -> list[float]:
        """Return the numbers that an engine publishes as `curve`.

        The accelerators' kind is not included: the engine does not have it.
        """
        steps = self.base_s, self.sequence_s, self.context_s, self.prefill_tokens_per_s
        figures = (float(f"{x:.{SIGNIFICANT_DIGITS}g}") for x in steps)
        most = (
            [float(f"{self.max_tokens_per_s:.{SIGNIFICANT_DIGITS}g}")]
            if self.max_tokens_per_s
            else []
        )
        return [self.tensor_parallel, *figures, self.fitted_steps, *most]


def parse_accelerator_kind(accelerator: str) -> str:
    """Return the accelerator kind: `cpu` of "cpu:0", `NVIDIA H200` of "cuda:0 NVIDIA H200"."""
    place, _, name = accelerator.partition(" ")
    return name or place.partition(":")[0]


def decode_curve(kind: str, published: Sequence[float]) -> DecodeCurve:
    """Return the curve that an engine on accelerators of this kind has encoded."""
    degree, base_s, sequence_s, context_s, prefill, steps, *most = published
    known = kind, int(degree), base_s, sequence_s, context_s, prefill, int(steps)
    return DecodeCurve(*known, *most)


# Shares of trajectories that are shorter than a published length. They are denser for long
# trajectories, as a step waits for the tokens of these.
QUANTILES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 0.985, 0.995, 1.0)


@dataclass(frozen=True, slots=True)
class LengthQuantiles:
    """Lengths of a job's latest trajectories."""

    trajectories: int  # trajectories
    sampled_tokens: tuple[float, ...]  # tokens of a trajectory, at each of `QUANTILES`
    mean_prompt_tokens: float = 0.0  # tokens of a prompt, mean

    def encode(self) -> list[float]:
        """Return the numbers that a shard publishes as `lengths`."""
        return [
            self.trajectories,
            *(round(tokens, 1) for tokens in self.sampled_tokens),
            round(self.mean_prompt_tokens, 1),
        ]


def decode_lengths(published: Sequence[float]) -> LengthQuantiles:
    """Return the lengths that a shard has encoded."""
    count, *sampled, prompt = published
    return LengthQuantiles(int(count), tuple(sampled), prompt)


def merge_lengths(shards: Sequence[LengthQuantiles]) -> LengthQuantiles | None:
    """Return the lengths of several shards as one; None without any.

    Each level is the mean over shards, weighted by their trajectories: the shards of a job have the
    same prompts.
    """
    count = sum(one.trajectories for one in shards)
    if not count:
        return None
    levels = zip(*(one.sampled_tokens for one in shards), strict=True)
    sampled = (
        sum(one.trajectories * tokens for one, tokens in zip(shards, level, strict=True)) / count
        for level in levels
    )
    prompt = sum(one.trajectories * one.mean_prompt_tokens for one in shards) / count
    return LengthQuantiles(count, tuple(sampled), prompt)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Work measurements of a job's live processes."""

    # by process and incarnation
    work_by_process: Mapping[str, MeasuredWork] = field(default_factory=dict)
    curves: tuple[DecodeCurve, ...] = ()  # one for each engine that has one
    lengths: LengthQuantiles | None = None  # of all shards together
    # costs of a mixture, measured by ranks, by the name of the accelerator kind
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
