"""Step time of expert parallelism over all ranks, the alternative to a division.

Each rank computes attention for micro-batches of its own and holds its share of every layer's
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.common.hardware.zebra.costs import BACKWARD_FACTOR
from meshrl.common.hardware.zebra.micro_batches import pack_micro_batches
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, MixtureProfile


def compute_expert_parallel_s(
    profile: MixtureProfile,
    lengths: Mapping[int, int],
    accelerators: Sequence[AcceleratorCosts],
    ranks: int,
    degree: int,
    micro_batches: int,
) -> float | None:
    """Return the seconds of a step of `micro_batches` micro-batches a rank.

    Experts are spread over `degree` ranks. Ranks wait for each other in every all-to-all, which
    nothing overlaps: a step is as fast as the slowest of its kinds. None for too few sequences, or
    if the attention cost of a kind is unknown.
    """
    curves = [kind.attention for kind in accelerators if kind.attention is not None]
    heads = [kind.head for kind in accelerators if kind.head is not None]
    if len(curves) < len(accelerators) or len(heads) < len(accelerators):
        return None
    batches = pack_micro_batches(lengths, ranks * micro_batches, curves[0])
    if batches is None:
        return None
    tokens = batches.max_tokens
    each = tokens * profile.experts_per_token * degree / profile.experts
    experts_per_rank = profile.experts / degree
    layer = max(map(batches.compute_max_s, curves))
    layer += max(experts_per_rank * kind.experts.interpolate_s(each) for kind in accelerators)
    head = max(curve.interpolate_s(tokens) for curve in heads)
    passes = compute_passes_s(profile, layer, head, tokens, degree)
    experts = profile.layers * experts_per_rank * profile.expert_gradient_bytes
    return micro_batches * passes + (
        compute_all_reduce_s(profile, profile.attention_gradient_bytes, ranks)
        + compute_all_reduce_s(profile, experts, ranks // degree)
    )


def compute_passes_s(
    profile: MixtureProfile,
    layer: float,
    head: float,
    tokens: float,
    degree: int,
    with_backward: bool = True,
) -> float:
    """Return the seconds of a micro-batch, forward and, with `with_backward`, backward.

    `layer` and `head` are the forward seconds of a layer and of the head on one rank. Experts are
    spread over `degree` ranks.
    """
    sent = 2 * compute_all_to_all_s(profile, tokens * (degree - 1) / degree)
    found = profile.layers * (layer + sent) + head
    if with_backward:
        found += profile.layers * (layer * profile.backward + sent) + head * BACKWARD_FACTOR
    return found


def has_memory(
    profile: MixtureProfile,
    lengths: Mapping[int, int],
    accelerators: Sequence[AcceleratorCosts],
    ranks: int,
    degree: int,
) -> bool:
    """Return True if every rank has memory for its share of the experts and of the step."""
    tokens = sum(length * count for length, count in lengths.items()) / ranks
    share = profile.layers * profile.experts / degree * profile.expert_bytes
    rows = profile.layers * profile.experts_per_token * profile.expert_row_bytes
    token_bytes = tokens * (profile.attention_token_bytes + rows)
    return all(
        profile.attention_bytes + share + token_bytes <= kind.memory_bytes for kind in accelerators
    )


def compute_all_to_all_s(profile: MixtureProfile, tokens: float) -> float:
    """Return the seconds in which a rank sends or receives the rows of `tokens` tokens of one
    layer.
    """
    rows = tokens * profile.experts_per_token * profile.row_bytes
    return rows / profile.link_bytes_per_s + profile.link_latency_s if rows else 0.0


def compute_all_reduce_s(profile: MixtureProfile, gradient_bytes: float, ranks: int) -> float:
    """Return the seconds in which `ranks` ranks sum their gradients in a ring, once after a step.

    Each rank sends its gradients nearly twice.
    """
    return 2 * (ranks - 1) / ranks * gradient_bytes / profile.link_bytes_per_s
