"""A division of a core between accelerators of two kinds, those that attend and those that hold
experts, in one or several groups: what a group costs, where its experts lie, and what a step takes.
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

MICROS = (1, 2, 3, 4, 6, 8, 12, 16)  # a step's, of a group; more hide no more


@dataclass(frozen=True, slots=True)
class CoreShape:
    """A division of work, with what is predicted of it."""

    groups: int  # each with ranks of its own, between which gradients are summed
    ranks: RankCounts  # of a group
    micro_batches: int  # micro-batches that follow each other in a step
    hosting: ExpertHosting
    costs: MicroBatchCosts  # of one of them
    step_s: float
    tokens_per_s: float

    @property
    def attention_count(self) -> int:
        """Fast accelerators that it takes."""
        return self.groups * self.ranks.attention

    @property
    def expert_count(self) -> int:
        """Slow accelerators that it takes."""
        return self.groups * self.ranks.experts

    @property
    def timeline(self) -> Timeline:
        """A step of one group, without the sum of gradients."""
        return build_timeline(len(self.hosting.on_expert_ranks), self.micro_batches, self.costs)


def evaluate_shape(
    profile: MixtureProfile,
    lengths: Mapping[int, int],
    groups: int,
    ranks: RankCounts,
    micro_batches: int,
) -> CoreShape | None:
    """One shape; None where it does not fit or there are too few sequences for it."""
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
    except ConfigError:  # its memory
        return None
    moved = hosts.apply_to_costs(costs, elsewhere)
    step_s = compute_makespan_s(layers, micro_batches, moved) + compute_gradient_sum_s(
        profile, groups, hosts
    )
    return CoreShape(groups, ranks, micro_batches, hosts, moved, step_s, tokens / step_s)


def compute_costs(
    profile: MixtureProfile, ranks: RankCounts, batches: MicroBatches
) -> tuple[MicroBatchCosts, float]:
    """A micro-batch's costs with nothing hosted, and an expert rank's share of the experts on an
    attention rank. Tokens are spread evenly over experts.
    """
    tokens = batches.max_tokens
    rows = tokens * ranks.attention * profile.experts_per_token / profile.experts  # of an expert
    share = profile.experts / ranks.experts
    # Whoever has more to send or to receive than the other side.
    sent = compute_all_to_all_s(profile, tokens * max(1.0, ranks.attention / ranks.experts))
    head = profile.head.interpolate_s(tokens)
    costs = MicroBatchCosts(
        attention=batches.compute_max_s(profile.attention),
        experts=share * profile.slow.experts.interpolate_s(rows),
        head=head,
        dispatch=sent,
        combine=sent,
        backward=profile.backward,
        head_backward=head * BACKWARD_FACTOR,  # nothing of it is computed again
    )
    return costs, share * profile.fast.experts.interpolate_s(rows)


def compute_hosting_bounds(
    profile: MixtureProfile, ranks: RankCounts, tokens: int
) -> HostingBounds | None:
    """What memory asks for when each attention rank has so many tokens of a step; None where they
    do not fit. An expert takes along the rows that go through it.
    """
    rows = tokens * ranks.attention * profile.experts_per_token / profile.experts
    expert = profile.expert_bytes + rows * profile.expert_row_bytes
    left = tokens * profile.attention_token_bytes
    room = profile.fast.memory_bytes - profile.attention_bytes - left
    if room < 0:
        return None
    share = profile.layers * profile.experts // ranks.experts
    if not expert:
        return HostingBounds(0, profile.layers * profile.experts)
    return HostingBounds(
        max(0, share - int(profile.slow.memory_bytes // expert)), int(room // expert)
    )


def compute_gradient_sum_s(profile: MixtureProfile, groups: int, hosts: ExpertHosting) -> float:
    """Seconds in which gradients are summed; both kinds of ranks have links of their own."""
    expert = profile.expert_gradient_bytes
    attention = compute_all_reduce_s(
        profile, profile.attention_gradient_bytes, groups * hosts.ranks.attention
    ) + compute_all_reduce_s(profile, hosts.hosted_total * expert, groups)
    return max(
        attention, compute_all_reduce_s(profile, sum(hosts.on_expert_ranks) * expert, groups)
    )
