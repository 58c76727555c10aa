"""What a profile says of one group of ranks: costs of a micro-batch, room in memory, and the sum
of gradients after a step.
"""

from __future__ import annotations

from common.hardware.zebra.asymmetry import ExpertHosting, HostingBounds, RankCounts
from common.hardware.zebra.batches import Batches
from common.hardware.zebra.costs import BACKWARD, Costs
from common.hardware.zebra.profile import Profile
from common.hardware.zebra.together import all_to_all_s, reduced_s


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
