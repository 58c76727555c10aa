"""Hosting of experts on attention ranks so that neither kind of ranks waits for the other.

The algorithm is Asym-EA, gather and squeeze (HeterMoE, arXiv 2504.03871, Algorithm 1). Experts move
in chunks: per layer, each expert rank gives n2 of them and each attention rank takes n1, M * n1 = N
* n2. Every layer adds the time for which attention ranks wait in it (gather). When the sum reaches
the time that hosting a chunk takes (squeeze), a layer's chunk moves. M and N are the numbers of
attention and expert ranks of a group; one of them must divide the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.timeline import compute_makespan_s

TOLERANCE = 1e-9  # for sums of shares of a chunk
WHERE = "experts on attention ranks"


class RankCounts(NamedTuple):
    """Numbers of ranks of a group."""

    attention: int
    experts: int


class ForwardCosts(NamedTuple):
    """Measured forward costs of a micro-batch in one layer, in seconds."""

    attention_s: float  # on an attention rank
    experts_s: float  # an expert rank's share of the experts, there
    hosted_experts_s: float  # the same share on an attention rank


class HostingBounds(NamedTuple):
    """Bounds from memory limits, in experts of all layers together."""

    min_given: int = 0  # that each expert rank must give, as it cannot hold them
    max_hosted: int = 0  # that each attention rank can hold


@dataclass(frozen=True, slots=True)
class ExpertHosting:
    """Number of experts per rank by layer: M * hosted + N * kept are all experts."""

    ranks: RankCounts
    on_attention_ranks: tuple[int, ...]  # by layer: on each attention rank
    on_expert_ranks: tuple[int, ...]  # by layer: on each expert rank

    @property
    def hosted_total(self) -> int:
        """Experts of all layers on each attention rank."""
        return sum(self.on_attention_ranks)

    def move_chunk(self, hosted_per_rank: int, given_per_rank: int, to: int) -> ExpertHosting:
        """Return the hosting with a chunk of layer `to` hosted instead of one of the last
        layer's.
        """
        hosted, remaining = [*self.on_attention_ranks], [*self.on_expert_ranks]
        for layer, sign in ((to, 1), (-1, -1)):
            hosted[layer] += sign * hosted_per_rank
            remaining[layer] -= sign * given_per_rank
        return replace(self, on_attention_ranks=tuple(hosted), on_expert_ranks=tuple(remaining))

    def apply_to_costs(self, costs: MicroBatchCosts, hosted_experts_s: float) -> MicroBatchCosts:
        """Return the costs of a group that hosts nothing, adjusted for the hosted experts.

        `hosted_experts_s` is as in `ForwardCosts`.
        """
        if not self.hosted_total:
            return costs
        shares = [
            remaining + hosted * self.ranks.attention / self.ranks.experts
            for remaining, hosted in zip(self.on_expert_ranks, self.on_attention_ranks, strict=True)
        ]
        pairs = list(zip(self.on_attention_ranks, self.on_expert_ranks, shares, strict=True))
        return replace(
            costs,
            hosted_s=tuple(hosted_experts_s * hosted / share for hosted, _, share in pairs),
            expert_rank_shares=tuple(remaining / share for _, remaining, share in pairs),
        )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Chunks that a group can move, in all layers together."""

    layers: int
    experts: int  # of a layer
    ranks: RankCounts
    hosted_per_rank: int  # n1
    given_per_rank: int  # n2
    min_chunks: int
    max_chunks: int

    def distribute(self, rate: float) -> ExpertHosting:
        """Return a hosting with `rate` chunks a layer, each moved as soon as it is complete."""
        share = self.experts // self.ranks.experts
        gathered, moved = 0.0, []
        for _ in range(self.layers):
            gathered += rate
            moved.append(math.floor(gathered + TOLERANCE))
            gathered -= moved[-1]
        return ExpertHosting(
            self.ranks,
            tuple(self.hosted_per_rank * chunks for chunks in moved),
            tuple(share - self.given_per_rank * chunks for chunks in moved),
        )


def gather_and_squeeze(
    layers: int, experts: int, ranks: RankCounts, forward: ForwardCosts, bounds: HostingBounds
) -> ExpertHosting:
    """Return the hosting of the source's algorithm, for `experts` experts of each layer.

    Nothing is hosted if neither of M and N divides the other. ConfigError if memory does not allow
    that.
    """
    chunks = _build_chunks(layers, experts, ranks, bounds)
    return chunks.distribute(_compute_rate(chunks, forward))


