"""Benchmark of the planner's allocation: its time, its gap to exhaustive search, and to Libra's
released search.

Usage:

    python -m loadtests.plan

`plan_s_1024` is the CPU time of a whole plan of 1,024 accelerators of two kinds and 4,096
trajectories one by one, the slowest of several; `plan_s_grouped` the same of 1,024 groups,
`plan_s_fragments` where nodes have any number of accelerators free. `optimal_16` is the share of
small cases whose plan is as short as the shortest of its family. `gap_free_*` are plans over the
shortest way to give whole groups to gangs without an order, `gap_longest_first` the best of Libra's
released layouts and its assignment over ours (on 16 A800, by the same costs). `grouping_error` is
how much longer plans of 64 groups take on 64 accelerators, `_256` of so many, `_rule` of as many as
`choose_group_count` says. `decode_corrected_ratio` is the released decode step with nothing but its
bandwidth corrected over the released one (64 sequences of 2,048 tokens of a model with 14.8e9
parameters, on 8 A800), `capacity_corrected_ratio` the room for contexts; `released_layouts_cost` is
what layouts take that are chosen by the released formulas, over those of the corrected ones, by the
latter.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from loadtests.layouts import brute, released
from loadtests.layouts.cases import DEGREES, QWEN_14B, lengths, servers, serves_s, small
from loadtests.measuring.entry import options, report
from meshrl.common.hardware.accelerators import load_accelerators
from meshrl.services.planner.costs.rollout_costs import EngineGang
from meshrl.services.planner.costs.training_costs import TrainingWork
from meshrl.services.planner.layouts.allocation import NO_TRAINING, LayoutPlan, allocate
from meshrl.services.planner.layouts.layout_nodes import LayoutNode
from meshrl.services.planner.layouts.length_groups import (
    LengthGroup,
    choose_group_count,
    group_by_quantiles,
)
from meshrl.services.planner.layouts.range_costs import GangServer, RangeCosts
from meshrl.sim.cluster.training_candidates import TrainingCandidates, TrainingCapabilities

KINDS = ("A800", "H100")
REQUESTS = 4096
SHAPES = ((300.0, 0.5), (1000.0, 1.0), (3000.0, 0.3), (8000.0, 1.0))  # median tokens, sigma
EXACT = 1e-9


def nodes_of(
    kinds: Sequence[str], workers: int, rng: random.Random | None = None
) -> list[LayoutNode]:
    return [
        LayoutNode(kind, f"{kind}-{index}", rng.randint(1, 8) if rng else 8)
        for kind in kinds
        for index in range(workers // len(kinds) // 8)
    ]


def whole_plan_s(groups: Sequence[LengthGroup], count: int, nodes: Sequence[LayoutNode]) -> float:
    """Measure CPU-seconds of a plan from its trajectories: groups, costs, layouts, search."""
    started_s = time.process_time()
    found = group_by_quantiles(groups, count) if count < len(groups) else groups
    work = TrainingWork(
        len(groups),
        sum(group.prompt_tokens + group.generated_tokens for group in groups),
        sum(group.max_context_tokens**2 for group in groups),
    )
    ways = TrainingCandidates(
        QWEN_14B, work, load_accelerators(), TrainingCapabilities(worker_multiple=8)
    ).list_candidates(nodes)
    plan = allocate(RangeCosts(servers(QWEN_14B, KINDS), found), nodes, ways)
    if plan is None:
        raise RuntimeError("there is no plan: run tests/unit/planner/layouts")
    return time.process_time() - started_s


def times(rng: random.Random) -> dict[str, float]:
    whole, fragments = nodes_of(KINDS, 1024), nodes_of(KINDS, 1024, rng)
    of = [lengths(rng, REQUESTS, *shape) for shape in SHAPES]
    return {
        "plan_s_1024": max(whole_plan_s(groups, REQUESTS, whole) for groups in of),
        "plan_s_grouped": max(whole_plan_s(groups, 1024, whole) for groups in of),
        "plan_s_fragments": max(whole_plan_s(groups, REQUESTS, fragments) for groups in of),
    }


def optimality(cases: int) -> dict[str, float]:
    """Compare plans of small cases with exhaustive search."""
    equal, gaps = [], []
    for seed in range(cases):
        case = small(seed)
        ranges = case.ranges
        plan = allocate(ranges, case.nodes, case.ways, EXACT)
        given = (ranges.kinds, ranges.group_count, case.nodes, case.ways, case.cost)
        shortest = brute.iteration_s(*given)
        ours = plan.iteration_s if plan is not None else float("inf")
        equal.append(ours == shortest or abs(ours - shortest) <= 2 * EXACT * shortest)
        if plan is not None:
            gaps.append(ours / brute.iteration_s(*given, brute.divisions))
    return {
        "optimal_16": sum(equal) / len(equal),
        "gap_free_median": statistics.median(gaps),
        "gap_free_worst": max(gaps),
    }


def rollout(
    of: Sequence[GangServer], groups: Sequence[LengthGroup], nodes: Sequence[LayoutNode]
) -> LayoutPlan:
    plan = allocate(RangeCosts(of, groups), nodes, [NO_TRAINING])
    if plan is None:
        raise RuntimeError("no gang has the memory: run tests/unit/planner/layouts")
    return plan


def peers(rng: random.Random, cases: int) -> dict[str, float]:
    """Compare plans with Libra's released search, also by its released formulas."""
    gangs = [EngineGang(QWEN_14B, load_accelerators()["A800"], degree) for degree in DEGREES]
    ours, theirs = (
        [GangServer.from_gang(gang) for gang in gangs],
        [released.server(gang) for gang in gangs],
    )
    corrected = {gang.degree: released.server(gang, corrected=True) for gang in gangs}
    nodes = nodes_of(("A800",), 16)
    longest_first, formulas = [], []
    for index in range(cases):
        groups = lengths(rng, 512, *SHAPES[index % len(SHAPES)])
        best = rollout(ours, groups, nodes)
        by_degree = {one.degree: one for one in ours}
        longest_first.append(released.best_s(by_degree, 16, groups) / best.rollout_s)
        chosen, better = (rollout(of, groups, nodes) for of in (theirs, list(corrected.values())))
        took = [serves_s(corrected[g.degree], groups[g.first : g.end]) for g in chosen.gangs]
        formulas.append(max(took) / better.rollout_s)
    step = (64, 2048)
    return {
        "gap_longest_first": statistics.median(longest_first),
        "decode_corrected_ratio": released.step_s(gangs[-1], *step, True)
        / released.step_s(gangs[-1], *step),
        "capacity_corrected_ratio": gangs[-1].compute_kv_capacity() / released.capacity(gangs[-1]),
        "released_layouts_cost": statistics.median(formulas),
    }


def grouping(rng: random.Random, cases: int) -> dict[str, float]:
    """Measure how much longer plans of groups take than those of single trajectories."""
    found: dict[str, list[float]] = {}
    of = servers(QWEN_14B, KINDS)
    for index in range(cases):
        groups = lengths(rng, REQUESTS, *SHAPES[index % len(SHAPES)])
        nodes = nodes_of(KINDS, 64)
        whole = rollout(of, groups, nodes).rollout_s
        for name, count in (("", 64), ("_256", 256), ("_rule", choose_group_count(64))):
            error = rollout(of, group_by_quantiles(groups, count), nodes).rollout_s / whole - 1
            found.setdefault(f"grouping_error{name}", []).append(error)
    return {name: statistics.median(errors) for name, errors in found.items()}


def main() -> None:
    parser = options(__doc__, cases=80, peers=12, seed=0)
    a = parser.parse_args()
    rng = random.Random(a.seed)
    found = times(rng) | peers(rng, a.peers) | grouping(rng, a.peers) | optimality(a.cases)
    report({name: round(figure, 4) for name, figure in found.items()})


if __name__ == "__main__":
    main()
