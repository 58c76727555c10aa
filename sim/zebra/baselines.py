"""Baselines of HeterMoE in tokens per second; only pipelines are limited by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshrl.common.hardware.zebra.core_shapes import CoreShape, compute_costs
from meshrl.common.hardware.zebra.costs import BACKWARD_FACTOR
from meshrl.common.hardware.zebra.expert_parallel import (
    compute_all_reduce_s,
    compute_all_to_all_s,
    compute_expert_parallel_s,
)
from meshrl.common.hardware.zebra.micro_batches import count_tokens, pack_micro_batches
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, MixtureProfile
from meshrl.common.hardware.zebra.timeline import compute_serial_s

MICRO_BATCH_COUNTS = (1, 2, 3, 4, 6, 8)


def rate_expert_parallel(
    profile: MixtureProfile,
    lengths: Mapping[int, int],
    kinds: Sequence[AcceleratorCosts],
    rank_count: int,
) -> float:
    """Rate expert parallelism over all accelerators, with an even split even if it does not
    divide.
    """
    steps = (
        compute_expert_parallel_s(profile, lengths, kinds, rank_count, rank_count, micros)
        for micros in MICRO_BATCH_COUNTS
    )
    return count_tokens(lengths) / min(step_s for step_s in steps if step_s is not None)


def rate_ideal(profile: MixtureProfile, lengths: Mapping[int, int], fast: int, slow: int) -> float:
    """Rate both kinds separately, and return the sum."""
    fast_rate = rate_expert_parallel(profile, lengths, [profile.fast], fast)
    return fast_rate + rate_expert_parallel(profile, lengths, [profile.slow], slow)


def rate_disaggregated(
    profile: MixtureProfile, lengths: Mapping[int, int], shape: CoreShape
) -> float:
    """Rate DistEP: divided as `shape`, without hosting and without overlap."""
    batches = pack_micro_batches(lengths, shape.attention_count, profile.attention)
    assert batches is not None
    costs, _ = compute_costs(profile, shape.ranks, batches)
    summed = shape.step_s - shape.timeline.makespan_s
    return count_tokens(lengths) / (compute_serial_s(profile.layers, 1, costs) + summed)


def rate_pipeline(
    profile: MixtureProfile, lengths: Mapping[int, int], fast: int, slow: int
) -> float | None:
    """Rate the best pipeline of whole layers on either kind, over widths, numbers of layers and
    orders of kinds.

    Ranks of a stage divide its experts, and their all-to-all is not hidden. Transfers between
    stages cost nothing.
    """
    steps = list(_iterate_pipeline_step_s(profile, lengths, fast, slow))
    return count_tokens(lengths) / min(steps) if steps else None


def _iterate_pipeline_step_s(
    profile: MixtureProfile, lengths: Mapping[int, int], fast: int, slow: int
) -> Iterator[float]:
    """Yield the seconds of a 1F1B step: all stages once, and the slowest for every other
    micro-batch.
    """
    count, tokens = sum(lengths.values()), count_tokens(lengths)
    for width in range(1, min(fast, slow) + 1):
        if fast % width or slow % width or count % width:
            continue
        stages = fast // width, slow // width
        micros = count // width
        each = [
            _compute_layer_s(profile, lengths, kind, width, micros) for kind in _get_kinds(profile)
        ]
        each_head = tokens / (width * micros)
        curves = [kind.head for kind in _get_kinds(profile) if kind.head is not None]
        heads = [curve.interpolate_s(each_head) * (1 + BACKWARD_FACTOR) for curve in curves]
        shared = compute_all_reduce_s(profile, profile.attention_gradient_bytes, width)
        for layers in range(stages[0], profile.layers - stages[1] + 1):
            parts = layers, profile.layers - layers
            layer = profile.experts * profile.expert_bytes / width  # on a rank
            each_part = zip(parts, stages, _get_kinds(profile), strict=True)
            if any(-(-n // of) * layer > kind.memory_bytes for n, of, kind in each_part):
                continue
            for last in (0, 1):
                slowest = max(-(-parts[i] // stages[i]) * each[i] for i in (0, 1))
                end = parts[last] // stages[last] * each[last] + heads[last]
                total_s = parts[0] * each[0] + parts[1] * each[1] + heads[last]
                yield total_s + (micros - 1) * max(slowest, end) + shared


def _get_kinds(profile: MixtureProfile) -> tuple[AcceleratorCosts, AcceleratorCosts]:
    return profile.fast, profile.slow


def _compute_layer_s(
    profile: MixtureProfile,
    lengths: Mapping[int, int],
    kind: AcceleratorCosts,
    width: int,
    micro_batches: int,
) -> float:
    """Compute the seconds of a layer's forward and backward pass of a micro-batch."""
    assert kind.attention is not None
    batches = pack_micro_batches(lengths, width * micro_batches, kind.attention)
    assert batches is not None
    rows = batches.max_tokens * profile.experts_per_token
    compute = batches.compute_max_s(kind.attention) + kind.experts.interpolate_s(rows)
    sent = compute_all_to_all_s(profile, batches.max_tokens * (width - 1) / width)
    return compute * (1 + profile.backward) + 4 * sent
