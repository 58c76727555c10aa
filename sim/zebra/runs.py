"""A model on a setup at a length: what Zebra parallelism and what it is compared with reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from common.hardware.zebra.asymmetry import RankCounts
from common.hardware.zebra.profile import Profile
from common.hardware.zebra.shapes import CoreShape, choose, shape_of
from sim.zebra import baselines
from sim.zebra.setups import DEFAULT, SETUPS, Assumed, Setup, profile


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
    """The same for any setup."""
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
    """The fastest that takes all accelerators, as the source's do; where there is none, of any."""
    whole = [
        shape
        for groups in range(1, min(fast, slow) + 1)
        if not fast % groups and not slow % groups and not profile.experts % (slow // groups)
        for micros in _even(lengths, fast)
        if (shape := _shape(profile, lengths, groups, fast, slow, micros)) is not None
    ]
    if whole:
        return min(whole, key=lambda shape: shape.step_s)
    return choose(profile, lengths, fast, slow).best


def _even(lengths: Mapping[int, int], fast: int) -> list[int]:
    """Numbers of micro-batches that each have as many sequences."""
    each = sum(lengths.values()) // fast
    return [micros for micros in range(1, each + 1) if not each % micros]


def _shape(
    profile: Profile, lengths: Mapping[int, int], groups: int, fast: int, slow: int, micros: int
) -> CoreShape | None:
    return shape_of(profile, lengths, groups, RankCounts(fast // groups, slow // groups), micros)
