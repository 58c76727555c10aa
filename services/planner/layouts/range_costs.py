"""Time of gangs to serve contiguous ranges of lengths, and the furthest range within a time.

The number of decode steps of a gang is limited by its slots, its KV capacity, and its longest
trajectory. The largest of the three counts applies. Each step takes its base time, or the
arithmetic of its tokens if that is longer. Each token and its context add to it
(`meshrl.common.state.pool.demand.measurements.DecodeCurve`). A trajectory in a tool keeps its slot,
so tool time counts too. A range takes at least the time of its longest trajectory alone: its tokens
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

RangeEnds = NDArray[np.intp]  # [groups + 1]: the furthest end of a range that begins at each group
Seconds = NDArray[np.float64]
ROUNDING = 1e-12  # relative rounding error of a sum of costs


@dataclass(frozen=True, slots=True)
class GangServer:
    """Gang that could be formed."""

    curve: DecodeCurve  # measured, or predicted
    kv_capacity_tokens: float  # tokens of context that fit at a time
    slots: int = MAX_SLOTS  # maximum sequences at a time
    # Arithmetic of a token, in seconds: a lower bound of a step's base time, times its batch.
    # 0 if the curve is measured, as it includes the arithmetic.
    token_compute_s: float = 0.0

    @classmethod
    def from_gang(cls, gang: EngineGang, slots: int = MAX_SLOTS) -> GangServer:
        """Return the server predicted for a gang."""
        capacity = gang.compute_kv_capacity() if gang.can_fit(1) else 0.0
        return cls(gang.predict_curve(), capacity, slots, gang.token_compute_s)

    @property
    def kind(self) -> str:
        """Kind of its accelerators."""
        return self.curve.accelerator_kind

    @property
    def degree(self) -> int:
        """Degree of tensor parallelism: accelerators that it takes, all of one node."""
        return self.curve.tensor_parallel

    def predict_tokens_per_s(self, context: float) -> float:
        """Predict tokens per second with as many sequences of `context` tokens as fit."""
        batch = max(1.0, min(float(self.slots), self.kv_capacity_tokens / max(context, 1.0)))
        return batch / max(self.curve.predict_step_s(batch, context), batch * self.token_compute_s)

    def predict_longest_s(self, group: LengthGroup) -> float:
        """Predict the seconds of a group's longest trajectory alone; infinite if it does not
        fit.
        """
        if group.max_context_tokens > self.kv_capacity_tokens:
            return float("inf")
        steps_s = group.max_generated_tokens * self.curve.predict_step_s(
            1, group.max_prompt_tokens + group.max_generated_tokens / 2
        )
        return self.predict_prefill_s(group.max_prompt_tokens) + steps_s + group.max_tool_s

    def predict_prefill_s(self, tokens: float) -> float:
        """Predict the seconds of a prompt's forward pass."""
        rate = self.curve.prefill_tokens_per_s
        return tokens / rate if rate else 0.0


class RangeCosts:
    """Ranges [first, end) of groups in order of length, with their time on each server.

    A longer range takes no less time than a part of it. Each bound of a range is the difference of
    prefix sums, so one binary search per bound finds all range ends of a server.
    """

    def __init__(self, servers: Sequence[GangServer], groups: Sequence[LengthGroup]) -> None:
        """Build the sums of each server. `groups` are in order of length (`sort_by_length`)."""
        self.servers = servers
        self.kinds: Sequence[tuple[str, int]] = [(one.kind, one.degree) for one in servers]
        self.group_count = len(groups)
        tokens = sum(group.generated_tokens for group in groups)
        # of a trajectory during one of its tokens, on average
        self.mean_context_tokens = (
            sum(group.context_token_steps for group in groups) / tokens if tokens else 0.0
        )
        self._max_generated_tokens = np.array(
            [0.0] + [group.max_generated_tokens for group in groups]
        )
        if (np.diff(self._max_generated_tokens) < 0).any():
            raise ValueError("groups are not ordered by the tokens of their longest trajectory")
        generated = _accumulate(group.generated_tokens for group in groups)
        context_token_steps = _accumulate(group.context_token_steps for group in groups)
        prompts = _accumulate(group.prompt_tokens for group in groups)
        tools_s = _accumulate(group.total_tool_s for group in groups)
        self._server_sums: list[_ServerSums] = []
        for one in servers:
            rate, curve = one.curve.prefill_tokens_per_s, one.curve
            shared = curve.sequence_s * generated + curve.context_s * context_token_steps
            shared = shared + (prompts / rate if rate else 0.0)
            bounds = [
                shared + (curve.base_s * generated + tools_s) / one.slots,
                shared
                + (
                    curve.base_s * context_token_steps / one.kv_capacity_tokens
                    if one.kv_capacity_tokens > 0
                    else 0.0
                ),
                shared + one.token_compute_s * generated,
            ]
            latency = shared + curve.base_s * self._max_generated_tokens
            alone = np.array([one.predict_longest_s(group) for group in groups])
            self._server_sums.append(_ServerSums(shared, bounds, latency, alone))

    def predict_range_s(self, server: int, first: int, end: int) -> float:
        """Predict the seconds of a server for groups [first, end)."""
        if first == end:
            return 0.0
        part = self._server_sums[server]
        sums = (float(bound[end] - bound[first]) for bound in part.bounds_s)
        longest_s = float(part.latency_s[end] - part.token_s[first])
        return max(float(part.longest_alone_s[first:end].max()), longest_s, *sums)

    def find_range_ends(self, server: int, limit_s: float) -> RangeEnds:
        """Find the furthest end within a time, for each first group."""
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
    """Prefix sums of a server by group, and the bounds of the longest trajectory."""

    token_s: Seconds  # [groups + 1] time that tokens add to steps, and their prefill
    bounds_s: list[Seconds]  # [groups + 1] each, with all steps of a bound
    latency_s: Seconds  # [groups + 1] with the steps of the longest trajectory before
    longest_alone_s: Seconds  # [groups]


def _accumulate(values: Iterable[float]) -> Seconds:
    return np.concatenate(([0.0], np.cumsum(list(values))))
