"""Profiles: durations, gaps and bytes of the functions that an instance of a known kind computes.

Profiles of a mesh outlive its jobs. A new instance starts from the profile of its kind, so that its
first time slices have estimates. Durations are histograms with bins of equal ratio, so that the
statistics of several processes add up. Newer samples reduce the weight of older ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

BINS_PER_OCTAVE = 4  # a quantile is at most 19 % too high
SHORTEST_S = 2.0**-14  # upper bound of bin 0: no function of an instance is shorter
LONGEST_BIN = 29 * BINS_PER_OCTAVE  # 9 hours, longer than any time slice
HALF_LIFE = 256.0  # newer samples after which a sample counts half
MIN_WEIGHT = 0.01  # of a bin; lighter ones are removed
DECIMALS = 6  # of encoded seconds and counts


@dataclass(slots=True)
class TimeStatistics:
    """Statistics of seconds, in which later batches reduce the weight of earlier ones."""

    count: float = 0.0  # sum of the samples' weights
    total_s: float = 0.0  # weighted
    max_s: float = 0.0  # longest sample, each multiplied by its weight
    bins: dict[int, float] = field(default_factory=dict)  # weight by bin

    def add(self, seconds: float) -> None:
        """Add a sample to a batch, with the weight 1."""
        seconds = max(0.0, seconds)
        bin = find_bin(seconds)
        self.count += 1.0
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        self.bins[bin] = self.bins.get(bin, 0.0) + 1.0

    def merge(self, newer: TimeStatistics) -> TimeStatistics:
        """Return these statistics with a newer batch added."""
        decay = 0.5 ** (newer.count / HALF_LIFE)
        bins = {bin: decay * weight for bin, weight in self.bins.items()}
        for bin, weight in newer.bins.items():
            bins[bin] = bins.get(bin, 0.0) + weight
        return TimeStatistics(
            decay * self.count + newer.count,
            decay * self.total_s + newer.total_s,
            max(decay * self.max_s, newer.max_s),
            {bin: weight for bin, weight in bins.items() if weight >= MIN_WEIGHT},
        )

    @property
    def mean_s(self) -> float:
        """Weighted mean; 0 without samples."""
        return self.total_s / self.count if self.count else 0.0

    def compute_quantile_s(self, share: float) -> float:
        """Return the upper bound of the bin that contains a quantile, at most the longest sample;
        0 without samples.
        """
        if not self.bins:
            return 0.0
        left = share * sum(self.bins.values())
        for bin in sorted(self.bins):
            left -= self.bins[bin]
            if left <= 1e-9:
                return min(compute_bin_end_s(bin), self.max_s)
        return self.max_s

    def encode(self) -> list[Any]:
        """Return the numbers that are stored."""
        bins = {str(bin): round(weight, DECIMALS) for bin, weight in sorted(self.bins.items())}
        numbers = (self.count, self.total_s, self.max_s)
        return [*(round(number, DECIMALS) for number in numbers), bins]

    @classmethod
    def decode(cls, stored: list[Any]) -> TimeStatistics:
        """Return the statistics that `encode` encoded."""
        count, total_s, max_s, bins = stored
        return cls(count, total_s, max_s, {int(bin): float(n) for bin, n in bins.items()})


def find_bin(seconds: float) -> int:
    """Return the bin of a duration."""
    if seconds <= SHORTEST_S:
        return 0
    return min(LONGEST_BIN, math.ceil(BINS_PER_OCTAVE * math.log2(seconds / SHORTEST_S)))


def compute_bin_end_s(bin: int) -> float:
    """Return the longest duration of a bin, in seconds."""
    return SHORTEST_S * math.pow(2.0, bin / BINS_PER_OCTAVE)


@dataclass(slots=True)
class FunctionProfile:
    """Statistics of one function."""

    durations: TimeStatistics = field(default_factory=TimeStatistics)
    # from the end of the instance's previous piece until it needs the accelerator for this function
    gaps: TimeStatistics = field(default_factory=TimeStatistics)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)  # tensors that it needs, last known
    repeats: float = 0.0  # weight of the pieces that followed one of the same function

    def merge(self, newer: FunctionProfile) -> FunctionProfile:
        """Return this profile with newer samples added."""
        return FunctionProfile(
            self.durations.merge(newer.durations),
            self.gaps.merge(newer.gaps),
            newer.bytes_by_kind or self.bytes_by_kind,
            0.5 ** (newer.durations.count / HALF_LIFE) * self.repeats + newer.repeats,
        )


Profile = dict[str, FunctionProfile]  # by function


def merge_profiles(older: Mapping[str, FunctionProfile], newer: Profile) -> Profile:
    """Return a profile with newer samples added; neither argument changes."""
    names = sorted({*older, *newer})
    return {
        name: older.get(name, FunctionProfile()).merge(newer.get(name, FunctionProfile()))
        for name in names
    }


def encode_profile(profile: Profile) -> str:
    """Return a profile as text."""
    return json.dumps(
        {
            name: [one.durations.encode(), one.gaps.encode(), one.bytes_by_kind, one.repeats]
            for name, one in profile.items()
        },
        separators=(",", ":"),
    )


def decode_profile(text: str) -> Profile:
    """Return the profile that `encode_profile` encoded."""
    return {
        name: FunctionProfile(
            TimeStatistics.decode(durations), TimeStatistics.decode(gaps), dict(sizes), *repeats
        )
        for name, (durations, gaps, sizes, *repeats) in json.loads(text).items()
    }


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Kind of an instance: processes of one kind have one profile, whatever their jobs."""

    role: str  # of the process: engine, trainer, hybrid, scoring
    model: str  # short description of the shape of its model
    algorithm: str
    dataset: str  # digest of the training rows
    max_tokens: int  # of a trajectory
    accelerator: str  # kind
    ranks: int

    def encode(self) -> str:
        """Return the key as text, equal for equal keys."""
        return json.dumps(list(asdict(self).values()), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> ProfileKey:
        """Return the key that `encode` encoded."""
        return cls(*json.loads(text))


class ProfileRecorder:
    """Profile of a running process: the stored one of its kind, and its samples since then."""

    def __init__(self) -> None:
        self._stored: Profile = {}
        self._batch: Profile = {}  # samples that are not stored yet
        self._last: tuple[str, float] | None = None  # piece's function, and its end

    def set_stored(self, profile: Profile) -> None:
        """Set the stored profile, for estimates of functions without samples of this process."""
        self._stored = profile

    def add(self, function: str, requested_s: float, duration_s: float, end_s: float) -> None:
        """Add a piece that was requested at `requested_s` and ended at `end_s` of one clock."""
        profile = self._batch.setdefault(function, FunctionProfile())
        profile.durations.add(duration_s)
        if self._last is not None:
            profile.gaps.add(requested_s - self._last[1])
            profile.repeats += function == self._last[0]
        self._last = function, end_s

    def estimate_s(self, function: str) -> float:
        """Return the longest recent duration of a function, from the stored profile; 0 without."""
        found = self._stored.get(function)
        return found.durations.max_s if found is not None else 0.0

    def find_repeat_gap_s(self, function: str) -> float:
        """Return a function's stored median gap; infinity if it usually follows another one."""
        found = self._stored.get(function)
        if found is None or 2.0 * found.repeats <= found.durations.count:
            return math.inf
        return found.gaps.compute_quantile_s(0.5)

    def take_batch(self) -> Profile:
        """Return the samples since the last call."""
        batch, self._batch = self._batch, {}
        return batch

    def restore_batch(self, batch: Profile) -> None:
        """Add a batch again that could not be stored; samples since then are newer."""
        self._batch = merge_profiles(batch, self._batch)
