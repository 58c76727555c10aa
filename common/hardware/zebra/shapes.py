"""A division of a core between accelerators of two kinds, those that attend and those that hold
experts, in one or several groups: what a group costs, where its experts lie, and what a step takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.asymmetry import ExpertHosting, HostingBounds, RankCounts, hosting
from meshrl.common.hardware.zebra.batches import Batches, checked, spread
from meshrl.common.hardware.zebra.costs import BACKWARD, Costs
from meshrl.common.hardware.zebra.profile import Profile
from meshrl.common.hardware.zebra.timeline import Timeline, makespan, timeline
from meshrl.common.hardware.zebra.together import all_to_all_s, reduced_s

MICROS = (1, 2, 3, 4, 6, 8, 12, 16)  # a step's, of a group; more hide no more


@dataclass(frozen=True, slots=True)
class CoreShape:
    """A division of work, with what is predicted of it."""

    groups: int  # each with ranks of its own, between which gradients are summed
    ranks: RankCounts  # of a group
    micros: int  # micro-batches that follow each other in a step
    hosting: ExpertHosting
    costs: Costs  # of one of them
    step_s: float
    tokens_per_s: float

    @property
    def attention(self) -> int:
        """Fast accelerators that it takes."""
        return self.groups * self.ranks.attention

    @property
    def experts(self) -> int:
        """Slow accelerators that it takes."""
        return self.groups * self.ranks.experts

    @property
    def timeline(self) -> Timeline:
        """A step of one group, without the sum of gradients."""
        return timeline(len(self.hosting.kept), self.micros, self.costs)


def shape_of(
    profile: Profile, lengths: Mapping[int, int], groups: int, ranks: RankCounts, micros: int
) -> CoreShape | None:
    """One shape; None where it does not fit or there are too few sequences for it."""
    tokens, layers = checked(lengths), profile.layers
    batches = spread(lengths, groups * ranks.attention * micros, profile.attention)
    bounds = bounds_of(profile, ranks, batches.tokens * micros) if batches else None
    if batches is None or bounds is None:
        return None
    costs, elsewhere = costs_of(profile, ranks, batches)
    try:
        hosts = hosting(layers, micros, profile.experts, ranks, costs, elsewhere, bounds)
    except ConfigError:  # its memory
        return None
    moved = hosts.costs(costs, elsewhere)
    step_s = makespan(layers, micros, moved) + summed_s(profile, groups, hosts)
    return CoreShape(groups, ranks, micros, hosts, moved, step_s, tokens / step_s)


def costs_of(profile: Profile, ranks: RankCounts, batches: Batches) -> tuple[Costs, float]:
    """A micro-batch's costs with nothing hosted, and an expert rank's share of the experts on an
    attention rank. Tokens are spread evenly over experts.
    """
    tokens = batches.tokens
    rows = tokens * ranks.attention * profile.experts_per_token / profile.experts  # of an expert
    share = profile.experts / ranks.experts
    # Whoever has more to send or to receive than the other side.
    sent = all_to_all_s(profile, tokens * max(1.0, ranks.attention / ranks.experts))
    head = profile.head.of(tokens)
    costs = Costs(
        attention=batches.seconds(profile.attention),
        experts=share * profile.slow.experts.of(rows),
        head=head,
        dispatch=sent,
        combine=sent,
        backward=profile.backward,
        head_backward=head * BACKWARD,  # nothing of it is computed again
    )
    return costs, share * profile.fast.experts.of(rows)


def bounds_of(profile: Profile, ranks: RankCounts, tokens: int) -> HostingBounds | None:
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


def summed_s(profile: Profile, groups: int, hosts: ExpertHosting) -> float:
    """Seconds in which gradients are summed; both kinds of ranks have links of their own."""
    expert = profile.expert_gradient_bytes
    attention = reduced_s(
        profile, profile.attention_gradient_bytes, groups * hosts.ranks.attention
    ) + reduced_s(profile, hosts.held * expert, groups)
    return max(attention, reduced_s(profile, sum(hosts.kept) * expert, groups))
