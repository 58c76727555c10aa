"""Predicted training throughput of an MoE job's core: attention and experts on two kinds of
accelerators, or uniform ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.common.hardware.zebra.core_shapes import MICROS, CoreShape, evaluate_shape
from meshrl.common.hardware.zebra.costs import BACKWARD_FACTOR
from meshrl.common.hardware.zebra.declared_profiles import build_declared_profile
from meshrl.common.hardware.zebra.expert_hosting import RankCounts
from meshrl.common.hardware.zebra.expert_parallel import compute_expert_parallel_s, has_memory
from meshrl.common.hardware.zebra.profile import (
    AcceleratorCosts,
    MixtureProfile,
    parse_accelerator_costs,
)
from meshrl.common.job.emulation import EmulationScale, parse_emulation_scale
from meshrl.common.state.pool.demand.measurements import QUANTILES, LengthQuantiles
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.workers.rows import ExpertSplit

RECOMPUTE_FACTOR = (
    1.0  # additional time of a backward pass, in forward passes, if activations are recomputed
)


@dataclass(frozen=True, slots=True)
class ExpertSplitPrediction:
    """Best split of a core between two kinds, in tokens per second; 0: it does not fit."""

    kinds: tuple[str, str]  # of attention, of experts
    expert_split: ExpertSplit
    tokens_per_s: float
    uniform_tokens_per_s: float  # with uniform ranks on the best accelerators
    is_measured: bool  # True: from measurements of ranks; False: from declared values


def encode_prediction_inputs(job: PlannedJob, kind_counts: Mapping[str, int]) -> str:
    """Return the inputs of `predict_expert_split` that may change while a job runs. They are
    accelerators by kind, sizes of a step, kinds with measured profiles, and sampled lengths to
    one digit.
    """
    lengths, step = job.measurements.lengths, (job.groups_per_step, job.group_size, job.bin_tokens)
    sampled = () if lengths is None else (*lengths.sampled_tokens, lengths.mean_prompt_tokens)
    rounded_tokens = [float(f"{tokens:.1g}") for tokens in sampled]
    return json.dumps(
        [sorted(kind_counts.items()), step, sorted(job.measurements.profiles), rounded_tokens]
    )


def predict_expert_split(
    job: PlannedJob, kind_counts: Mapping[str, int]
) -> ExpertSplitPrediction | str:
    """Predict the best split of a job's core on the accelerators of each kind, by declared names.
    Return the reason if there is none.
    """
    known = [kind for kind in kind_counts if kind in load_accelerators()]
    rising = sorted(known, key=lambda kind: load_accelerators()[kind].flops)
    if job.model_shape is None or not job.model_shape.experts:
        return "its model is not known to be a mixture of experts"
    if len(rising) < 2:
        named = ", ".join(sorted(kind_counts)) or "none"
        return f"the pool lacks accelerators of two known kinds ({named})"
    best: ExpertSplitPrediction | None = None
    for slow, fast in product(rising, reversed(rising)):
        if rising.index(slow) < rising.index(fast):
            found = _predict_between_kinds(job, kind_counts, fast, slow)
            if found is not None and (best is None or found.tokens_per_s > best.tokens_per_s):
                best = found
    ranks = job.requirements.ranks
    return best or (
        f"no division of {ranks} ranks between them places experts on the slow ones and fits "
        "into their memory"
    )


def _predict_between_kinds(
    job: PlannedJob, kind_counts: Mapping[str, int], fast: str, slow: str
) -> ExpertSplitPrediction | None:
    profile, profiled = build_profile(job, fast, slow)
    step = _StepSequences(job)
    ranks = job.requirements.ranks
    shapes = [
        shape
        for attention in range(
            max(1, ranks - kind_counts[slow]), min(kind_counts[fast], ranks - 1) + 1
        )
        for micros in step.list_micro_batches(attention)
        if (
            shape := _build_core_shape(
                profile, step, RankCounts(attention, ranks - attention), micros
            )
        )
    ]
    if not shapes:
        return None
    best = max(shapes, key=lambda shape: (shape.tokens_per_s, -shape.micro_batches))
    split = ExpertSplit(best.ranks.attention, best.micro_batches, best.hosting.on_attention_ranks)
    split_tokens_per_s, uniform_tokens_per_s = (
        best.tokens_per_s,
        _predict_uniform(profile, step, kind_counts, ranks),
    )
    return ExpertSplitPrediction(
        (fast, slow),
        split,
        split_tokens_per_s / step.token_scale,
        uniform_tokens_per_s / step.token_scale,
        profiled,
    )


def build_profile(job: PlannedJob, fast: str, slow: str) -> tuple[MixtureProfile, bool]:
    """Return the costs of the job's model on two kinds, and True if they are measured. Emulated
    ranks measure nothing.
    """
    assert job.model_shape is not None
    profile = build_declared_profile(job.model_shape, fast, slow)
    recompute_factor = RECOMPUTE_FACTOR * job.activation_checkpointing
    measured_profiles = [
        job.measurements.profiles[kind]
        for kind in (fast, slow)
        if kind in job.measurements.profiles
    ]
    if len(measured_profiles) < 2:
        profile = replace(profile, backward=BACKWARD_FACTOR + recompute_factor)
        return profile.scale_time(_load_emulation(job).time_scale), False
    kinds = [parse_accelerator_costs(one["kind"], "a measured kind") for one in measured_profiles]
    backward = (
        sum(float(one["backward"]) for one in measured_profiles) / len(measured_profiles)
        + recompute_factor
    )
    return replace(profile, fast=kinds[0], slow=kinds[1], backward=backward), True


def _load_emulation(job: PlannedJob) -> EmulationScale:
    """Return the emulation scale of the job's ranks."""
    return parse_emulation_scale(job.emulated_training) or EmulationScale(1.0)


