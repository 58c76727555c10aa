"""A model on a setup at a length: what Zebra parallelism and what it is compared with reach, and
what Asym-EA brings in one group of 6 A40 and 6 V100.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from meshrl.common.hardware.zebra.asymmetry import (
    Forward,
    HostingBounds,
    RankCounts,
    gather_and_squeeze,
    hosting,
)
from meshrl.common.hardware.zebra.batches import spread
from meshrl.common.hardware.zebra.costs import Costs
from meshrl.common.hardware.zebra.profile import Profile
from meshrl.common.hardware.zebra.shapes import MICROS, CoreShape, costs_of, shape_of
from meshrl.common.hardware.zebra.timeline import Timeline, timeline
from meshrl.sim.zebra import baselines
from meshrl.sim.zebra.setups import DEFAULT, SETUPS, Assumed, Setup, profile

GROUP = RankCounts(6, 6)
GROUP_MICROS = 4  # of one sequence each


@dataclass(frozen=True, slots=True)
class PaperRun:
    """The division, and tokens a second of each way."""

    shape: CoreShape
    zebra: float
    together: float  # EP
    disaggregated: float  # DistEP
    ideal: float  # EP(Ideal)
    pipeline: float | None  # PP; None where no layers fit


@cache
def run(model: str, setup: str, length: int, assumed: Assumed = DEFAULT) -> PaperRun | None:
    """None where the model does not fit."""
    return run_on(SETUPS[setup], model, length, assumed)


def run_on(setup: Setup, model: str, length: int, assumed: Assumed = DEFAULT) -> PaperRun | None:
    costs = profile(model, setup, assumed)
    lengths = setup.lengths(length, assumed.sequences)
    fast, slow = setup.fast_count, setup.slow_count
    shape = best_shape(costs, lengths, fast, slow)
    if shape is None:
        return None
    return PaperRun(
        shape,
        shape.tokens_per_s,
        baselines.expert_parallel(costs, lengths, [costs.fast, costs.slow], setup.count),
        baselines.disaggregated(costs, lengths, shape),
        baselines.ideal(costs, lengths, fast, slow),
        baselines.pipeline(costs, lengths, fast, slow),
    )


def best_shape(
    profile: Profile, lengths: Mapping[int, int], fast: int, slow: int
) -> CoreShape | None:
    """The fastest that takes all accelerators, as the source's do, in micro-batches of as many
    sequences each; where there is none, of any.
    """
    each = sum(lengths.values()) // fast
    even = [micros for micros in range(1, each + 1) if not each % micros]
    whole = [
        (groups, RankCounts(fast // groups, slow // groups), micros)
        for groups in range(1, min(fast, slow) + 1)
        if not fast % groups and not slow % groups
        for micros in even
    ]
    others = (
        (groups, RankCounts(attention, experts), micros)
        for groups in range(1, min(fast, slow) + 1)
        for attention in range(1, fast // groups + 1)
        for experts in range(1, slow // groups + 1)
        for micros in MICROS
    )
    ways: tuple[Iterable[tuple[int, RankCounts, int]], ...] = whole, others
    for some in ways:
        shapes = (
            shape_of(profile, lengths, groups, ranks, micros)
            for groups, ranks, micros in some
            if not profile.experts % ranks.experts
        )
        if fits := [shape for shape in shapes if shape is not None]:
            return min(fits, key=lambda shape: shape.step_s)
    return None


@cache
def plain(model: str, length: int) -> tuple[Costs, float]:
    """A micro-batch's costs with nothing hosted, and what a V100's share of the experts takes an
    A40.
    """
    costs, many = profile(model, SETUPS["O1"]), GROUP_MICROS * GROUP.attention
    batches = spread({length: many}, many, costs.attention)
    assert batches is not None
    return costs_of(costs, GROUP, batches)


def with_and_without(model: str, length: int, plainly: bool = False) -> tuple[Timeline, Timeline]:
    """A step with nothing hosted, and with what is. `plainly`: what the source's algorithm says,
    whatever the timeline does.
    """
    of = profile(model, SETUPS["O1"])
    costs, elsewhere = plain(model, length)
    bounds = HostingBounds(0, of.layers * of.experts)  # memory of an A40 is no limit here
    if plainly:
        forward = Forward(costs.attention, costs.experts, elsewhere)
        hosts = gather_and_squeeze(of.layers, of.experts, GROUP, forward, bounds)
    else:
        hosts = hosting(of.layers, GROUP_MICROS, of.experts, GROUP, costs, elsewhere, bounds)
    moved = hosts.costs(costs, elsewhere)
    return timeline(of.layers, GROUP_MICROS, costs), timeline(of.layers, GROUP_MICROS, moved)
