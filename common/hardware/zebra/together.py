"""What a step takes without a division: expert parallelism over all ranks, each of which attends to
micro-batches of its own and holds its share of every layer's experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshrl.common.hardware.zebra.batches import spread
from meshrl.common.hardware.zebra.costs import BACKWARD
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, Profile


def expert_parallel_s(
    profile: Profile,
    lengths: Mapping[int, int],
    kinds: Sequence[AcceleratorCosts],
    ranks: int,
    degree: int,
    micros: int,
) -> float | None:
    """Seconds of a step of `micros` micro-batches a rank, with experts over `degree` ranks. Ranks
    wait for each other in every all-to-all, which nothing hides: a step is as fast as the slowest
    of its kinds. None without as many sequences, or where attention of a kind is not known.
    """
    curves = [kind.attention for kind in kinds if kind.attention is not None]
    heads = [kind.head for kind in kinds if kind.head is not None]
    if len(curves) < len(kinds) or len(heads) < len(kinds):
        return None
    batches = spread(lengths, ranks * micros, curves[0])
    if batches is None:
        return None
    tokens = batches.tokens
    each = tokens * profile.experts_per_token * degree / profile.experts
    held = profile.experts / degree
    layer = max(map(batches.seconds, curves))
    layer += max(held * kind.experts.of(each) for kind in kinds)
    head = max(curve.of(tokens) for curve in heads)
    passes = passes_s(profile, layer, head, tokens, degree)
    experts = profile.layers * held * profile.expert_gradient_bytes
    return micros * passes + (
        reduced_s(profile, profile.attention_gradient_bytes, ranks)
        + reduced_s(profile, experts, ranks // degree)
    )


def passes_s(
    profile: Profile, layer: float, head: float, tokens: float, degree: int, back: bool = True
) -> float:
    """Seconds of a micro-batch, forward and with `back` backward, of a rank whose layer and head
    take so long forward, with experts over `degree` ranks.
    """
    sent = 2 * all_to_all_s(profile, tokens * (degree - 1) / degree)
    found = profile.layers * (layer + sent) + head
    if back:
        found += profile.layers * (layer * profile.backward + sent) + head * BACKWARD
    return found


def fits_together(
    profile: Profile,
    lengths: Mapping[int, int],
    kinds: Sequence[AcceleratorCosts],
    ranks: int,
    degree: int,
) -> bool:
    """Whether every rank has memory for its share of the experts and of the step."""
    tokens = sum(length * count for length, count in lengths.items()) / ranks
    share = profile.layers * profile.experts / degree * profile.expert_bytes
    rows = profile.layers * profile.experts_per_token * profile.expert_row_bytes
    left = tokens * (profile.attention_token_bytes + rows)
    return all(profile.attention_bytes + share + left <= kind.memory_bytes for kind in kinds)


def all_to_all_s(profile: Profile, tokens: float) -> float:
    """Seconds in which a rank sends or receives the rows of so many tokens of one layer."""
    rows = tokens * profile.experts_per_token * profile.row_bytes
    return rows / profile.link_bytes_per_s + profile.link_latency_s if rows else 0.0


def reduced_s(profile: Profile, gradient_bytes: float, ranks: int) -> float:
    """Seconds in which so many ranks sum their gradients, in a ring: each sends them nearly twice.
    Once a step, after it.
    """
    return 2 * (ranks - 1) / ranks * gradient_bytes / profile.link_bytes_per_s
