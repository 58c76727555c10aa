"""Several jobs at once, each within its share."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.hardware.profiles import declared
from loadtests.layouts.cases import QWEN_14B, lengths, servers
from services.planner.costs.training import StepWork
from services.planner.layouts.allocation import allocate
from services.planner.layouts.jobs import Asks, allocate_all, deal
from services.planner.layouts.nodes import Node
from services.planner.layouts.serving import Served
from services.planner.layouts.training import Trains

nodes = st.lists(
    st.builds(Node, st.sampled_from("AB"), st.uuids().map(str), st.integers(1, 8)),
    min_size=1,
    max_size=6,
)


@given(nodes, st.data())
def test_every_job_gets_its_share_of_every_kind_and_nothing_twice(
    there: list[Node], data: st.DataObject
) -> None:
    total = sum(node.free for node in there)
    shares: dict[str, int] = {}
    for job in ("one", "two", "three"):
        shares[job] = data.draw(st.integers(0, total - sum(shares.values())))
    found = deal(there, shares)
    used: Counter[tuple[str, str]] = Counter()
    of_kind = Counter({kind: sum(n.free for n in there if n.kind == kind) for kind in "AB"})
    for job, mine in found.items():
        assert sum(node.free for node in mine) == shares[job]
        for node in mine:
            used[node.kind, node.place] += node.free
        for kind, count in of_kind.items():
            exact = shares[job] * count / total
            assert abs(sum(n.free for n in mine if n.kind == kind) - exact) < 3
    assert all(used[node.kind, node.place] <= node.free for node in there)


def test_shares_are_of_whole_nodes_where_they_can_be() -> None:
    there = [Node("A", f"host{n}", 8) for n in range(4)]
    found = deal(there, {"one": 12, "two": 20})
    assert sorted(node.free for node in found["one"]) == [4, 8]
    assert sorted(node.free for node in found["two"]) == [4, 8, 8]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="two has a share of 5, and 4 are left"):
        deal([Node("A", "host", 8)], {"one": 4, "two": 5})


def test_each_plan_is_the_best_within_the_share() -> None:
    rng = random.Random(0)
    there = [Node(kind, f"{kind}{n}", 8) for kind in ("A800", "H100") for n in range(4)]
    asks = {}
    for job, middle in (("short", 300.0), ("long", 6000.0)):
        groups = lengths(rng, 256, middle, 0.7)
        work = StepWork(256, sum(g.generated for g in groups), sum(g.held for g in groups))
        ranges = Served(servers(QWEN_14B, ("A800", "H100")), groups)
        asks[job] = Asks(ranges, Trains(QWEN_14B, work, declared()).ways)
    shares = {"short": 16, "long": 48}
    plans, dealt = allocate_all(asks, there, shares), deal(there, shares)
    for job, plan in plans.items():
        assert plan is not None
        alone = allocate(asks[job].ranges, dealt[job], asks[job].ways(dealt[job]))
        assert plan == alone
        used = plan.training.layout.workers + sum(gang.degree for gang in plan.gangs)
        assert used <= shares[job]
    assert all(plan is None for plan in allocate_all(asks, there, {"short": 1, "long": 0}).values())
