"""Random small cases of the allocation, and a large one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.services.planner.costs.rollout_costs import EngineGang
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    predict_step_s,
)
from meshrl.services.planner.layouts.allocation import TrainingOption
from meshrl.services.planner.layouts.layout_nodes import LayoutNode
from meshrl.services.planner.layouts.length_groups import (
    LengthGroup,
    make_uniform_group,
    merge_groups,
    sort_by_length,
)
from meshrl.services.planner.layouts.range_costs import GangServer, RangeCosts

QWEN_14B = ModelShape(40, 5120, 40, 8, 128, 14.8e9, 14.8e9)  # Qwen3-14B
QWEN_30B_A3B = ModelShape(48, 2048, 32, 4, 128, 30.5e9, 3.3e9, 128, 8)  # Qwen3-30B-A3B
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """Everything that `allocate` takes, with the servers and groups that its ranges are of."""

    servers: tuple[GangServer, ...]
    groups: tuple[LengthGroup, ...]
    nodes: tuple[LayoutNode, ...]
    ways: tuple[TrainingOption, ...]

    @property
    def ranges(self) -> RangeCosts:
        return RangeCosts(self.servers, self.groups)

    def cost(self, server: int, groups: frozenset[int]) -> float:
        """Return the cost of any groups, contiguous or not."""
        return serves_s(self.servers[server], [self.groups[i] for i in sorted(groups)])


def serves_s(one: GangServer, groups: Sequence[LengthGroup]) -> float:
    """Return the seconds until a server has completed its groups."""
    alone_s = max(map(one.predict_longest_s, groups))
    if alone_s == float("inf"):
        return alone_s
    whole = merge_groups(groups)
    steps = max(
        whole.max_generated_tokens,
        whole.generated_tokens / one.slots,
        whole.context_token_steps / one.kv_capacity_tokens,
    )
    base_s = max(one.curve.base_s * steps, one.token_compute_s * whole.generated_tokens)
    slots_s = (one.curve.base_s * whole.generated_tokens + whole.total_tool_s) / one.slots
    added_s = (
        one.curve.sequence_s * whole.generated_tokens
        + one.curve.context_s * whole.context_token_steps
    )
    return max(alone_s, max(base_s, slots_s) + added_s + one.predict_prefill_s(whole.prompt_tokens))


def servers(shape: ModelShape, kinds: tuple[str, ...], slots: int = 256) -> tuple[GangServer, ...]:
    return tuple(
        GangServer.from_gang(EngineGang(shape, load_accelerators()[kind], degree), slots)
        for kind in kinds
        for degree in DEGREES
    )


def lengths(rng: random.Random, requests: int, middle: float, sigma: float) -> list[LengthGroup]:
    """Draw trajectories of lognormal lengths, some with tools, ordered by length."""
    found = []
    for _ in range(requests):
        generated = min(max(16.0, round(rng.lognormvariate(0.0, sigma) * middle)), 40_000.0)
        tool_s = rng.uniform(0.0, 30.0) if rng.random() < 0.3 else 0.0
        found.append(make_uniform_group(1, float(rng.randint(64, 2048)), generated, tool_s))
    return sort_by_length(found)


def trained(shape: ModelShape, kind: str, workers: int, work: TrainingWork) -> TrainingOption:
    layout = TrainingLayout(kind, data_parallel=workers)
    return TrainingOption(layout, predict_step_s(shape, load_accelerators()[kind], layout, work))


def small(seed: int, groups: int = 6, most: int = 16) -> Case:
    """Make cases of two kinds with up to `most` accelerators in up to four partly filled nodes."""
    rng = random.Random(seed)
    kinds = tuple(rng.sample(("A100", "A800", "H100", "A40", "L40S"), 2))
    total = rng.randint(3, most)
    nodes: list[LayoutNode] = []
    while total:
        free = min(total, rng.randint(1, 8))
        nodes.append(LayoutNode(rng.choice(kinds), f"host{len(nodes)}", free))
        total -= free
    found = [
        make_uniform_group(
            rng.randint(1, 200), one.max_prompt_tokens, one.max_generated_tokens, one.max_tool_s
        )
        for one in lengths(rng, groups, rng.choice((300, 1500, 6000)), rng.uniform(0.3, 1.5))
    ]
    work = TrainingWork(
        sum(one.requests for one in found),
        sum(one.prompt_tokens + one.generated_tokens for one in found),
        sum(one.requests * one.max_context_tokens**2 for one in found),
    )
    shape = rng.choice((QWEN_14B, ModelShape(28, 3584, 28, 4, 128, 7.6e9, 7.6e9)))
    ways = [
        trained(shape, kind, workers, work)
        for kind in kinds
        for workers in range(
            1, sum(node.free_accelerators for node in nodes if node.kind == kind) + 1
        )
    ]
    return Case(
        servers(shape, kinds, rng.choice((16, 64, 256))), tuple(found), tuple(nodes), tuple(ways)
    )
