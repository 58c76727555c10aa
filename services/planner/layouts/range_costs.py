"""What gangs take to serve contiguous ranges of lengths, and how far each gets in a given time.

A gang needs as many decode steps as its slots, its room for keys and values, and its longest
trajectory ask for, whichever is most; each step takes its base, or the arithmetic of its tokens if
that is longer, and each token and its context what they add
(`meshrl.common.state.pool.demand.measurements.DecodeCurve`). Who is in a tool keeps its slot, so
that tools take theirs, too. Nothing takes less than the longest trajectory takes alone: its tokens
one after the other, and its tools. A range never takes less than a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.services.planner.costs.rollout_costs import MAX_SLOTS, EngineGang
from meshrl.services.planner.layouts.length_groups import LengthGroup

RangeEnds = NDArray[np.intp]  # [groups + 1]: where a range that begins at each group may end
Seconds = NDArray[np.float64]
ROUNDING = 1e-12  # relative; a sum of costs may be off by this


@dataclass(frozen=True, slots=True)
class GangServer:
    """A gang that could be formed."""

    curve: DecodeCurve  # measured, or predicted
    kv_capacity_tokens: float  # tokens of context that fit at a time
    slots: int = MAX_SLOTS  # sequences at a time at most
    # Arithmetic of a token, in seconds: a step's base lasts as long as that of its batch at least.
    # 0 where the curve is measured, and has it.
    token_compute_s: float = 0.0

    @classmethod
    def from_gang(cls, gang: EngineGang, slots: int = MAX_SLOTS) -> GangServer:
        """The server that a gang is predicted to be."""
        capacity = gang.compute_kv_capacity() if gang.can_fit(1) else 0.0
        return cls(gang.predict_curve(), capacity, slots, gang.token_compute_s)

    @property
    def kind(self) -> str:
        """Of its accelerators."""
        return self.curve.kind

    @property
    def degree(self) -> int:
        """Of tensor parallelism: accelerators that it takes, all of one node."""
        return self.curve.degree

    def predict_tokens_per_s(self, context: float) -> float:
        """With as many sequences of so many tokens of context as it has room for."""
        batch = max(1.0, min(float(self.slots), self.kv_capacity_tokens / max(context, 1.0)))
        return batch / max(self.curve.predict_step_s(batch, context), batch * self.token_compute_s)

    def predict_longest_s(self, group: LengthGroup) -> float:
        """Seconds of a group's longest trajectory when it is alone there; infinite when it does not
        fit.
        """
        if group.max_context_tokens > self.kv_capacity_tokens:
            return float("inf")
        steps_s = group.max_generated_tokens * self.curve.predict_step_s(
            1, group.max_prompt_tokens + group.max_generated_tokens / 2
        )
        return self.predict_prefill_s(group.max_prompt_tokens) + steps_s + group.max_tool_s

    def predict_prefill_s(self, tokens: float) -> float:
        """Seconds of a prompt's forward pass."""
        rate = self.curve.prefill_tokens_per_s
        return tokens / rate if rate else 0.0


class RangeCosts:
    """The ranges [first, end) of groups in order of length, as servers take them: a longer range
    takes no less time than a part of it. What bounds a range is the difference of sums from the
    first group on, so that all reaches of a server are found by a search for each bound.
    """

    def __init__(self, servers: Sequence[GangServer], groups: Sequence[LengthGroup]) -> None:
        """`groups` are in order of length (`grouping.by_length`)."""
        self.servers = servers
        self.kinds: Sequence[tuple[str, int]] = [(one.kind, one.degree) for one in servers]
        self.group_count = len(groups)
        tokens = sum(group.generated_tokens for group in groups)
        # of a trajectory while one of its tokens is made, in the mean
        self.mean_context_tokens = (
            sum(group.context_token_steps for group in groups) / tokens if tokens else 0.0
        )
        self._max_generated_tokens = np.array(
            [0.0] + [group.max_generated_tokens for group in groups]
        )
        if (np.diff(self._max_generated_tokens) < 0).any():
            raise ValueError("groups are not in order of what their longest one generates")
        generated = _accumulate(group.generated_tokens for group in groups)
        held = _accumulate(group.context_token_steps for group in groups)
        prompts = _accumulate(group.prompt_tokens for group in groups)
        tools_s = _accumulate(group.total_tool_s for group in groups)
        self._server_sums: list[_ServerSums] = []
        for one in servers:
            rate, curve = one.curve.prefill_tokens_per_s, one.curve
            shared = curve.sequence_s * generated + curve.context_s * held
            shared = shared + (prompts / rate if rate else 0.0)
            bounds = [
                shared + (curve.base_s * generated + tools_s) / one.slots,
                shared
                + (
                    curve.base_s * held / one.kv_capacity_tokens
                    if one.kv_capacity_tokens > 0
                    else 0.0
                ),
                shared + one.token_compute_s * generated,
            ]
            latency = shared + curve.base_s * self._max_generated_tokens
            alone = np.array([one.predict_longest_s(group) for group in groups])
            self._server_sums.append(_ServerSums(shared, bounds, latency, alone))

    def predict_range_s(self, server: int, first: int, end: int) -> float:
        """What a server takes for groups [first, end)."""
        if first == end:
            return 0.0
        part = self._server_sums[server]
        sums = (float(bound[end] - bound[first]) for bound in part.bounds_s)
        longest_s = float(part.latency_s[end] - part.token_s[first])
        return max(float(part.longest_alone_s[first:end].max()), longest_s, *sums)

    def find_range_ends(self, server: int, limit_s: float) -> RangeEnds:
        """The furthest end, for each first, within a time."""
        part = self._server_sums[server]
        limit_s *= 1 + ROUNDING
        found = np.searchsorted(part.latency_s, part.token_s + limit_s, "right")
        for bound in part.bounds_s:
            found = np.minimum(found, np.searchsorted(bound, bound + limit_s, "right"))
        barriers = np.where(
            part.longest_alone_s > limit_s, np.arange(self.group_count), self.group_count
        )
        first_barrier = np.minimum.accumulate(barriers[::-1])[::-1]
        found[:-1] = np.minimum(found[:-1] - 1, first_barrier)
        return np.maximum(found, np.arange(self.group_count + 1)).clip(max=self.group_count)


class _ServerSums(NamedTuple):
    """Of a server, by the groups before: sums, and what a range's longest makes of them."""

    token_s: Seconds  # [groups + 1] what tokens add to steps, and their prefill
    bounds_s: list[Seconds]  # [groups + 1] each, with all steps that a bound asks for
    latency_s: Seconds  # [groups + 1] with the steps of the longest of those before
    longest_alone_s: Seconds  # [groups]


def _accumulate(values: Iterable[float]) -> Seconds:
    return np.concatenate(([0.0], np.cumsum(list(values))))
