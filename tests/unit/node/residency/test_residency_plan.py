"""Plans of moves between tiers: within the budgets, complete, without needless moves, and cheap."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.api.node import KindUse
from meshrl.common.base.errors import StorageFull
from meshrl.common.state.pool.workers.rows import TensorKind, Tier, TierBytes
from meshrl.services.node.instances.gpu_memory import GpuMemoryFull
from meshrl.services.node.residency.eviction_choice import Eviction, choose_evictions
from meshrl.services.node.residency.residency_plan import (
    KindPlace,
    PlannedMove,
    ResidencySnapshot,
    plan_order,
    plan_prefetch,
    plan_room,
    plan_write_back,
)

KINDS = [str(kind) for kind in TensorKind]
INSTANCES = ["a", "b", "c"]
Key = tuple[str, str]


def place(
    instance: str, kind: str, size: int, where: str = "accelerator", **rest: bool
) -> KindPlace:
    """Return a kind on one tier, or on several: `accelerator memory`."""
    tiers: dict[str, Any] = {f"{tier}_bytes": size for tier in where.split()}
    return KindPlace(instance, kind, size, **tiers, **rest)


def execute(places: dict[Key, KindPlace], move: PlannedMove) -> None:
    """Execute a move as a role process does; it asserts what the process relies on."""
    key = move.instance, move.kind
    at = places[key]
    if move.action == "load":
        places[key] = replace(
            at, accelerator_bytes=at.size_bytes, is_dirty=not (at.memory_bytes or at.disk_bytes)
        )
        return
    assert at.accelerator_bytes == move.size_bytes > 0
    gone = 0 if move.action != "write_back" else at.accelerator_bytes
    if move.action == "drop":
        assert at.can_drop
        places[key] = replace(at, accelerator_bytes=0)
    elif at.is_dirty or not (at.memory_bytes or at.disk_bytes):
        places[key] = replace(
            at,
            accelerator_bytes=gone,
            is_dirty=False,
            memory_bytes=at.size_bytes * (move.tier == Tier.MEMORY),
            disk_bytes=at.size_bytes * (move.tier == Tier.DISK),
        )
    else:
        assert not move.copied_bytes
        places[key] = replace(at, accelerator_bytes=gone)


def check_budgets(snapshot: ResidencySnapshot, places: dict[Key, KindPlace]) -> None:
    now = replace(snapshot, places=list(places.values()))
    for tier in (Tier.ACCELERATOR, Tier.MEMORY, Tier.DISK):
        assert now.free_bytes(tier) >= min(0, snapshot.free_bytes(tier)), tier


def index(snapshot: ResidencySnapshot) -> dict[Key, KindPlace]:
    return {(one.instance, one.kind): one for one in snapshot.places}


@st.composite
def snapshots(draw: st.DrawFn) -> ResidencySnapshot:
    places = []
    for instance, kind in itertools.product(INSTANCES, KINDS):
        if draw(st.booleans()):
            size = draw(st.integers(1, 8))
            on = draw(st.booleans())
            where = "accelerator " * on + draw(st.sampled_from(["", "memory", "disk"]))
            dirty = on and draw(st.booleans())
            places.append(
                place(instance, kind, size, where, is_dirty=dirty, can_drop=draw(st.booleans()))
            )
    used = {
        tier: sum(getattr(one, f"{tier}_bytes") for one in places)
        for tier in ("accelerator", "memory", "disk")
    }
    others = TierBytes(*(draw(st.integers(0, 3)) for _ in range(3)))
    budgets = TierBytes(
        **{
            tier: draw(st.sampled_from([0, 1])) * (used[tier] + 3 + draw(st.integers(0, 12)))
            for tier in used
        }
    )
    names = st.sampled_from(INSTANCES)
    holder = draw(st.sampled_from([*INSTANCES, ""]))
    computes_with_all = draw(st.booleans())
    kinds_in_use = frozenset((holder, kind) for kind in KINDS[: 2 * (not computes_with_all)])
    uses = st.builds(KindUse, names, st.lists(st.sampled_from(KINDS)), st.floats(0, 100))
    return ResidencySnapshot(
        places,
        budgets,
        others,
        frozenset({holder} - {""}) if computes_with_all else frozenset(),
        kinds_in_use,
        draw(st.lists(uses, max_size=5)),
    )


@settings(max_examples=25, deadline=None)
@given(snapshots(), st.sampled_from(INSTANCES), st.sets(st.sampled_from(KINDS)))
def test_plan_of_an_order_loads_all_kinds_within_the_budgets(
    snapshot: ResidencySnapshot, instance: str, kinds: set[str]
) -> None:
    places = index(snapshot)
    requested = [key for key in places if key[0] == instance and (not kinds or key[1] in kinds)]
    try:
        moves = plan_order(snapshot, instance, kinds)
    except GpuMemoryFull:
        staying = sum(
            one.size_bytes if key in requested else one.accelerator_bytes
            for key, one in places.items()
            if key in requested or (snapshot.is_fixed(one) and key[0] != instance)
        )
        assert staying + snapshot.other_bytes.accelerator > snapshot.budgets.accelerator > 0
        return
    except StorageFull:
        assert snapshot.budgets.memory and snapshot.budgets.disk
        return
    for move in moves:
        at = places[move.instance, move.kind]
        assert move.instance == instance or not snapshot.is_fixed(at)
        assert move.action == "load" or (move.instance, move.kind) not in requested
        execute(places, move)
        check_budgets(snapshot, places)
    assert all(places[key].accelerator_bytes == places[key].size_bytes for key in requested)
    assert len({(move.instance, move.kind) for move in moves}) == len(moves)
    evicted = [move.size_bytes for move in moves if move.action != "load"]
    if evicted:  # without any one of them the kinds do not fit
        free = replace(snapshot, places=list(places.values())).free_bytes(Tier.ACCELERATOR)
        assert free < min(evicted)


@settings(max_examples=30, deadline=None)
@given(snapshots())
def test_prefetch_ends_and_displaces_only_what_is_needed_later(
    snapshot: ResidencySnapshot,
) -> None:
    places = index(snapshot)
    for _ in range(len(places) + 1):
        moves = plan_prefetch(replace(snapshot, places=list(places.values())))
        if not moves:
            return
        use_s = snapshot.find_next_use_s(places[moves[-1].instance, moves[-1].kind])
        assert moves[-1].action == "load" and use_s < math.inf
        for move in moves:
            at = places[move.instance, move.kind]
            assert move.action == "load" or not snapshot.is_fixed(at)
            assert move.action == "load" or snapshot.find_next_use_s(at) > use_s
            execute(places, move)
            check_budgets(snapshot, places)
    raise AssertionError("kinds displace each other in turn")


@settings(max_examples=20, deadline=None)
@given(snapshots())
def test_write_back_leaves_kinds_clean_and_within_the_memory_budget(
    snapshot: ResidencySnapshot,
) -> None:
    places = index(snapshot)
    for move in plan_write_back(snapshot):
        assert not snapshot.is_fixed(places[move.instance, move.kind])
        assert places[move.instance, move.kind].is_dirty
        execute(places, move)
        check_budgets(snapshot, places)
        assert not places[move.instance, move.kind].is_dirty
        assert places[move.instance, move.kind].accelerator_bytes


def test_only_kinds_that_must_leave_before_their_use_are_written_back() -> None:
    places = [
        place("a", "parameters", 10),
        place("b", "parameters", 10, is_dirty=True),
        place("b", "gradients", 10, is_dirty=True),
        place("b", "optimizer", 10, "memory"),
    ]
    uses = [KindUse("b", ["parameters"], 1.0), KindUse("b", ["optimizer"], 2.0)]
    late = KindUse("b", ["gradients"], 9.0)
    snapshot = ResidencySnapshot(places, TierBytes(30), TierBytes(), frozenset("a"), expected=uses)
    assert [move.kind for move in plan_write_back(snapshot)] == ["gradients"]
    wide = replace(snapshot, budgets=TierBytes(40), expected=[*uses, late])
    assert plan_write_back(wide) == []
    assert [move.kind for move in plan_write_back(wide, 10)] == ["gradients"]


def test_prefetch_waits_if_the_swap_takes_longer_than_it_saves() -> None:
    places = [place("a", "parameters", 10, is_dirty=True), place("b", "parameters", 10, "memory")]
    rates = {"accelerator>memory": 10.0, "memory>accelerator": 10.0}
    seen = []
    for late_s in (3.9, 4.1):  # load, copy away and load again: 3 s
        uses = [KindUse("b", [], 1.0), KindUse("a", [], late_s)]
        snapshot = ResidencySnapshot(places, TierBytes(10), TierBytes(), expected=uses, rates=rates)
        seen.append([(move.instance, move.action) for move in plan_prefetch(snapshot)])
    assert seen == [[], [("a", "offload"), ("b", "load")]]


options = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 6), st.integers(0, 6)),
    min_size=1,
    max_size=2,
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(options, max_size=5),
    st.integers(0, 30),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_evictions_cost_what_the_best_of_all_choices_costs(
    drawn: list[list[tuple[int, int, int, int]]], needed: int, memory: int, disk: int
) -> None:
    items = [
        [
            Eviction(number, "offload", "", one[0][0], float(cost), memory_bytes, disk_bytes)
            for _, cost, memory_bytes, disk_bytes in one
        ]
        for number, one in enumerate(drawn)
    ]
    costs = [
        sum(one.cost_s for one in choice)
        for picks in itertools.product(*([None, *one] for one in items))
        for choice in [[one for one in picks if one is not None]]
        if sum(one.freed_bytes for one in choice) >= needed
        and sum(one.memory_bytes for one in choice) <= memory
        and sum(one.disk_bytes for one in choice) <= disk
    ]
    found = choose_evictions(items, needed, memory, disk)
    assert (found is None) == (not costs)
    if found is not None:
        assert sum(one.freed_bytes for one in found) >= needed
        assert sum(one.memory_bytes for one in found) <= memory
        assert sum(one.disk_bytes for one in found) <= disk
        assert sum(one.cost_s for one in found) == min(costs)


def test_overdrawn_budget_without_anything_to_evict_needs_no_move() -> None:
    own = [place("a", "parameters", 10), place("a", "optimizer", 10)]
    snapshot = ResidencySnapshot(own, TierBytes(15), TierBytes())
    assert plan_order(snapshot, "a", ()) == []


def test_kinds_leave_by_the_cost_of_their_reload() -> None:
    places = [
        place("a", "parameters", 10, "accelerator memory"),
        place("a", "gradients", 11, can_drop=True),
        place("b", "parameters", 10, is_dirty=True),
        place("b", "optimizer", 10, "accelerator disk"),
        place("c", "parameters", 0, "memory"),
    ]
    rates = {"accelerator>memory": 10.0, "memory>accelerator": 10.0, "disk>accelerator": 1.0}
    seen = []
    for size in (10, 20, 30, 40):
        places[-1] = KindPlace("c", "parameters", size, memory_bytes=size)
        budgets = TierBytes(41, memory=80)  # 10 bytes of memory are free for copies
        snapshot = ResidencySnapshot(places, budgets, TierBytes(memory=60 - size), rates=rates)
        seen.append([(m.instance, m.kind, m.action, m.tier) for m in plan_order(snapshot, "c", ())])
    assert [row[-2] for row in seen] == [
        ("a", "parameters", "offload", "memory"),  # 1 s
        ("b", "parameters", "offload", "memory"),  # 2 s, as it is dirty
        ("b", "optimizer", "offload", "disk"),  # 10 s
        ("a", "gradients", "drop", ""),  # 11 s, as memory has no room for both
    ]


def test_kinds_of_the_next_instance_leave_last() -> None:
    places = [
        place("a", "parameters", 10, "accelerator memory"),
        place("b", "parameters", 10, is_dirty=True),
        place("c", "parameters", 10, "memory"),
    ]
    uses = [KindUse("a", [], 2.0), KindUse("b", [], 60.0)]
    snapshot = ResidencySnapshot(places, TierBytes(20), TierBytes(), expected=uses)
    assert [move.instance for move in plan_order(snapshot, "c", ())] == ["b", "c"]
    uses = [KindUse("b", [], 2.0), KindUse("a", [], 60.0)]
    assert [m.instance for m in plan_order(replace(snapshot, expected=uses), "c", ())] == ["a", "c"]


def test_full_memory_sends_kinds_to_disk_and_a_full_disk_is_reported_with_its_figures() -> None:
    places = [place("a", "parameters", 10, is_dirty=True), place("b", "parameters", 10, "memory")]
    snapshot = ResidencySnapshot(places, TierBytes(15, 15), TierBytes())
    assert [move.tier for move in plan_order(snapshot, "b", ())] == ["disk", ""]
    with pytest.raises(StorageFull, match=r"5 more bytes .* 5 bytes of memory and 9 bytes of disk"):
        plan_order(replace(snapshot, budgets=TierBytes(15, 15, 9)), "b", ())
    with pytest.raises(GpuMemoryFull, match="at most 5 can be free"):
        plan_order(replace(snapshot, fixed_instances=frozenset("a")), "b", ())


def test_room_for_a_start_needs_no_moves_while_it_is_free() -> None:
    places = [place("a", "parameters", 10, "accelerator memory")]
    snapshot = ResidencySnapshot(places, TierBytes(20), TierBytes())
    assert plan_room(snapshot, "b", 10) == []
    assert [move.action for move in plan_room(snapshot, "b", 11)] == ["offload"]
