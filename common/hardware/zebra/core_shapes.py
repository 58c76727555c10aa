"""Division of a core between attention ranks and expert ranks on two kinds of accelerators.

For one or several groups it predicts the costs, the location of experts and the step time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import BACKWARD_FACTOR, MicroBatchCosts
from meshrl.common.hardware.zebra.expert_hosting import (
    ExpertHosting,
    HostingBounds,
    RankCounts,
    optimize_hosting,
)
from meshrl.common.hardware.zebra.expert_parallel import compute_all_reduce_s, compute_all_to_all_s
from meshrl.common.hardware.zebra.micro_batches import (
    MicroBatches,
    count_tokens,
    pack_micro_batches,
)
from meshrl.common.hardware.zebra.profile import MixtureProfile
from meshrl.common.hardware.zebra.timeline import Timeline, build_timeline, compute_makespan_s

MICROS = (1, 2, 3, 4, 6, 8, 12, 16)  # of a step in a group; more do not overlap more


@dataclass(frozen=True, slots=True)
class CoreShape:
    """Division of work, with its predictions."""

    groups: int  # each with ranks of its own; gradients are summed over groups
    ranks: RankCounts  # of a group
    micro_batches: int  # of a step, one after the other
    hosting: ExpertHosting
    costs: MicroBatchCosts  # of one micro-batch
    step_s: float
    tokens_per_s: float

    @property
    def attention_count(self) -> int:
        """Number of fast accelerators."""
        return self.groups * self.ranks.attention

    @property
    def expert_count(self) -> int:
        """Number of slow accelerators."""
        return self.groups * self.ranks.experts

    @property
    def timeline(self) -> Timeline:
        """Timeline of a step of one group, without the sum of gradients."""
        return build_timeline(len(self.hosting.on_expert_ranks), self.micro_batches, self.costs)


def evaluate_shape(
    profile: MixtureProfile,
    lengths: Mapping[int, int],
    groups: int,
    ranks: RankCounts,
    micro_batches: int,
) -> CoreShape | None:
    """Return one shape with its predictions; None if it does not fit or has too few sequences."""
    tokens, layers = count_tokens(lengths), profile.layers
    batches = pack_micro_batches(
        lengths, groups * ranks.attention * micro_batches, profile.attention
    )
    bounds = (
        compute_hosting_bounds(profile, ranks, batches.max_tokens * micro_batches)
        if batches
        else None
    )
    if batches is None or bounds is None:
        return None
    costs, elsewhere = compute_costs(profile, ranks, batches)
    try:
        hosts = optimize_hosting(
            layers, micro_batches, profile.experts, ranks, costs, elsewhere, bounds
        )
    except ConfigError:  # too little memory
        return None
    moved = hosts.apply_to_costs(costs, elsewhere)
    step_s = compute_makespan_s(layers, micro_batches, moved) + compute_gradient_sum_s(
        profile, groups, hosts
    )
    return CoreShape(groups, ranks, micro_batches, hosts, moved, step_s, tokens / step_s)


def compute_costs(
    profile: MixtureProfile, ranks: RankCounts, batches: MicroBatches
) -> tuple[MicroBatchCosts, float]:
    """Return a micro-batch's costs with nothing hosted, and the seconds of hosted experts.

    The latter are an expert rank's share of the experts on an attention rank. Tokens are spread
    evenly over experts.
    """
    tokens = batches.max_tokens
    rows = tokens * ranks.attention * profile.experts_per_token / profile.experts  # of an expert
    share = profile.experts / ranks.experts
    # The side with more to send or to receive determines the time.
    sent = compute_all_to_all_s(profile, tokens * max(1.0, ranks.attention / ranks.experts))
    head = profile.head.interpolate_s(tokens)
    costs = MicroBatchCosts(
        attention_s=batches.compute_max_s(profile.attention),
        experts_s=share * profile.slow.experts.interpolate_s(rows),
        head_s=head,
        dispatch_s=sent,
        combine_s=sent,
        backward_factor=profile.backward,
        head_backward_s=head * BACKWARD_FACTOR,  # the head is not recomputed
    )
    return costs, share * profile.fast.experts.interpolate_s(rows)


def compute_hosting_bounds(
    profile: MixtureProfile, ranks: RankCounts, tokens: int
) -> HostingBounds | None:
    """Return the bounds from memory for `tokens` tokens of a step on each attention rank.

    None if they do not fit. An expert's memory includes the rows that it processes.
    """
    rows = tokens * ranks.attention * profile.experts_per_token / profile.experts
    expert = profile.expert_bytes + rows * profile.expert_row_bytes
    token_bytes = tokens * profile.attention_token_bytes
    room = profile.fast.memory_bytes - profile.attention_bytes - token_bytes
    if room < 0:
        return None
    share = profile.layers * profile.experts // ranks.experts
    if not expert:
        return HostingBounds(0, profile.layers * profile.experts)
    return HostingBounds(
        max(0, share - int(profile.slow.memory_bytes // expert)), int(room // expert)
    )


def compute_gradient_sum_s(profile: MixtureProfile, groups: int, hosts: ExpertHosting) -> float:
    """Return the seconds of the sum of gradients; both kinds of ranks have links of their own."""
    expert = profile.expert_gradient_bytes
    attention = compute_all_reduce_s(
        profile, profile.attention_gradient_bytes, groups * hosts.ranks.attention
    ) + compute_all_reduce_s(profile, hosts.hosted_total * expert, groups)
    return max(
        attention, compute_all_reduce_s(profile, sum(hosts.on_expert_ranks) * expert, groups)
    )
