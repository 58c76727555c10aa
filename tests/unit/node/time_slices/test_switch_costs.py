"""Costs of switches: what leaves and loads, from and to which tier, and the decisions by them."""

from __future__ import annotations

from dataclasses import replace

from meshrl.common.api.node import InstanceResidency, ResidencyState
from meshrl.common.state.pool.workers.rows import Tier
from meshrl.services.node.slices.hrrs import HighestResponseRatio
from meshrl.services.node.slices.slice_queue import Decision, SliceQueue
from meshrl.services.node.slices.switch_costs import (
    PRIOR_DISK_SHARE,
    PRIOR_RATE,
    estimate_switch_s,
    is_fully_resident,
)
from tests.unit.node.time_slices.test_preparation import LOAD, OFFLOAD, SIZE, describe
from tests.unit.node.time_slices.test_slice_policies import make_request


def test_switch_costs_what_must_leave_and_load_at_measured_rates() -> None:
    states = [describe(SIZE, a=SIZE, b=0), describe(2 * SIZE, a=SIZE, b=0)]
    assert [estimate_switch_s("b", [], [state]) for state in states] == [20.0, 10.0]
    assert estimate_switch_s("b", [], states) == 20.0  # the slower worker
    assert estimate_switch_s("a", [], states) == 0.0
    assert estimate_switch_s("unknown", [], states) == 0.0
    assert [is_fully_resident(state) for state in states] == [False, False]
    assert is_fully_resident(describe(0, a=SIZE))


def test_switch_costs_only_requested_kinds_less_what_is_prefetched_or_has_a_copy() -> None:
    sizes = {"parameters": 40, "optimizer": 80}
    own = InstanceResidency("b", 1, {"parameters": 30}, sizes, [])
    other = InstanceResidency("a", 1, sizes, sizes, ["parameters"])
    state = ResidencyState(150, [own, other], {LOAD: 10.0, OFFLOAD: 5.0})
    assert estimate_switch_s("b", ["parameters"], [state]) == 1.0  # 10 bytes, which fit
    assert estimate_switch_s("b", [], [state]) == 9.0 + 10 / 5.0  # the optimizer of `a` has a copy
    dirty = replace(other, dirty_kinds=list(sizes))
    state = replace(state, instances=[own, dirty])
    assert estimate_switch_s("b", [], [state]) == 9.0 + 90 / 5.0
    assert estimate_switch_s("b", [], [replace(state, rates={})]) == (90 + 90) / PRIOR_RATE


def test_switch_costs_the_disk_for_cold_kinds_and_for_copies_beyond_the_memory() -> None:
    sizes = {"parameters": 40, "optimizer": 80}
    warm = InstanceResidency("b", 1, {}, sizes, [], memory_bytes=sizes)
    cold = replace(warm, memory_bytes={"parameters": 40}, disk_bytes=sizes)
    dirty = InstanceResidency("a", 1, sizes, sizes, [*sizes], {"parameters": 40})
    rates = {LOAD: 10.0, OFFLOAD: 5.0, "disk>accelerator": 2.0}
    state = ResidencyState(120, [warm, dirty], rates)
    assert estimate_switch_s("b", [], [state]) == 12.0 + 120 / 5.0
    state = replace(state, instances=[cold, dirty])
    assert estimate_switch_s("b", [], [state]) == 4.0 + 80 / 2.0 + 120 / 5.0
    assert estimate_switch_s("b", ["parameters"], [state]) == 4.0 + 40 / 5.0  # also in memory
    state = replace(state, memory_room=50)  # and 40 bytes in place of an outdated copy
    to_disk_s = 30 / (5.0 * PRIOR_DISK_SHARE)
    assert estimate_switch_s("b", [], [state]) == 4.0 + 80 / 2.0 + 90 / 5.0 + to_disk_s


def decide(tier_of_a: Tier) -> tuple[SliceQueue, Decision]:
    """Decide between two instances of 10 bytes; the copy of `b` is in memory."""
    sizes = {"parameters": 10}
    copies = {"memory_bytes": sizes} if tier_of_a == Tier.MEMORY else {"disk_bytes": sizes}
    state = ResidencyState(
        SIZE,
        [
            InstanceResidency("a", 1, {}, sizes, [], **copies),
            InstanceResidency("b", 1, {}, sizes, [], memory_bytes=sizes),
        ],
        {LOAD: 10.0, "disk>accelerator": 4.0},
    )
    decisions: list[Decision] = []
    queue = SliceQueue(
        HighestResponseRatio(),
        estimate_switch_s=lambda one: estimate_switch_s(one.instance, one.kinds, [state]),
        record=decisions.append,
    )
    for name in "ab":
        queue.enqueue(make_request(name), 0.0)
    queue.choose_waiting(4.0)
    return queue, decisions[0]


def test_cold_candidate_loses_to_a_warm_one_that_differs_only_by_its_tier() -> None:
    figures = {}
    for tier in (Tier.MEMORY, Tier.DISK):
        queue, decision = decide(tier)
        chosen = decision.chosen.candidate.request
        ranked = [
            (one.candidate.request.instance, one.candidate.switch_s, one.score)
            for one in decision.ranked
        ]
        figures[tier] = chosen.instance, ranked, queue.compute_quantum_s(chosen, 4.0)
    # ratios of (wait + service + switch) / (service + switch), and quanta of two switches
    warm, cold = (4.0 + 1.0 + 1.0) / (1.0 + 1.0), (4.0 + 1.0 + 2.5) / (1.0 + 2.5)
    assert figures[Tier.MEMORY] == ("a", [("a", 1.0, warm), ("b", 1.0, warm)], 2.0)
    assert figures[Tier.DISK] == ("b", [("b", 1.0, warm), ("a", 2.5, cold)], 5.0)
