"""Policy of time slices: no starvation, exclusive ranks, all ranks or none, deadlines that kill."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.node.slices.policies import POLICIES
from meshrl.services.node.slices.round_robin import RoundRobin
from meshrl.services.node.slices.slice_policy import SliceRequest
from meshrl.services.node.slices.slice_queue import SliceGrant, SliceLimits, SliceQueue

LEASES = SliceLimits(factor=2.0, floor_s=1.0, cap_s=10.0, default_s=5.0)


def make_request(instance: str, ticket: str, ranks: set[int], **about: object) -> SliceRequest:
    return SliceRequest(
        ticket,
        instance,
        int(about.get("generation", 1)),  # type: ignore[call-overload]
        str(about.get("incarnation", "i")),
        0,
        f"engine/{instance}",
        "generate",
        float(about.get("estimate_s", 1.0)),  # type: ignore[arg-type]
        frozenset(ranks),
    )


def grant_waiting(order: SliceQueue, now: float) -> list[SliceGrant]:
    return [order.begin(one.request.ticket, now) for one in order.choose_waiting(now)]


def list_granted_ranks(order: SliceQueue) -> list[int]:
    return [rank for held in order.grants for rank in held.request.ranks]


def test_instances_without_common_ranks_hold_slices_concurrently() -> None:
    order = SliceQueue(RoundRobin(), LEASES)
    order.enqueue(make_request("a", "1", {0}), 0.0)
    order.enqueue(make_request("b", "2", {1}), 0.0)
    order.enqueue(make_request("c", "3", {0, 1}), 0.0)
    assert [held.request.instance for held in grant_waiting(order, 0.0)] == ["a", "b"]
    assert order.release("1", 0.0)
    assert grant_waiting(order, 0.0) == []  # all of its ranks or none
    assert order.release("2", 0.0)
    assert [held.request.ranks for held in grant_waiting(order, 0.0)] == [frozenset({0, 1})]


def test_single_rank_requests_do_not_starve_a_request_for_all_ranks() -> None:
    order = SliceQueue(RoundRobin(), LEASES)
    order.enqueue(make_request("a", "a0", {0}), 0.0)
    grant_waiting(order, 0.0)
    order.enqueue(make_request("whole", "w", {0, 1}), 0.0)
    order.enqueue(make_request("b", "b0", {1}), 0.0)
    assert grant_waiting(order, 0.0) == []  # rank 1 is reserved for the earlier request
    order.release("a0", 0.0)
    order.enqueue(make_request("a", "a1", {0}), 0.0)
    assert [held.request.instance for held in grant_waiting(order, 0.0)] == ["whole"]


def test_deadline_follows_the_estimate_between_floor_and_cap() -> None:
    assert [LEASES.compute_limit_s(e) for e in (0.0, 0.1, 3.0, 90.0)] == [5.0, 1.0, 6.0, 10.0]
    firsts = [LEASES.compute_limit_s(e, is_first=True) for e in (0.0, 0.1, 3.0, 90.0)]
    assert firsts == [5.0, 5.0, 6.0, 10.0]


def test_overdue_holder_keeps_its_ranks_until_it_is_dead() -> None:
    order = SliceQueue(RoundRobin(), LEASES)
    order.enqueue(make_request("a", "1", {0}), 0.0)
    order.enqueue(make_request("b", "2", {0}), 0.0)
    (held,) = grant_waiting(order, 0.0)
    assert order.next_deadline() == held.deadline == 2.0
    assert order.take_overdue(1.9) == []
    assert order.take_overdue(2.0) == [held]
    assert order.take_overdue(3.0) == []  # reported once
    assert order.next_deadline() == math.inf
    assert order.get_grant("1") is None
    assert not order.release("1", 0.0)  # a live holder may still compute
    assert grant_waiting(order, 3.0) == []
    order.free_killed(held)
    assert [held.request.instance for held in grant_waiting(order, 3.0)] == ["b"]


def test_new_process_or_generation_voids_earlier_requests_and_grants() -> None:
    for about in ({"incarnation": "next"}, {"generation": 2}):
        order = SliceQueue(RoundRobin(), LEASES)
        order.enqueue(make_request("a", "1", {0}), 0.0)
        grant_waiting(order, 0.0)
        order.enqueue(make_request("a", "2", {0}, **about), 0.0)
        assert [held.request.ticket for held in grant_waiting(order, 0.0)] == ["2"]


def test_removed_instance_loses_its_requests_and_gets_a_short_deadline() -> None:
    order = SliceQueue(RoundRobin(), LEASES)
    for instance in "abc":
        order.enqueue(make_request(instance, instance, {0}, estimate_s=4.0), 0.0)
    grant_waiting(order, 0.0)
    order.retain_instances({"a": 1, "c": 1}, 3.0)
    assert [held.deadline for held in order.grants] == [8.0]
    assert [waits.instance for waits in order.waiting] == ["c"]
    order.retain_instances({"a": 2, "c": 1}, 3.0)
    assert grant_waiting(order, 0.0) == []  # the holder may still compute
    (late,) = order.take_overdue(3.0)
    order.free_killed(late)
    assert [held.request.instance for held in grant_waiting(order, 3.0)] == ["c"]


def test_dead_instance_loses_its_grants_and_requests() -> None:
    order = SliceQueue(RoundRobin(), LEASES)
    order.enqueue(make_request("a", "1", {0}), 0.0)
    grant_waiting(order, 0.0)
    order.enqueue(make_request("b", "2", {0}), 0.0)
    order.drop_instance("a")
    assert [held.request.instance for held in grant_waiting(order, 0.0)] == ["b"]


def test_repeated_request_counts_once() -> None:
    order = SliceQueue(RoundRobin(), LEASES)
    for _ in range(2):
        order.enqueue(make_request("a", "1", {0}), 0.0)
    (held,) = grant_waiting(order, 0.0)
    order.enqueue(make_request("a", "1", {0}), 0.0)
    assert order.waiting == ()
    assert order.get_grant("1") == held


RESIDENTS = {"a": {0}, "b": {1}, "c": {0, 1}, "d": {2}, "e": {0, 1, 2}, "f": {1, 2}}
moves = st.lists(
    st.tuples(st.sampled_from(["ask", "back", "tick", "gone"]), st.sampled_from(sorted(RESIDENTS))),
    max_size=60,
)


@given(moves, st.sampled_from(sorted(POLICIES)))
def test_random_schedule_keeps_ranks_exclusive_and_overtakes_at_most_once(
    steps: list[tuple[str, str]], policy: str
) -> None:
    order = SliceQueue(POLICIES[policy], LEASES)
    now, count = 0.0, 0
    overtaken: dict[
        str, dict[str, int]
    ] = {}  # waiting instance -> number of grants of each other instance
    dying: list[SliceGrant] = []
    for what, instance in steps:
        mine = [a.ticket for a in order.waiting if a.instance == instance]
        mine += [h.request.ticket for h in order.grants if h.request.instance == instance]
        if what == "ask" and not mine:
            count += 1
            order.enqueue(make_request(instance, str(count), RESIDENTS[instance]), 0.0)
            overtaken[instance] = {}
        elif what == "back":
            for ticket in mine:
                if order.release(ticket, 0.0):
                    overtaken.pop(instance, None)
        elif what == "tick":
            for held in dying:
                order.free_killed(held)
            now += 1.5
            dying = order.take_overdue(now)
            assert all(held.deadline <= now for held in dying)
        elif what == "gone":
            order.drop_instance(instance)
            overtaken.pop(instance, None)
        for held in grant_waiting(order, now):
            winner = held.request.instance
            assert held.request.ranks == RESIDENTS[winner]
            overtaken.pop(winner, None)
            for waits, counts in overtaken.items():
                if RESIDENTS[waits] & RESIDENTS[winner]:
                    counts[winner] = counts.get(winner, 0) + 1
                    assert counts[winner] == 1 or policy != "round_robin"
        taken = list_granted_ranks(order)
        assert len(taken) == len(set(taken))
        blocked = {rank for held in order.grants for rank in held.request.ranks}
        assert blocked or not order.waiting  # with all ranks free, no request waits
