"""Run of a model on a setup at a length: throughput of Zebra parallelism and its baselines. It also
has the effect of Asym-EA in one group of 6 A40 and 6 V100.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from meshrl.common.hardware.zebra.core_shapes import (
    MICROS,
    CoreShape,
    compute_costs,
    evaluate_shape,
)
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.expert_hosting import (
    ForwardCosts,
    HostingBounds,
    RankCounts,
    gather_and_squeeze,
    optimize_hosting,
)
from meshrl.common.hardware.zebra.micro_batches import pack_micro_batches
from meshrl.common.hardware.zebra.profile import MixtureProfile
from meshrl.common.hardware.zebra.timeline import Timeline, build_timeline
from meshrl.sim.zebra import baselines
from meshrl.sim.zebra.paper_setups import (
    DEFAULT_ASSUMPTIONS,
    SETUPS,
    PaperAssumptions,
    PaperSetup,
    build_profile,
)

ASYMMETRIC_GROUP = RankCounts(6, 6)
GROUP_MICRO_BATCHES = 4  # of one sequence each


@dataclass(frozen=True, slots=True)
class PaperRun:
    """Division of a core, with tokens per second of each method."""

    shape: CoreShape
    zebra: float
    expert_parallel: float  # EP
    disaggregated: float  # DistEP
    ideal: float  # EP(Ideal)
    pipeline: float | None  # PP; None if no layers fit


@cache
def run_setup(
    model: str, setup: str, length: int, assumed: PaperAssumptions = DEFAULT_ASSUMPTIONS
) -> PaperRun | None:
    """Run a setup; return None if the model does not fit."""
    return run_on_setup(SETUPS[setup], model, length, assumed)


def run_on_setup(
    setup: PaperSetup, model: str, length: int, assumed: PaperAssumptions = DEFAULT_ASSUMPTIONS
) -> PaperRun | None:
    costs = build_profile(model, setup, assumed)
    lengths = setup.count_lengths(length, assumed.sequences)
    fast, slow = setup.fast_count, setup.slow_count
    shape = find_best_shape(costs, lengths, fast, slow)
    if shape is None:
        return None
    return PaperRun(
        shape,
        shape.tokens_per_s,
        baselines.rate_expert_parallel(costs, lengths, [costs.fast, costs.slow], setup.count),
        baselines.rate_disaggregated(costs, lengths, shape),
        baselines.rate_ideal(costs, lengths, fast, slow),
        baselines.rate_pipeline(costs, lengths, fast, slow),
    )


def find_best_shape(
    profile: MixtureProfile, lengths: Mapping[int, int], fast: int, slow: int
) -> CoreShape | None:
    """Find the fastest shape of all accelerators with micro-batches of equal sequence counts, as in
    the source. If there is none, find the fastest of any shape.
    """
    each = sum(lengths.values()) // fast
    even = [micros for micros in range(1, each + 1) if not each % micros]
    even_shapes = [
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
    ways: tuple[Iterable[tuple[int, RankCounts, int]], ...] = even_shapes, others
    for some in ways:
        shapes = (
            evaluate_shape(profile, lengths, groups, ranks, micros)
            for groups, ranks, micros in some
            if not profile.experts % ranks.experts
        )
        if fits := [shape for shape in shapes if shape is not None]:
            return min(fits, key=lambda shape: shape.step_s)
    return None


@cache
def compute_plain_costs(model: str, length: int) -> tuple[MicroBatchCosts, float]:
    """Compute a micro-batch's costs without hosting, and the time of a V100's share of the experts
    on an A40.
    """
    costs, many = (
        build_profile(model, SETUPS["O1"]),
        GROUP_MICRO_BATCHES * ASYMMETRIC_GROUP.attention,
    )
    batches = pack_micro_batches({length: many}, many, costs.attention)
    assert batches is not None
    return compute_costs(costs, ASYMMETRIC_GROUP, batches)


def compare_hosting(
    model: str, length: int, as_published: bool = False
) -> tuple[Timeline, Timeline]:
    """Compare a step without and with hosting. `as_published`: follow the source's algorithm,
    whatever its timeline.
    """
    of = build_profile(model, SETUPS["O1"])
    costs, elsewhere = compute_plain_costs(model, length)
    bounds = HostingBounds(0, of.layers * of.experts)  # memory of an A40 is no limit here
    if as_published:
        forward = ForwardCosts(costs.attention_s, costs.experts_s, elsewhere)
        hosts = gather_and_squeeze(of.layers, of.experts, ASYMMETRIC_GROUP, forward, bounds)
    else:
        hosts = optimize_hosting(
            of.layers, GROUP_MICRO_BATCHES, of.experts, ASYMMETRIC_GROUP, costs, elsewhere, bounds
        )
    moved = hosts.apply_to_costs(costs, elsewhere)
    return build_timeline(of.layers, GROUP_MICRO_BATCHES, costs), build_timeline(
        of.layers, GROUP_MICRO_BATCHES, moved
    )
