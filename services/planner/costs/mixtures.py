"""What a job would train in a second with its core's ranks set apart, attention on one kind of
accelerators and experts on another, and with ranks all alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.profiles import declared
from meshrl.common.hardware.zebra.asymmetry import RankCounts
from meshrl.common.hardware.zebra.costs import BACKWARD
from meshrl.common.hardware.zebra.kinds import declared_profile
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, Profile, kind_of_table
from meshrl.common.hardware.zebra.shapes import MICROS, CoreShape, shape_of
from meshrl.common.hardware.zebra.together import expert_parallel_s, fits_together
from meshrl.common.job.pace import DeclaredPace, declared_pace
from meshrl.common.state.pool.demand.measured import LEVELS, Lengths
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.workers.rows import Apart

AGAIN = 1.0  # times a forward that a backward takes longer where activations are computed again


@dataclass(frozen=True, slots=True)
class Foretold:
    """The best division of a core between two kinds. Tokens a second; 0: it does not fit."""

    kinds: tuple[str, str]  # of attention, of experts
    apart: Apart
    tokens_per_s: float
    alike: float  # with ranks all alike, on the best accelerators that there are
    profiled: bool  # by what ranks have measured, else by what is declared


def inputs_of(job: PlannedJob, there: Mapping[str, int]) -> str:
    """Return the inputs of `foretold` that may change while a job lives: accelerators by kind,
    sizes of a step, kinds that have measured themselves, and sampled lengths to one digit.
    """
    lengths, step = job.measured.lengths, (job.groups_per_step, job.group_size, job.bin_tokens)
    sampled = () if lengths is None else (*lengths.sampled, lengths.prompt)
    told = [float(f"{tokens:.1g}") for tokens in sampled]
    return json.dumps([sorted(there.items()), step, sorted(job.measured.profiles), told])


def foretold(job: PlannedJob, there: Mapping[str, int]) -> Foretold | str:
    """The best division of a job's core on so many accelerators of each kind, by their declared
    names; why there is none.
    """
    known = [kind for kind in there if kind in declared()]
    rising = sorted(known, key=lambda kind: declared()[kind].flops)
    if job.shape is None or not job.shape.experts:
        return "the shape of its model is not known as that of a mixture"
    if len(rising) < 2:
        named = ", ".join(sorted(there)) or "none"
        return f"there are no accelerators of two kinds that are known ({named})"
    best: Foretold | None = None
    for slow, fast in product(rising, reversed(rising)):
        if rising.index(slow) < rising.index(fast):
            found = _between(job, there, fast, slow)
            if found is not None and (best is None or found.tokens_per_s > best.tokens_per_s):
                best = found
    ranks = job.need.ranks
    return best or (
        f"no division of {ranks} ranks between them leaves experts to the slow ones and fits into "
        "their memory"
    )


def _between(job: PlannedJob, there: Mapping[str, int], fast: str, slow: str) -> Foretold | None:
    profile, profiled = profile_of(job, fast, slow)
    step = _Step(job)
    ranks = job.need.ranks
    shapes = [
        shape
        for attention in range(max(1, ranks - there[slow]), min(there[fast], ranks - 1) + 1)
        for micros in step.micros(attention)
        if (shape := _shape(profile, step, RankCounts(attention, ranks - attention), micros))
    ]
    if not shapes:
        return None
    best = max(shapes, key=lambda shape: (shape.tokens_per_s, -shape.micros))
    apart = Apart(best.ranks.attention, best.micros, best.hosting.hosted)
    trained, alike = best.tokens_per_s, _alike(profile, step, there, ranks)
    return Foretold((fast, slow), apart, trained / step.times, alike / step.times, profiled)


def profile_of(job: PlannedJob, fast: str, slow: str) -> tuple[Profile, bool]:
    """What the job's model costs on two kinds, and whether that was measured. Ranks that keep the
    pace of what is declared measure nothing.
    """
    assert job.shape is not None
    profile = declared_profile(job.shape, fast, slow)
    again = AGAIN * job.recomputes
    told = [job.measured.profiles[kind] for kind in (fast, slow) if kind in job.measured.profiles]
    if len(told) < 2:
        profile = replace(profile, backward=BACKWARD + again)
        return profile.slowed(_pace(job).scale), False
    kinds = [kind_of_table(one["kind"], "a measured kind") for one in told]
    backward = sum(float(one["backward"]) for one in told) / len(told) + again
    return replace(profile, fast=kinds[0], slow=kinds[1], backward=backward), True


def _pace(job: PlannedJob) -> DeclaredPace:
    """What the job's ranks are slowed down to."""
    return declared_pace(job.training_pace) or DeclaredPace(1.0)


class _Step:
    """The sequences of a job's steps, by bins."""

    def __init__(self, job: PlannedJob) -> None:
        self.times = _pace(job).tokens  # that a real token stands for
        self._bin = max(1, round(self.times * job.bin_tokens))
        self._shares = _shares(job.measured.lengths, self._bin, self.times)
        self._mean = sum(length * share for length, share in self._shares.items())
        tokens = job.groups_per_step * job.group_size * self._mean
        self._bins = max(1, round(tokens / self._bin))

    def micros(self, attention: int) -> list[int]:
        """Bins of a round that so many ranks may have each, without empty ones."""
        return [count for count in MICROS if count == 1 or count * attention <= self._bins]

    def lengths(self, bins: int) -> dict[int, int]:
        """The sequences of so many bins, each of which has some."""
        many = max(bins, bins * self._bin / self._mean)
        found = {length: round(many * share) for length, share in self._shares.items()}
        short = bins - sum(found.values())
        if short > 0:
            found[min(found)] += short
        return {length: count for length, count in found.items() if count}


def _shares(lengths: Lengths | None, most: int, times: float) -> dict[int, float]:
    """Shares of sequences by their length, of up to `most` tokens, of which a measured one stands
    for `times` as many; before any are measured, each is half as long as a bin.
    """
    if lengths is None:
        return {max(1, most // 2): 1.0}
    found: dict[int, float] = {}
    levels = zip(pairwise(LEVELS), pairwise(lengths.sampled), strict=True)
    for (low, high), (shorter, longer) in levels:
        length = max(1, min(most, round(times * (lengths.prompt + (shorter + longer) / 2))))
        found[length] = found.get(length, 0.0) + high - low
    return found


def _shape(profile: Profile, step: _Step, ranks: RankCounts, micros: int) -> CoreShape | None:
    try:
        found = shape_of(profile, step.lengths(ranks.attention * micros), 1, ranks, micros)
    except ConfigError:
        return None
    return found if found is not None and any(found.hosting.kept) else None


def _alike(profile: Profile, step: _Step, there: Mapping[str, int], ranks: int) -> float:
    """Tokens a second of expert parallelism over the fast kind if there are enough, else both."""
    kinds: Sequence[AcceleratorCosts] = [profile.fast]
    if there[profile.fast.name] < ranks:
        kinds = [profile.fast, profile.slow]
    degrees = [d for d in range(1, ranks + 1) if not ranks % d and not profile.experts % d]
    best = 0.0
    for degree, micros in product(degrees, step.micros(ranks)):
        lengths = step.lengths(ranks * micros)
        if fits_together(profile, lengths, kinds, ranks, degree):
            step_s = expert_parallel_s(profile, lengths, kinds, ranks, degree, micros)
            if step_s:
                tokens = sum(length * count for length, count in lengths.items())
                best = max(best, tokens / step_s)
    return best
