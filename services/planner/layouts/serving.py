"""What gangs take to serve contiguous ranges of lengths, and how far each gets in a given time.

A gang needs as many decode steps as its slots, its room for keys and values, and its longest
trajectory ask for, whichever is most; each step takes its base, or the arithmetic of its tokens if
that is longer, and each token and its context what they add
(`meshrl.common.state.pool.demand.measured.Curve`). Who is in a tool keeps its slot, so that tools
take theirs, too. Nothing takes less than the longest trajectory takes alone: its tokens one after
the other, and its tools. A range never takes less than a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl.common.state.pool.demand.measured import Curve
from meshrl.services.planner.costs.rollout import SLOTS, EngineGang
from meshrl.services.planner.layouts.grouping import LengthGroup

Positions = NDArray[np.intp]  # [groups + 1]: where a range that begins at each group may end
Seconds = NDArray[np.float64]
ROUNDING = 1e-12  # relative; a sum of costs may be off by this


@dataclass(frozen=True, slots=True)
class GangServer:
    """A gang that could be formed."""

    curve: Curve  # measured, or predicted
    capacity: float  # tokens of context that fit at a time
    slots: int = SLOTS  # sequences at a time at most
    # Arithmetic of a token, in seconds: a step's base lasts as long as that of its batch at least.
    # 0 where the curve is measured, and has it.
    busy_s: float = 0.0

    @classmethod
    def of(cls, gang: EngineGang, slots: int = SLOTS) -> GangServer:
        """The server that a gang is predicted to be."""
        capacity = gang.capacity() if gang.fits(1) else 0.0
        return cls(gang.curve(), capacity, slots, gang.busy_s)

    @property
    def kind(self) -> str:
        """Of its accelerators."""
        return self.curve.kind

    @property
    def degree(self) -> int:
        """Of tensor parallelism: accelerators that it takes, all of one node."""
        return self.curve.degree

    def tokens_per_s(self, context: float) -> float:
        """With as many sequences of so many tokens of context as it has room for."""
        batch = max(1.0, min(float(self.slots), self.capacity / max(context, 1.0)))
        return batch / max(self.curve.step_s(batch, context), batch * self.busy_s)

    def alone_s(self, group: LengthGroup) -> float:
        """Seconds of a group's longest trajectory when it is alone there; infinite when it does not
        fit.
        """
        if group.longest_context > self.capacity:
            return float("inf")
        steps_s = group.longest * self.curve.step_s(1, group.prompt + group.longest / 2)
        return self.prefill_s(group.prompt) + steps_s + group.tool_s

    def prefill_s(self, tokens: float) -> float:
        """Seconds of a prompt's forward pass."""
        rate = self.curve.prefill_tokens_per_s
        return tokens / rate if rate else 0.0


class Served:
    """The ranges [first, end) of groups in order of length, as servers take them: a longer range
    takes no less time than a part of it. What bounds a range is the difference of sums from the
    first group on, so that all reaches of a server are found by a search for each bound.
    """

    def __init__(self, servers: Sequence[GangServer], groups: Sequence[LengthGroup]) -> None:
        """`groups` are in order of length (`grouping.by_length`)."""
        self.servers = servers
        self.kinds: Sequence[tuple[str, int]] = [(one.kind, one.degree) for one in servers]
        self.groups = len(groups)
        tokens = sum(group.generated for group in groups)
        # of a trajectory while one of its tokens is made, in the mean
        self.context = sum(group.held for group in groups) / tokens if tokens else 0.0
        self._longest = np.array([0.0] + [group.longest for group in groups])
        if (np.diff(self._longest) < 0).any():
            raise ValueError("groups are not in order of what their longest one generates")
        generated, held = _sums(groups, "generated"), _sums(groups, "held")
        prompts, tools_s = _sums(groups, "prompts"), _sums(groups, "tools_s")
        self._parts: list[_Part] = []
        for one in servers:
            rate, curve = one.curve.prefill_tokens_per_s, one.curve
            shared = curve.sequence_s * generated + curve.context_s * held
            shared = shared + (prompts / rate if rate else 0.0)
            bounds = [
                shared + (curve.base_s * generated + tools_s) / one.slots,
                shared + (curve.base_s * held / one.capacity if one.capacity > 0 else 0.0),
                shared + one.busy_s * generated,
            ]
            latency = shared + curve.base_s * self._longest
            alone = np.array([one.alone_s(group) for group in groups])
            self._parts.append(_Part(shared, bounds, latency, alone))

    def seconds(self, server: int, first: int, end: int) -> float:
        """What a server takes for groups [first, end)."""
        if first == end:
            return 0.0
        part = self._parts[server]
        sums = (float(bound[end] - bound[first]) for bound in part.bounds)
        longest_s = float(part.latency[end] - part.shared[first])
        return max(float(part.alone[first:end].max()), longest_s, *sums)

    def reach(self, server: int, limit_s: float) -> Positions:
        """The furthest end, for each first, within a time."""
        part = self._parts[server]
        limit_s *= 1 + ROUNDING
        found = np.searchsorted(part.latency, part.shared + limit_s, "right")
        for bound in part.bounds:
            found = np.minimum(found, np.searchsorted(bound, bound + limit_s, "right"))
        barriers = np.where(part.alone > limit_s, np.arange(self.groups), self.groups)
        first_barrier = np.minimum.accumulate(barriers[::-1])[::-1]
        found[:-1] = np.minimum(found[:-1] - 1, first_barrier)
        return np.maximum(found, np.arange(self.groups + 1)).clip(max=self.groups)


class _Part(NamedTuple):
    """Of a server, by the groups before: sums, and what a range's longest makes of them."""

    shared: Seconds  # [groups + 1] what tokens add to steps, and their prefill
    bounds: list[Seconds]  # [groups + 1] each, with all steps that a bound asks for
    latency: Seconds  # [groups + 1] with the steps of the longest of those before
    alone: Seconds  # [groups]


def _sums(groups: Sequence[LengthGroup], name: str) -> Seconds:
    return np.concatenate(([0.0], np.cumsum([getattr(group, name) for group in groups])))
