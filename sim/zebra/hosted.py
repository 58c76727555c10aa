"""One group of 6 A40 and 6 V100 with and without experts on the A40: what Asym-EA brings."""

from __future__ import annotations

from functools import cache

from common.hardware.zebra.asymmetry import (
    Forward,
    HostingBounds,
    RankCounts,
    gather_and_squeeze,
    hosting,
)
from common.hardware.zebra.batches import spread
from common.hardware.zebra.costs import Costs
from common.hardware.zebra.prices import costs_of
from common.hardware.zebra.timeline import Timeline, timeline
from sim.zebra.setups import SETUPS, profile

GROUP = RankCounts(6, 6)
MICROS = 4  # of one sequence each


@cache
def plain(model: str, length: int) -> tuple[Costs, float]:
    """A micro-batch's costs with nothing hosted, and what a V100's share of the experts takes an
    A40.
    """
    costs, many = profile(model, SETUPS["O1"]), MICROS * GROUP.attention
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
        hosts = hosting(of.layers, MICROS, of.experts, GROUP, costs, elsewhere, bounds)
    moved = hosts.costs(costs, elsewhere)
    return timeline(of.layers, MICROS, costs), timeline(of.layers, MICROS, moved)
