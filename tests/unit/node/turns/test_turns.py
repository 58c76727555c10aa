"""Whose turn it is: nobody starves, nobody shares a rank, all ranks or none, deadlines kill."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.node.residents.turns import GrantedTurn, Leases, TurnOrder, TurnRequest

LEASES = Leases(factor=2.0, floor_s=1.0, cap_s=10.0, unknown_s=5.0)


def asked(resident: str, ticket: str, ranks: set[int], **about: object) -> TurnRequest:
    return TurnRequest(
        ticket,
        resident,
        int(about.get("generation", 1)),  # type: ignore[call-overload]
        str(about.get("incarnation", "i")),
        0,
        f"engine/{resident}",
        "generate",
        float(about.get("estimate_s", 1.0)),  # type: ignore[arg-type]
        frozenset(ranks),
    )


def occupied(order: TurnOrder) -> list[int]:
    return [rank for held in order.held for rank in held.asked.ranks]


def test_two_that_share_no_rank_hold_turns_at_once() -> None:
    order = TurnOrder(LEASES)
    order.ask(asked("a", "1", {0}), 0.0)
    order.ask(asked("b", "2", {1}), 0.0)
    order.ask(asked("c", "3", {0, 1}), 0.0)
    assert [held.asked.resident for held in order.grant(0.0)] == ["a", "b"]
    assert order.give_back("1")
    assert order.grant(0.0) == []  # all of its ranks or none
    assert order.give_back("2")
    assert [held.asked.ranks for held in order.grant(0.0)] == [frozenset({0, 1})]


def test_those_that_need_one_rank_never_starve_one_that_needs_all() -> None:
    order = TurnOrder(LEASES)
    order.ask(asked("a", "a0", {0}), 0.0)
    order.grant(0.0)
    order.ask(asked("whole", "w", {0, 1}), 0.0)
    order.ask(asked("b", "b0", {1}), 0.0)
    assert order.grant(0.0) == []  # rank 1 is kept for who was there before
    order.give_back("a0")
    order.ask(asked("a", "a1", {0}), 0.0)
    assert [held.asked.resident for held in order.grant(0.0)] == ["whole"]


def test_a_deadline_follows_the_estimate_between_a_floor_and_a_cap() -> None:
    assert [LEASES.lasts_s(e) for e in (0.0, 0.1, 3.0, 90.0)] == [5.0, 1.0, 6.0, 10.0]


def test_an_overdue_holder_keeps_its_ranks_until_it_is_dead() -> None:
    order = TurnOrder(LEASES)
    order.ask(asked("a", "1", {0}), 0.0)
    order.ask(asked("b", "2", {0}), 0.0)
    (held,) = order.grant(0.0)
    assert order.due() == held.until == 2.0
    assert order.overdue(1.9) == []
    assert order.overdue(2.0) == [held]
    assert order.overdue(3.0) == []  # told once
    assert order.due() == math.inf
    assert order.holds("1") is None
    assert not order.give_back("1")  # it may do anything as long as it lives
    assert order.grant(3.0) == []
    order.dead(held)
    assert [held.asked.resident for held in order.grant(3.0)] == ["b"]


def test_another_process_or_generation_of_a_resident_voids_what_the_old_one_had() -> None:
    for about in ({"incarnation": "next"}, {"generation": 2}):
        order = TurnOrder(LEASES)
        order.ask(asked("a", "1", {0}), 0.0)
        order.grant(0.0)
        order.ask(asked("a", "2", {0}, **about), 0.0)
        assert [held.asked.ticket for held in order.grant(0.0)] == ["2"]


def test_a_resident_that_is_none_any_more_waits_for_nothing_and_must_end_its_piece() -> None:
    order = TurnOrder(LEASES)
    for resident in "abc":
        order.ask(asked(resident, resident, {0}, estimate_s=4.0), 0.0)
    order.grant(0.0)
    order.keep({"a": 1, "c": 1}, 3.0)
    assert [held.until for held in order.held] == [8.0]
    assert [waits.resident for waits in order.waiting] == ["c"]
    order.keep({"a": 2, "c": 1}, 3.0)
    assert order.grant(0.0) == []  # it may still be computing
    (late,) = order.overdue(3.0)
    order.dead(late)
    assert [held.asked.resident for held in order.grant(3.0)] == ["c"]


def test_a_resident_without_a_process_holds_and_wants_nothing() -> None:
    order = TurnOrder(LEASES)
    order.ask(asked("a", "1", {0}), 0.0)
    order.grant(0.0)
    order.ask(asked("b", "2", {0}), 0.0)
    order.gone("a")
    assert [held.asked.resident for held in order.grant(0.0)] == ["b"]


def test_asking_again_for_the_same_turn_is_asking_once() -> None:
    order = TurnOrder(LEASES)
    for _ in range(2):
        order.ask(asked("a", "1", {0}), 0.0)
    (held,) = order.grant(0.0)
    order.ask(asked("a", "1", {0}), 0.0)
    assert order.waiting == ()
    assert order.holds("1") == held


RESIDENTS = {"a": {0}, "b": {1}, "c": {0, 1}, "d": {2}, "e": {0, 1, 2}, "f": {1, 2}}
moves = st.lists(
    st.tuples(st.sampled_from(["ask", "back", "tick", "gone"]), st.sampled_from(sorted(RESIDENTS))),
    max_size=60,
)


@given(moves)
def test_whatever_happens_no_rank_has_two_and_nobody_is_overtaken_twice(
    steps: list[tuple[str, str]],
) -> None:
    order = TurnOrder(LEASES)
    now, count = 0.0, 0
    overtaken: dict[str, dict[str, int]] = {}  # who waits -> how often each other was granted
    dying: list[GrantedTurn] = []
    for what, resident in steps:
        mine = [a.ticket for a in order.waiting if a.resident == resident]
        mine += [h.asked.ticket for h in order.held if h.asked.resident == resident]
        if what == "ask" and not mine:
            count += 1
            order.ask(asked(resident, str(count), RESIDENTS[resident]), 0.0)
            overtaken[resident] = {}
        elif what == "back":
            for ticket in mine:
                if order.give_back(ticket):
                    overtaken.pop(resident, None)
        elif what == "tick":
            for held in dying:
                order.dead(held)
            now += 1.5
            dying = order.overdue(now)
            assert all(held.until <= now for held in dying)
        elif what == "gone":
            order.gone(resident)
            overtaken.pop(resident, None)
        for held in order.grant(now):
            winner = held.asked.resident
            assert held.asked.ranks == RESIDENTS[winner]
            overtaken.pop(winner, None)
            for waits, counts in overtaken.items():
                if RESIDENTS[waits] & RESIDENTS[winner]:
                    counts[winner] = counts.get(winner, 0) + 1
                    assert counts[winner] == 1
        taken = occupied(order)
        assert len(taken) == len(set(taken))
        blocked = {rank for held in order.held for rank in held.asked.ranks}
        assert blocked or not order.waiting  # with all ranks free nobody waits