class _StepSequences:
    """Sequences of a job's steps, by bins."""

    def __init__(self, job: PlannedJob) -> None:
        self.token_scale = _load_emulation(job).token_scale  # emulated tokens per real token
        self._bin_tokens = max(1, round(self.token_scale * job.bin_tokens))
        self._length_shares = _compute_length_shares(
            job.measurements.lengths, self._bin_tokens, self.token_scale
        )
        self._mean_length = sum(length * share for length, share in self._length_shares.items())
        tokens = job.groups_per_step * job.group_size * self._mean_length
        self._bin_count = max(1, round(tokens / self._bin_tokens))

    def list_micro_batches(self, attention_ranks: int) -> list[int]:
        """List the possible numbers of bins per rank in a round, without empty bins."""
        return [
            count for count in MICROS if count == 1 or count * attention_ranks <= self._bin_count
        ]

    def count_lengths(self, bin_count: int) -> dict[int, int]:
        """Count the sequences of the bins by length; each bin has at least one."""
        many = max(bin_count, bin_count * self._bin_tokens / self._mean_length)
        found = {length: round(many * share) for length, share in self._length_shares.items()}
        short = bin_count - sum(found.values())
        if short > 0:
            found[min(found)] += short
        return {length: count for length, count in found.items() if count}


def _compute_length_shares(
    lengths: LengthQuantiles | None, max_tokens: int, token_scale: float
) -> dict[int, float]:
    """Return the shares of sequences by length, up to `max_tokens`. A measured token counts as
    `token_scale` tokens. Before lengths are measured, each sequence is half as long as a bin.
    """
    if lengths is None:
        return {max(1, max_tokens // 2): 1.0}
    found: dict[int, float] = {}
    levels = zip(pairwise(QUANTILES), pairwise(lengths.sampled_tokens), strict=True)
    for (low, high), (shorter, longer) in levels:
        length = max(
            1,
            min(
                max_tokens,
                round(token_scale * (lengths.mean_prompt_tokens + (shorter + longer) / 2)),
            ),
        )
        found[length] = found.get(length, 0.0) + high - low
    return found


def _build_core_shape(
    profile: MixtureProfile, step: _StepSequences, ranks: RankCounts, micro_batches: int
) -> CoreShape | None:
    try:
        found = evaluate_shape(
            profile, step.count_lengths(ranks.attention * micro_batches), 1, ranks, micro_batches
        )
    except ConfigError:
        return None
    return found if found is not None and any(found.hosting.on_expert_ranks) else None


def _predict_uniform(
    profile: MixtureProfile, step: _StepSequences, kind_counts: Mapping[str, int], ranks: int
) -> float:
    """Predict tokens per second of expert parallelism over the fast kind if there are enough, else
    both.
    """
    kinds: Sequence[AcceleratorCosts] = [profile.fast]
    if kind_counts[profile.fast.name] < ranks:
        kinds = [profile.fast, profile.slow]
    degrees = [d for d in range(1, ranks + 1) if not ranks % d and not profile.experts % d]
    best = 0.0
    for degree, micros in product(degrees, step.list_micro_batches(ranks)):
        lengths = step.count_lengths(ranks * micros)
        if has_memory(profile, lengths, kinds, ranks, degree):
            step_s = compute_expert_parallel_s(profile, lengths, kinds, ranks, degree, micros)
            if step_s:
                tokens = sum(length * count for length, count in lengths.items())
                best = max(best, tokens / step_s)
    return best
