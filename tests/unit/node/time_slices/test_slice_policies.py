"""Policies of time slices: order, quantum, starvation cap, and the comparison with every order."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.sharing.policies import compare_with_oracle
from loadtests.sharing.slice_simulation import (
    Simulation,
    Source,
    Switches,
    find_best_mean_response_s,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.node.slices.exhaustive import Exhaustive
from meshrl.services.node.slices.hrrs import HighestResponseRatio
from meshrl.services.node.slices.policies import DEFAULT_POLICY, POLICIES
from meshrl.services.node.slices.slice_policy import (
    Candidate,
    GangState,
    SlicePolicy,
    SliceRequest,
    Tenure,
)
from meshrl.services.node.slices.slice_queue import (
    ANTICIPATION_CAP_S,
    ANTICIPATION_SHARE,
    Decision,
    SliceQueue,
)

NOW = 100.0
RANK = frozenset({0})


def make_request(
    instance: str, service_s: float = 1.0, number: int = 0, function: str = "train_step"
) -> SliceRequest:
    ticket = f"{instance}/{number}"
    return SliceRequest(ticket, instance, 1, "i", number, instance, function, service_s, RANK)


def make_candidate(
    instance: str, waited_s: float, service_s: float, switch_s: float = 0.0
) -> Candidate:
    return Candidate(make_request(instance), NOW - waited_s, service_s, switch_s)


def order(
    policy: SlicePolicy, *candidates: Candidate, tenure: Tenure | None = None, **last: int
) -> list[tuple[str, str]]:
    tenures: Mapping[int, Tenure] = {} if tenure is None else {0: tenure}
    arrived = sorted(candidates, key=lambda one: one.requested_at)
    ranked = policy.rank_candidates(GangState(NOW, arrived, tenures, last))
    assert sorted(one.candidate.request.ticket for one in ranked) == sorted(
        one.request.ticket for one in candidates
    )
    return [(one.candidate.request.instance, one.reason) for one in ranked]


LONG = make_candidate("long", 10.0, 10.0)  # ratio 2
SHORT = make_candidate("short", 3.0, 1.0)  # ratio 4
DEAR = make_candidate("dear", 3.0, 1.0, 3.0)  # ratio 1.75


def test_mesh_setting_names_every_policy() -> None:
    assert PoolSettings().slice_policy == DEFAULT_POLICY
    assert set(get_args(get_type_hints(PoolSettings)["slice_policy"])) == POLICIES.keys()


def test_response_ratio_counts_wait_service_and_switch() -> None:
    assert order(HighestResponseRatio(), LONG, SHORT, DEAR) == [
        (name, "response ratio") for name in ("short", "long", "dear")
    ]


def test_fifo_serves_the_oldest_and_round_robin_the_one_served_longest_ago() -> None:
    candidates = (LONG, SHORT, make_candidate("new", 0.0, 1.0))
    fifo = order(POLICIES["fifo"], *candidates)
    assert [name for name, _ in fifo] == ["long", "short", "new"]
    turns = order(POLICIES["round_robin"], *candidates, long=3, short=1, new=2)
    assert [name for name, _ in turns] == ["short", "new", "long"]


def test_last_holder_keeps_its_ranks_for_a_multiple_of_the_next_switch() -> None:
    policy = HighestResponseRatio(quantum_switches=2.0)
    rival = make_candidate("rival", 20.0, 1.0, 3.0)
    holder = make_candidate("holder", 0.0, 7.0)
    within = order(policy, holder, rival, tenure=Tenure("holder", 5.9))
    assert within[0] == ("holder", "quantum")
    beyond = order(policy, holder, rival, tenure=Tenure("holder", 6.0))
    assert beyond[0] == ("rival", "response ratio")
    free = order(policy, holder, make_candidate("rival", 20.0, 1.0), tenure=Tenure("holder", 0.0))
    assert free[0] == ("rival", "response ratio")  # a switch without a cost needs no quantum


def test_short_slices_of_the_last_holder_delay_a_request_by_a_share_of_its_cost() -> None:
    rival = make_candidate("rival", 20.0, 6.0, 0.1)  # 0.61 s, and 0.2 s
    short = make_candidate("holder", 0.0, 0.5)
    first = order(HighestResponseRatio(), short, rival, tenure=Tenure("holder", 6.0))
    assert first[0] == ("holder", "short slice")
    second = order(HighestResponseRatio(), short, rival, tenure=Tenure("holder", 6.5, 0.5))
    assert second[0] == ("rival", "response ratio")


def test_exhaustive_policy_keeps_the_last_holder_until_another_is_overdue() -> None:
    holder = make_candidate("holder", 0.0, 1.0)
    tenure = Tenure("holder", 1000.0)
    first = order(Exhaustive(cap_s=30.0), holder, LONG, tenure=tenure)
    assert first == [("holder", "last holder"), ("long", "oldest request")]
    overdue = make_candidate("overdue", 30.1, 1.0)
    second = order(Exhaustive(cap_s=30.0), holder, LONG, overdue, tenure=tenure)
    assert second[0] == ("overdue", "starvation cap")


def test_requests_that_would_wait_past_the_cap_go_oldest_first() -> None:
    policy = HighestResponseRatio(cap_s=20.0)
    # in the order of requests `late` would wait for 6 s so far and 15 s for `long`
    older = make_candidate("older", 7.0, 15.0)
    late = make_candidate("late", 6.0, 1.0)
    new = make_candidate("new", 5.0, 0.1)
    assert order(policy, older, late, new) == [
        ("older", "starvation cap"),
        ("late", "starvation cap"),
        ("new", "starvation cap"),
    ]
    assert order(HighestResponseRatio(cap_s=22.0), older, late, new)[0][0] == "new"


computations = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.floats(0.05, 8.0)), min_size=1, max_size=12
)


@settings(max_examples=40)
@given(st.lists(computations, min_size=1, max_size=4), st.integers(0, 2**16))
def test_no_request_waits_longer_than_the_cap_and_one_slice(
    drawn: list[list[tuple[float, float]]], seed: int
) -> None:
    draw = random.Random(seed)
    sources = [Source(f"i{number}", one) for number, one in enumerate(drawn)]
    load_s = {source.instance: draw.uniform(0.0, 2.0) for source in sources}
    switches = Switches(load_s, {name: draw.uniform(0.0, 1.0) for name in load_s})
    longest = {one.instance: max(s for _, s in one.computations) for one in sources}
    switch_s = max(load_s.values()) + max(switches.offload_s.values())
    # the slices of all, one after the other, fit into the cap
    cap_s = sum(longest.values()) + len(sources) * switch_s
    for policy in (HighestResponseRatio(cap_s=cap_s), Exhaustive(cap_s=cap_s)):
        outcome = Simulation(policy, sources, switches).run()
        assert len(outcome.waits) == sum(len(one.computations) for one in sources)
        slack_s = len(sources) * switch_s + ANTICIPATION_CAP_S
        assert max(outcome.waits) <= cap_s + max(longest.values()) + slack_s + 1e-6


@pytest.mark.parametrize("name", POLICIES)
def test_gang_idles_beside_a_request_only_for_the_last_holders_next_one(name: str) -> None:
    draw = random.Random(7)
    for _ in range(20):
        sources = [
            Source(f"i{n}", [(draw.uniform(0.0, 3.0), draw.uniform(0.1, 3.0)) for _ in range(8)])
            for n in range(3)
        ]
        costs = {source.instance: draw.uniform(0.1, 2.0) for source in sources}
        free = Switches(dict.fromkeys(costs, 0.0), dict.fromkeys(costs, 0.0))
        assert Simulation(POLICIES[name], sources, free).run().idle_beside_waiting == 0.0
        outcome = Simulation(POLICIES[name], sources, Switches(costs, costs)).run()
        assert outcome.idle_beside_waiting <= ANTICIPATION_SHARE * outcome.switching + 1e-9


@pytest.mark.parametrize("name", POLICIES)
def test_requests_of_single_ranks_do_not_starve_one_for_all_ranks(name: str) -> None:
    one_rank = [
        Source(f"small{rank}", [(0.01, 0.9 + 0.2 * rank)] * 200, frozenset({rank}))
        for rank in (0, 1)
    ]
    whole = Source("whole", [(1.0, 4.0)] * 10, frozenset({0, 1}))
    names = [source.instance for source in (*one_rank, whole)]
    free = Switches(dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0))
    policy = {"exhaustive": Exhaustive(cap_s=20.0)}.get(name, POLICIES[name])
    outcome = Simulation(policy, [*one_rank, whole], free).run()
    assert len(outcome.waits) == 410
    assert max(outcome.waits) <= 20.0 + 4.0


def test_response_ratio_is_close_to_the_best_of_every_order() -> None:
    ratios = compare_with_oracle(POLICIES["hrrs"], 40, seed=1)
    assert min(ratios) >= 1.0 - 1e-9  # no policy is better than the best order
    assert statistics.median(ratios) <= 1.10
    assert statistics.median(compare_with_oracle(POLICIES["fifo"], 40, seed=1)) > 1.10


def test_best_order_may_wait_for_a_short_request() -> None:
    sources = [Source("a", [(0.0, 10.0)]), Source("b", [(0.1, 1.0)])]
    none = Switches({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0})
    # b at 0.1, then a at 1.1
    assert find_best_mean_response_s(sources, none) == pytest.approx((1.0 + 11.1) / 2)


def make_queue(costs: Mapping[str, float], record: list[Decision]) -> SliceQueue:
    return SliceQueue(
        HighestResponseRatio(),
        estimate_switch_s=lambda request: costs[request.instance],
        record=record.append,
    )


def test_ranks_stay_free_for_the_last_holders_prompt_request() -> None:
    costs = {"a": 0.0, "b": 4.0}
    decisions: list[Decision] = []
    queue = make_queue(costs, decisions)
    for number, (at, gap_s) in enumerate([(0.0, 0.0), (1.0, 0.1)]):
        request = make_request("a", number=number)
        queue.enqueue(request, at + gap_s)
        [chosen] = queue.choose_waiting(at + gap_s)
        assert queue.begin(chosen.request.ticket, at + gap_s).request == request
        if number == 0:
            queue.enqueue(make_request("b"), 0.5)
        assert queue.choose_waiting(at + 0.5) == []
        queue.release(request.ticket, at + 1.0)
        assert queue.choose_waiting(at + 1.0) == []  # for 0.1 of a switch
        assert queue.anticipates_until == pytest.approx(at + 1.4)
    assert [one.chosen.reason for one in decisions] == ["response ratio", "quantum"]
    [chosen] = queue.choose_waiting(2.41)  # the next request has not come
    assert chosen.request.instance == "b" and chosen.switch_s == 4.0


def test_ranks_pass_on_at_once_after_a_late_request_or_a_used_quantum() -> None:
    queue = make_queue({"a": 0.0, "b": 4.0}, [])
    for number, at in enumerate([0.0, 3.0]):  # 2 s after the release before
        queue.enqueue(make_request("a", number=number), at)
        [chosen] = queue.choose_waiting(at)
        queue.begin(chosen.request.ticket, at)
        queue.release(chosen.request.ticket, at + 1.0)
    queue.enqueue(make_request("b"), 4.0)
    assert [one.request.instance for one in queue.choose_waiting(4.0)] == ["b"]


def test_ranks_stay_free_for_a_short_slice_that_is_expected_at_once() -> None:
    queue = make_queue({"a": 0.0, "b": 0.1}, [])
    at = 0.0
    for number, (function, slice_s) in enumerate([("train_step", 6.0), ("sync", 0.3)] * 2):
        if number == 3:
            queue.enqueue(make_request("b", 6.0), at)
            assert queue.choose_waiting(at) == []
            assert queue.anticipates_until == pytest.approx(at + 0.08)
        at += 0.02
        queue.enqueue(make_request("a", slice_s, number, function), at)
        [chosen] = queue.choose_waiting(at)
        queue.begin(chosen.request.ticket, at)
        at += slice_s
        queue.release(chosen.request.ticket, at)
    assert [one.request.instance for one in queue.choose_waiting(at)] == ["b"]


def test_holder_learns_the_rest_of_its_quantum() -> None:
    queue = make_queue({"a": 0.0, "b": 2.0}, [])
    holder = make_request("a")
    queue.enqueue(holder, 0.0)
    queue.choose_waiting(0.0)
    queue.begin(holder.ticket, 0.0)
    assert queue.compute_quantum_s(holder, 0.0) == 0.0  # no other instance waits
    queue.enqueue(make_request("b"), 0.0)
    assert queue.compute_quantum_s(holder, 0.0) == 4.0


def test_next_holder_is_the_best_waiting_one_or_the_one_expected_first() -> None:
    queue = make_queue({"a": 0.0, "b": 0.0, "c": 0.0}, [])
    for at, name in enumerate("abcab"):
        request = make_request(name, number=at)
        queue.enqueue(request, float(at))
        queue.choose_waiting(float(at))
        queue.begin(request.ticket, float(at))
        queue.release(request.ticket, at + 0.5)
    holder = make_request("c", number=9)
    queue.enqueue(holder, 5.0)
    queue.choose_waiting(5.0)
    queue.begin(holder.ticket, 5.0)
    expected = queue.predict_next(holder, 5.0)
    assert expected is not None and expected.instance == "a"  # at 3.5 + 2.5 s
    queue.enqueue(make_request("b", number=10), 5.1)
    waiting = queue.predict_next(holder, 5.1)
    assert waiting is not None and waiting.instance == "b"
