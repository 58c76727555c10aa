"""Hosting experts on attention ranks keeps to memory, and is about the best that can be hosted."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.zebra.asymmetry import (
    ExpertHosting,
    Forward,
    HostingBounds,
    RankCounts,
    gather_and_squeeze,
    hosting,
)
from meshrl.common.hardware.zebra.costs import Costs
from meshrl.common.hardware.zebra.timeline import makespan

MARGIN = 0.1  # of the best step, at most; most are it
RANKS = (
    RankCounts(1, 1),
    RankCounts(2, 2),
    RankCounts(1, 2),
    RankCounts(2, 1),
    RankCounts(4, 2),
    RankCounts(2, 6),
)


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, RankCounts, Costs, float]:
    """Layers, experts of a layer, ranks, costs with nothing hosted, experts on attention ranks."""
    ranks = draw(st.sampled_from(RANKS))
    experts = ranks.experts * draw(st.integers(1, 4))
    costs = Costs(
        attention=draw(st.floats(0.05, 1.5)),
        experts=draw(st.floats(0.05, 1.5)),
        head=draw(st.floats(0, 1)),
        dispatch=(sent := draw(st.floats(0, 0.3))),
        combine=sent,
    )
    return draw(st.integers(1, 4)), experts, ranks, costs, draw(st.floats(0.05, 1.5))


def chunk(ranks: RankCounts) -> tuple[int, int]:
    """Experts that an attention rank takes and an expert rank gives at a time."""
    taken = max(1, ranks.experts // ranks.attention)
    return taken, taken * ranks.attention // ranks.experts


def all_hostings(
    layers: int, experts: int, ranks: RankCounts, bounds: HostingBounds
) -> list[ExpertHosting]:
    """Every way to host whole chunks."""
    (taken, given), share = chunk(ranks), experts // ranks.experts
    return [
        ExpertHosting(
            ranks, tuple(taken * k for k in chunks), tuple(share - given * k for k in chunks)
        )
        for chunks in product(range(share // given + 1), repeat=layers)
        if sum(chunks) * taken <= bounds.most and sum(chunks) * given >= bounds.least
    ]


@given(groups(), st.integers(0, 30), st.integers(0, 30), st.integers(1, 4))
def test_no_expert_is_lost_and_memory_is_kept_to(
    group: tuple[int, int, RankCounts, Costs, float], least: int, most: int, micros: int
) -> None:
    layers, experts, ranks, costs, elsewhere = group
    bounds = HostingBounds(least, most)
    try:
        found = hosting(layers, micros, experts, ranks, costs, elsewhere, bounds)
    except ConfigError:
        assert not all_hostings(layers, experts, ranks, bounds)
        return
    forward = Forward(costs.attention, costs.experts, elsewhere)
    for one in (found, gather_and_squeeze(layers, experts, ranks, forward, bounds)):
        pairs = list(zip(one.hosted, one.kept, strict=True))
        assert all(ranks.attention * h + ranks.experts * k == experts for h, k in pairs)
        assert len(pairs) == layers and min(one.kept) >= 0 and one.held <= most
        assert layers * experts // ranks.experts - sum(one.kept) >= least


@given(groups(), st.integers(0, 30), st.integers(1, 4))
def test_it_is_about_the_best_and_never_worse_than_nothing(
    group: tuple[int, int, RankCounts, Costs, float], most: int, micros: int
) -> None:
    layers, experts, ranks, costs, elsewhere = group
    bounds = HostingBounds(0, most)
    choices = all_hostings(layers, experts, ranks, bounds)
    assume(len(choices) <= 130)

    def step_s(one: ExpertHosting) -> float:
        return makespan(layers, micros, one.costs(costs, elsewhere))

    ours = step_s(hosting(layers, micros, experts, ranks, costs, elsewhere, bounds))
    assert ours <= makespan(layers, micros, costs) + 1e-9
    assert ours <= min(map(step_s, choices)) * (1 + MARGIN)


def test_gathered_bubbles_move_chunks_in_some_layers() -> None:
    forward = Forward(attention=0.75, experts=1.0, elsewhere=0.5)
    found = gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(0, 100))
    # A chunk fills (1.0 + 0.5) / 3 of a second, and each layer gathers half of that.
    assert found.hosted == (0, 1, 0, 1, 0, 1) and found.kept == (3, 2, 3, 2, 3, 2)
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(0, 2)).held == 2
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), forward, HostingBounds(5, 9)).held == 5
    busy = forward._replace(attention=1.5)
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), busy, HostingBounds(0, 100)).held == 0
    assert gather_and_squeeze(6, 12, RankCounts(4, 4), busy, HostingBounds(3, 100)).held == 3


def test_chunks_are_of_as_many_experts_on_either_side() -> None:
    forward = Forward(0.1, 1.0, 0.5)
    wide = gather_and_squeeze(2, 24, RankCounts(2, 6), forward, HostingBounds(0, 100))
    assert all(hosted % 3 == 0 for hosted in wide.hosted) and wide.held
    tall = gather_and_squeeze(2, 24, RankCounts(6, 3), forward, HostingBounds(0, 100))
    assert all((8 - kept) % 2 == 0 for kept in tall.kept) and tall.held


def test_ranks_that_do_not_divide_host_nothing_or_are_refused() -> None:
    forward = Forward(0.1, 1.0, 0.5)
    assert gather_and_squeeze(4, 12, RankCounts(4, 3), forward, HostingBounds(0, 9)).held == 0
    with pytest.raises(ConfigError, match="cannot take as many each"):
        gather_and_squeeze(4, 12, RankCounts(4, 3), forward, HostingBounds(1, 9))
    with pytest.raises(ConfigError, match="cannot hold 5 experts"):
        gather_and_squeeze(4, 12, RankCounts(3, 3), forward, HostingBounds(5, 4))
    with pytest.raises(ConfigError, match="do not spread evenly"):
        gather_and_squeeze(4, 10, RankCounts(3, 3), forward, HostingBounds())


def test_costs_follow_what_is_hosted() -> None:
    moved = ExpertHosting(RankCounts(2, 4), (0, 2), (3, 2)).costs(Costs(1.0, 3.0), elsewhere=1.5)
    assert moved.hosted == (0.0, 1.0) and list(moved.kept) == [1.0, pytest.approx(2 / 3)]
    nothing = Costs(1.0, 3.0)
    assert ExpertHosting(RankCounts(2, 4), (0, 0), (3, 3)).costs(nothing, 1.5) is nothing
