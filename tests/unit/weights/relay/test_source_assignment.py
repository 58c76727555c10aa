"""Assignment of chunks to sources, in virtual time and compared with all possible choices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.services.weights.tracker import (
    DOUBT_DURATION_S,
    DOWNLOADER_TIMEOUT_S,
    HOLDER_MAX_AGE_S,
    MAX_SOURCE_COPIES,
    MAX_UPLOADS_PER_HOST,
    ChunkSwarm,
    assign_sources,
)
from tests.unit.weights.relay.swarm_simulation import LINK, SOURCE, World

BOUND_S = 32 * (1 << 20) / LINK  # a version of 32 MiB over one link


@pytest.mark.parametrize("hosts", [1, 2, 4, 16])
def test_any_number_of_hosts_have_a_version_within_twice_what_one_link_takes(hosts: int) -> None:
    world = World(hosts).run()
    assert max(world.done.values()) < 2 * BOUND_S
    assert (
        sum(world.sent.values()) <= MAX_SOURCE_COPIES * world.chunks
        and max(world.sent.values()) <= MAX_SOURCE_COPIES
    )


def test_sixteen_hosts_take_little_longer_than_four() -> None:
    assert max(World(16).run().done.values()) < 1.5 * max(World(4).run().done.values())


@pytest.mark.parametrize("slow", [frozenset({3}), frozenset({0, 1, 2})])
def test_a_host_on_a_slow_link_delays_nobody(slow: frozenset[int]) -> None:
    world = World(16, links=dict.fromkeys(slow, LINK / 100)).run()
    fast = [when for host, when in world.done.items() if host not in slow]
    assert max(fast) < 2 * BOUND_S
    assert sum(world.sent.values()) <= MAX_SOURCE_COPIES * world.chunks


@pytest.mark.rotating(3)
def test_a_host_that_comes_late_delays_nobody_and_takes_nothing_from_the_source() -> None:
    alone = World(16).run()
    world = World(17, starts={16: 1.5}).run()
    others = [when for host, when in world.done.items() if host != 16]
    assert max(others) < 1.2 * max(alone.done.values())
    assert sum(world.sent.values()) <= sum(alone.sent.values()) + 2
    assert world.done[16] - 1.5 < 2 * BOUND_S


def test_hosts_that_serve_nothing_on_get_what_others_have() -> None:
    mute = frozenset(range(8))
    world = World(16, mute=mute).run()
    assert sum(world.sent.values()) <= MAX_SOURCE_COPIES * world.chunks
    every = World(4, chunks=8, mute=frozenset(range(4))).run()
    assert sum(every.sent.values()) == 4 * 8  # no host relays a chunk


def test_servers_that_end_cost_what_was_on_its_way() -> None:
    world = World(8, dies={0: 0.5, 1: 0.5, 2: 1.0}).run()
    assert world.lost > 0 and max(world.done.values()) < 3 * BOUND_S


# ---------------------------------------------------------------- one choice


def choices(swarm: ChunkSwarm, name: str, held: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return all possible choices while no transfer runs and no peer is suspect or slow."""
    seeker = swarm.downloaders[name]
    found = set()
    for chunk in seeker.missing:
        peers = held.get(chunk, set()) - {seeker.server}
        found |= {(chunk, peer) for peer in peers}
        if not peers:
            found.add((chunk, SOURCE))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=20), st.integers(0, 4))
def test_the_choice_is_one_of_all_possible_ones(held: list[tuple[int, int]], asks: int) -> None:
    swarm, chunks = ChunkSwarm(SOURCE), [f"c{i}" for i in range(6)]
    for host in range(5):
        swarm.register(f"e{host}", f"h{host}", f"n{host}", chunks, 0.0)
    there: dict[str, set[str]] = {}
    for host, chunk in held:
        swarm.add_holder(f"e{host}", [f"c{chunk}"], 0.0)
        there.setdefault(f"c{chunk}", set()).add(f"n{host}")
    possible = choices(swarm, f"e{asks}", there)
    pairs = assign_sources(swarm, f"e{asks}", 1, 0.0)
    assert bool(pairs) == bool(possible)
    for pair in pairs:
        assert (pair.chunk, pair.source) in possible
        if any(source == SOURCE for _, source in possible):
            assert pair.source == SOURCE  # chunks that no peer has come first
        else:
            rarest = min(len(there[chunk]) for chunk, _ in possible)
            assert len(there[pair.chunk]) == rarest


