"""Libra's released layout search and decode formula, as far as plans are compared with them.

Source: github.com/NetX-lab/Libra, infra/cost_model, model.py and optimizer.py of August 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loadtests.layouts.cases import serves_s
from meshrl.services.planner.costs.rollout_costs import (
    ALL_REDUCES_PER_LAYER,
    FRAGMENTATION_SHARE,
    MAX_SLOTS,
    WORKSPACE_BYTES,
    EngineGang,
)
from meshrl.services.planner.layouts.length_groups import LengthGroup
from meshrl.services.planner.layouts.range_costs import GangServer

INSTANCES, LAYOUTS = 32, 500  # limit of its search


def step_s(gang: EngineGang, batch: float, context: float, corrected: bool = False) -> float:
    """Return its decode step: a rank's bytes over the bandwidth of all ranks, or, `corrected`, of
    one.
    """
    shape, on, degree = gang.shape, gang.accelerator, gang.degree
    read = (
        shape.active * shape.dtype_bytes / degree
        + batch * context * shape.compute_kv_bytes_per_token(degree)
    )
    reduces_s = ALL_REDUCES_PER_LAYER * shape.layers * on.collective_s if degree > 1 else 0.0
    return read / ((1 if corrected else degree) * on.read_bytes_per_s) + reduces_s


def capacity(gang: EngineGang) -> float:
    """Return its KV capacity: that of all ranks, in tokens of one rank's bytes."""
    shape, degree = gang.shape, gang.degree
    pool = degree * gang.accelerator.memory_bytes - shape.parameter_bytes - WORKSPACE_BYTES
    return max(pool, 0.0) / shape.compute_kv_bytes_per_token(degree) * (1 - FRAGMENTATION_SHARE)


def server(gang: EngineGang, slots: int = MAX_SLOTS, corrected: bool = False) -> GangServer:
    """Return the server of a gang by its formulas, or by those with only t corrected."""
    one, zero = step_s(gang, 1, 1, corrected), step_s(gang, 0, 0, corrected)
    curve = replace(gang.predict_curve(), base_s=zero, sequence_s=0.0, context_s=one - zero)
    return GangServer(curve, gang.compute_kv_capacity() if corrected else capacity(gang), slots)


def layouts(workers: int) -> list[list[int]]:
    """Return the layouts that its search considers: partitions into degrees, the first of them."""

    def parted(left: int, most: int, count: int) -> Iterator[list[int]]:
        if left == 0:
            yield []
        elif count < INSTANCES:
            for degree in (8, 4, 2, 1):
                if degree <= min(left, most):
                    yield from (
                        [degree, *rest] for rest in parted(left - degree, degree, count + 1)
                    )

    found = []
    for layout in parted(workers, 8, 0):
        found.append(layout)
        if len(found) == LAYOUTS:
            break
    return found


def longest_first(
    servers: Sequence[GangServer], groups: Sequence[LengthGroup]
) -> list[list[LengthGroup]]:
    """Assign trajectories, longest first, to the gang that would be done with it first."""
    total = sum(group.requests for group in groups)
    prompt = sum(group.prompt_tokens for group in groups) / total
    generated = sum(group.generated_tokens for group in groups) / total
    held = prompt + generated / 2
    rates = []
    for one in servers:
        batch = max(1.0, min(float(one.slots), one.kv_capacity_tokens / held))
        rates.append(batch / one.curve.predict_step_s(batch, held))
    work = [0.0] * len(servers)
    found: list[list[LengthGroup]] = [[] for _ in servers]
    for group in sorted(groups, key=lambda group: -group.max_context_tokens):
        tokens = group.prompt_tokens + group.generated_tokens
        chosen = min(range(len(servers)), key=lambda i: (work[i] + tokens) / rates[i])
        work[chosen] += tokens
        found[chosen].append(group)
    return found


def best_s(by_degree: dict[int, GangServer], workers: int, groups: Sequence[LengthGroup]) -> float:
    """Return the shortest time of its layouts, each as long as its slowest gang really takes."""
    return min(
        max(
            serves_s(one, mine)
            for one, mine in zip(servers, longest_first(servers, groups), strict=True)
            if mine
        )
        for layout in layouts(workers)
        if (servers := [by_degree[degree] for degree in layout])
    )