def optimize_hosting(
    layers: int,
    micro_batches: int,
    experts: int,
    ranks: RankCounts,
    costs: MicroBatchCosts,
    hosted_experts_s: float,
    bounds: HostingBounds,
) -> ExpertHosting:
    """Return the hosting that minimizes the step time near the source's solution.

    The algorithm counts neither the last piece nor transfers, nor the time to fill a short step.
    This function searches for a better number of chunks for a step of `micro_batches`. `costs` are
    those with nothing hosted, `hosted_experts_s` is as in `ForwardCosts`.
    """
    chunks = _build_chunks(layers, experts, ranks, bounds)
    rate = _compute_rate(chunks, ForwardCosts(costs.attention_s, costs.experts_s, hosted_experts_s))

    def step_s(moved: ExpertHosting) -> float:
        return compute_makespan_s(
            layers, micro_batches, moved.apply_to_costs(costs, hosted_experts_s)
        )

    @cache
    def best_of(rate: float) -> ExpertHosting:
        late = chunks.distribute(rate)  # moves in later layers than `early`
        early = replace(
            late,
            on_attention_ranks=late.on_attention_ranks[::-1],
            on_expert_ranks=late.on_expert_ranks[::-1],
        )
        return min(late, early, key=step_s)

    count = math.floor(rate * layers + TOLERANCE)
    count = _search_count(lambda one: step_s(best_of(one / layers)), count, chunks)
    rates = rate, chunks.min_chunks / layers, count / layers
    found = min(map(best_of, rates), key=step_s)
    # attention ranks may have no idle time before the last piece
    while found.on_attention_ranks[-1]:
        others = [
            found.move_chunk(chunks.hosted_per_rank, chunks.given_per_rank, to)
            for to in range(layers - 1)
        ]
        fit = (one for one in others if min(one.on_expert_ranks) >= 0)
        best = min(fit, key=step_s, default=found)
        if step_s(best) >= step_s(found):
            break
        found = best
    return found


def _search_count(step_s: Callable[[int], float], count: int, chunks: _Chunks) -> int:
    """Return a count that is no worse than its neighbours, found with halving strides."""
    stride = 1 << max(0, (chunks.max_chunks - chunks.min_chunks).bit_length() - 3)
    while stride:
        near = (count, count - stride, count + stride)
        best = min(
            (one for one in near if chunks.min_chunks <= one <= chunks.max_chunks), key=step_s
        )
        if best == count:
            stride //= 2
        count = best
    return count


def _compute_rate(chunks: _Chunks, forward: ForwardCosts) -> float:
    """Return the chunks that each layer gathers.

    The algorithm's alpha and beta scale the gathered time so that the total is between `min_chunks`
    and `max_chunks`.
    """
    share = chunks.experts // chunks.ranks.experts
    gather = forward.experts_s - forward.attention_s
    squeeze = (
        chunks.given_per_rank * forward.experts_s
        + chunks.hosted_per_rank * forward.hosted_experts_s
    ) / share
    desired_rate = gather / squeeze if squeeze > 0 else 0.0
    low, high = chunks.min_chunks / chunks.layers, chunks.max_chunks / chunks.layers
    return min(max(desired_rate, low), high)


def _build_chunks(layers: int, experts: int, ranks: RankCounts, bounds: HostingBounds) -> _Chunks:
    attention, holders = ranks
    if min(layers, experts, attention, holders) < 1 or experts % holders:
        raise ConfigError(
            f"{experts} experts of {layers} layers cannot be divided evenly among {holders} ranks",
            where=WHERE,
            fix="Set a number of expert ranks that divides the experts of a layer",
        )
    if attention % holders and holders % attention:
        if bounds.min_given:
            raise ConfigError(
                f"{bounds.min_given} experts do not fit on an expert rank, and {attention} "
                f"attention ranks cannot take equal numbers from {holders}",
                where=WHERE,
                fix="Set numbers of ranks of which one divides the other",
            )
        return _Chunks(layers, experts, ranks, 0, 0, 0, 0)
    hosted_per_rank = max(1, holders // attention)
    given = hosted_per_rank * attention // holders
    most = min(bounds.max_hosted // hosted_per_rank, layers * (experts // holders // given))
    least = -(-bounds.min_given // given)
    if least > most:
        raise ConfigError(
            f"an expert rank cannot hold {bounds.min_given} experts, and attention ranks can hold "
            f"only {most} chunks of {hosted_per_rank} each",
            where=WHERE,
            fix="Use more ranks, or smaller micro-batches",
        )
    return _Chunks(layers, experts, ranks, hosted_per_rank, given, least, most)