def swarm_of(hosts: int, *chunks: str) -> ChunkSwarm:
    made = ChunkSwarm(SOURCE)
    for host in range(hosts):
        made.register(f"e{host}", f"h{host}", f"n{host}", chunks, 0.0)
    return made


def test_processes_of_a_host_fetch_different_chunks() -> None:
    swarm = ChunkSwarm(SOURCE)
    for n in range(2):
        swarm.register(f"e{n}", "h", "n", ["a", "b"], 0.0)
    first, second = assign_sources(swarm, "e0", 1, 0.0), assign_sources(swarm, "e1", 4, 0.0)
    assert {first[0].chunk, *(pair.chunk for pair in second)} == {"a", "b"} and len(second) == 1
    swarm.add_holder("e0", [first[0].chunk], 0.1)
    assert assign_sources(swarm, "e1", 4, 0.1) == []
    assert first[0].chunk not in swarm.downloaders["e1"].missing


def test_no_peer_sends_more_at_once_than_it_should() -> None:
    swarm = swarm_of(9, "a")
    swarm.add_holder("e0", ["a"], 0.0)
    swarm.start_transfer("e0", "a", SOURCE, 0.0)
    swarm.start_transfer("e0", "a", SOURCE, 0.0)
    asked = [assign_sources(swarm, f"e{n}", 1, 0.0) for n in range(1, 9)]
    assert sum(bool(pairs) for pairs in asked) == MAX_UPLOADS_PER_HOST
    assert {pair.source for pairs in asked for pair in pairs} == {"n0"}


def test_what_is_late_is_not_waited_for() -> None:
    swarm = swarm_of(2, "a")
    swarm.register("e2", "h2", "n2", ["b"], 0.0)
    swarm.start_transfer("e2", "b", SOURCE, 0.0)
    swarm.add_holder("e2", ["b"], 1.0)  # so a chunk takes a second
    assert [pair.source for pair in assign_sources(swarm, "e0", 1, 1.0)] == [SOURCE]
    swarm.source_copies["a"] = MAX_SOURCE_COPIES
    assert not assign_sources(swarm, "e1", 1, 1.0 + swarm.late_after_s)
    assert [pair.source for pair in assign_sources(swarm, "e1", 1, 1.1 + swarm.late_after_s)] == [
        SOURCE
    ]


def test_a_source_that_failed_is_left_alone_by_its_host_and_then_by_all() -> None:
    swarm = swarm_of(5, "a")
    swarm.add_holder("e0", ["a"], 0.0)
    swarm.source_copies["a"] = MAX_SOURCE_COPIES
    swarm.fail_transfer("e1", "a", "n0", False, 0.0)
    assert assign_sources(swarm, "e1", 1, 0.0)[0].source == SOURCE
    assert assign_sources(swarm, "e2", 1, 0.0)[0].source == "n0"
    swarm.fail_transfer("e2", "a", "n0", False, 0.0)
    assert all(pair.source == SOURCE for pair in assign_sources(swarm, "e3", 1, 0.0))
    swarm.touch_downloader("e4", DOUBT_DURATION_S)
    swarm.forget_expired(DOUBT_DURATION_S + 0.1)
    assert assign_sources(swarm, "e4", 1, DOUBT_DURATION_S + 0.1)[0].source == "n0"


def test_who_has_not_got_a_chunk_is_not_asked_for_it_again() -> None:
    swarm = swarm_of(2, "a", "b")
    swarm.add_holder("e0", ["a", "b"], 0.0)
    swarm.fail_transfer("e1", "a", "n0", True, 0.0)
    assert {(p.chunk, p.source) for p in assign_sources(swarm, "e1", 2, 0.0)} >= {("b", "n0")}
    assert "n0" not in swarm.holders["a"]


def test_what_is_old_is_forgotten() -> None:
    swarm = swarm_of(2, "a")
    swarm.add_holder("e0", ["a"], 0.0)
    swarm.touch_downloader("e1", DOWNLOADER_TIMEOUT_S)
    swarm.forget_expired(DOWNLOADER_TIMEOUT_S + 0.1)
    assert list(swarm.downloaders) == ["e1"] and swarm.holders
    swarm.forget_expired(HOLDER_MAX_AGE_S + 0.1)
    assert not swarm.downloaders and not swarm.holders and not swarm.source_copies
