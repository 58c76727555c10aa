"""Libra's released search, which serves as a baseline for plans."""

from __future__ import annotations

from loadtests.layouts import released
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.services.planner.layouts.length_groups import make_uniform_group
from meshrl.services.planner.layouts.range_costs import GangServer


def test_layouts_are_the_partitions_into_tensor_parallel_sizes() -> None:
    assert released.layouts(4) == [[4], [2, 2], [2, 1, 1], [1, 1, 1, 1]]
    assert len(released.layouts(8)) == 10
    assert all(len(layout) <= 32 for layout in released.layouts(64))
    assert len(released.layouts(96)) == 500


def test_longest_groups_go_first_to_the_server_that_finishes_first() -> None:
    slow = GangServer(DecodeCurve("A", 1, 2.0), 1e6)
    fast = GangServer(DecodeCurve("A", 2, 1.0), 1e6)
    groups = [make_uniform_group(1, 0, length) for length in (10, 40, 30, 20)]
    found = released.longest_first([slow, fast], groups)
    # 40 to the fast server; 30 to the slow one (30 / 1 < 70 / 2); 20 and 10 to the fast one.
    assert [[group.max_generated_tokens for group in mine] for mine in found] == [
        [30],
        [40, 20, 10],
    ]
    assert released.best_s({1: slow, 2: fast, 4: fast, 8: fast}, 2, groups) == 40.0
