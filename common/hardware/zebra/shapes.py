"""How many accelerators of two kinds attend, how many hold experts, and in how many groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from common.base.errors import ConfigError
from common.hardware.zebra.asymmetry import ExpertHosting, HostingBounds, RankCounts, hosting
from common.hardware.zebra.batches import Batches, checked, spread
from common.hardware.zebra.costs import Costs
from common.hardware.zebra.prices import bounds_of, costs_of, summed_s
from common.hardware.zebra.profile import AcceleratorCosts, Profile
from common.hardware.zebra.timeline import Timeline, makespan, timeline
from common.hardware.zebra.together import expert_parallel_s, fits_together

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


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """The fastest shape, and the tokens a second of what could be done instead; None where nothing
    of that sort fits into memory, or too little was measured.
    """

    best: CoreShape | None
    together: float | None  # all accelerators alike: expert parallelism over both kinds
    fast_only: float | None  # the same over the fast kind; the slow one idles
    considered: int  # shapes

    @property
    def gain(self) -> float | None:
        """How many times as fast as the better one of the others."""
        others = [one for one in (self.together, self.fast_only) if one]
        return self.best.tokens_per_s / max(others) if self.best and others else None


@dataclass(frozen=True, slots=True)
class _Candidate:
    groups: int
    ranks: RankCounts
    micros: int
    costs: Costs  # with nothing hosted
    elsewhere: float  # an expert rank's share on an attention rank
    bounds: HostingBounds

    def least_s(self, layers: int) -> float:
        """No step is shorter: what one kind computes if hosting could make both even."""
        costs = self.costs
        layer = costs.attention
        if layer < costs.experts:
            hosted = self.elsewhere * self.ranks.experts / self.ranks.attention
            moved = (costs.experts - layer) / (costs.experts + hosted)
            layer = costs.experts * (1 - moved)
        return self.micros * layers * layer * (1 + costs.backward)


def choose(
    profile: Profile,
    lengths: Mapping[int, int],
    fast: int,
    slow: int,
    micros: Sequence[int] = MICROS,
) -> ShapeChoice:
    """The fastest of all shapes on so many accelerators, for a step of sequences by length (length:
    how many of it). Of equals the one with fewer accelerators, groups and micro-batches.
    """
    tokens = checked(lengths)
    candidates = sorted(
        _candidates(profile, lengths, fast, slow, micros),
        key=lambda one: (one.least_s(profile.layers), _size(one)),
    )
    best: CoreShape | None = None
    for candidate in candidates:
        if best is not None and candidate.least_s(profile.layers) > best.step_s:
            break
        shape = _shape(profile, candidate, tokens)
        if shape is not None and (best is None or _rank(shape) < _rank(best)):
            best = shape
    kinds = [kind for kind, count in ((profile.fast, fast), (profile.slow, slow)) if count]
    together = _together(profile, lengths, kinds, fast + slow, micros) if fast and slow else None
    alone = _together(profile, lengths, [profile.fast], fast, micros) if fast else None
    return ShapeChoice(best, together, alone, len(candidates))


def shape_of(
    profile: Profile, lengths: Mapping[int, int], groups: int, ranks: RankCounts, micros: int
) -> CoreShape | None:
    """One shape; None where it does not fit or there are too few sequences for it."""
    tokens = checked(lengths)
    batches = spread(lengths, groups * ranks.attention * micros, profile.attention)
    candidate = _candidate(profile, batches, groups, ranks, micros) if batches else None
    return _shape(profile, candidate, tokens) if candidate else None


def _candidates(
    profile: Profile, lengths: Mapping[int, int], fast: int, slow: int, micros: Sequence[int]
) -> Iterator[_Candidate]:
    known: dict[int, Batches | None] = {}
    for groups in range(1, min(fast, slow) + 1):
        divisors = [one for one in range(1, slow // groups + 1) if not profile.experts % one]
        for attention, count in product(range(1, fast // groups + 1), micros):
            many = groups * attention * count
            if many not in known:
                known[many] = spread(lengths, many, profile.attention)
            batches = known[many]
            if batches is None:
                continue
            for experts in divisors:
                found = _candidate(profile, batches, groups, RankCounts(attention, experts), count)
                if found is not None:
                    yield found


def _candidate(
    profile: Profile, batches: Batches, groups: int, ranks: RankCounts, micros: int
) -> _Candidate | None:
    costs, elsewhere = costs_of(profile, ranks, batches)
    bounds = bounds_of(profile, ranks, batches.tokens * micros)
    return _Candidate(groups, ranks, micros, costs, elsewhere, bounds) if bounds else None


def _shape(profile: Profile, candidate: _Candidate, tokens: int) -> CoreShape | None:
    layers, ranks, micros = profile.layers, candidate.ranks, candidate.micros
    costs, elsewhere = candidate.costs, candidate.elsewhere
    try:
        hosts = hosting(layers, micros, profile.experts, ranks, costs, elsewhere, candidate.bounds)
    except ConfigError:  # its memory
        return None
    moved = hosts.costs(costs, elsewhere)
    step_s = makespan(layers, micros, moved) + summed_s(profile, candidate.groups, hosts)
    return CoreShape(candidate.groups, ranks, micros, hosts, moved, step_s, tokens / step_s)


def _together(
    profile: Profile,
    lengths: Mapping[int, int],
    kinds: Sequence[AcceleratorCosts],
    ranks: int,
    micros: Sequence[int],
) -> float | None:
    """Tokens a second of the fastest expert parallelism on as many of them as it fits on."""
    for used in range(ranks, 0, -1):
        degrees = [d for d in range(1, used + 1) if not used % d and not profile.experts % d]
        steps = [
            expert_parallel_s(profile, lengths, kinds, used, degree, count)
            for degree, count in product(degrees, micros)
            if fits_together(profile, lengths, kinds, used, degree)
        ]
        known = [step_s for step_s in steps if step_s is not None]
        if known:
            return checked(lengths) / min(known)
    return None


def _size(one: _Candidate | CoreShape) -> tuple[int, int, int, int]:
    return one.groups * sum(one.ranks), one.groups, one.ranks.attention, one.micros


def _rank(shape: CoreShape) -> tuple[float, int, int, int, int]:
    return shape.step_s, *_size(shape)
