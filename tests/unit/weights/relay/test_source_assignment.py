"""Assignment of chunks to sources, in virtual time and against all valid choices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.weights.swarm_simulation import LINK, SOURCE, SwarmSimulation
from meshrl.services.weights.chunk_swarm import (
    DOUBT_DURATION_S,
    DOWNLOADER_TIMEOUT_S,
    HOLDER_MAX_AGE_S,
    ChunkSwarm,
)
from meshrl.services.weights.tracker import (
    MAX_SOURCE_COPIES,
    MAX_UPLOADS_PER_HOST,
    assign_sources,
)

BOUND_S = 32 * (1 << 20) / LINK  # a version of 32 MiB over one link


@pytest.mark.parametrize("hosts", [1, 2, 4, 16])
def test_hosts_finish_within_twice_the_time_of_one_link(hosts: int) -> None:
    simulation = SwarmSimulation(hosts).run()
    assert max(simulation.finish_times.values()) < 2 * BOUND_S
    assert (
        sum(simulation.sent.values()) <= MAX_SOURCE_COPIES * simulation.chunks
        and max(simulation.sent.values()) <= MAX_SOURCE_COPIES
    )


def test_sixteen_hosts_take_little_longer_than_four() -> None:
    assert max(SwarmSimulation(16).run().finish_times.values()) < 1.5 * max(
        SwarmSimulation(4).run().finish_times.values()
    )


@pytest.mark.parametrize("slow", [frozenset({3}), frozenset({0, 1, 2})])
def test_slow_link_does_not_delay_other_hosts(slow: frozenset[int]) -> None:
    simulation = SwarmSimulation(16, link_rates=dict.fromkeys(slow, LINK / 100)).run()
    fast = [time_s for host, time_s in simulation.finish_times.items() if host not in slow]
    assert max(fast) < 2 * BOUND_S
    assert sum(simulation.sent.values()) <= MAX_SOURCE_COPIES * simulation.chunks


@pytest.mark.rotating(3)
def test_late_host_does_not_delay_others_or_load_the_source() -> None:
    reference = SwarmSimulation(16).run()
    simulation = SwarmSimulation(17, start_times={16: 1.5}).run()
    others = [time_s for host, time_s in simulation.finish_times.items() if host != 16]
    assert max(others) < 1.2 * max(reference.finish_times.values())
    assert sum(simulation.sent.values()) <= sum(reference.sent.values()) + 2
    assert simulation.finish_times[16] - 1.5 < 2 * BOUND_S


def test_hosts_that_do_not_relay_still_receive_all_chunks() -> None:
    no_upload_hosts = frozenset(range(8))
    simulation = SwarmSimulation(16, no_upload_hosts=no_upload_hosts).run()
    assert sum(simulation.sent.values()) <= MAX_SOURCE_COPIES * simulation.chunks
    isolated = SwarmSimulation(4, chunks=8, no_upload_hosts=frozenset(range(4))).run()
    assert sum(isolated.sent.values()) == 4 * 8  # no host relays a chunk


def test_exited_servers_cost_only_transfers_in_progress() -> None:
    simulation = SwarmSimulation(8, exit_times={0: 0.5, 1: 0.5, 2: 1.0}).run()
    assert simulation.failed_count > 0 and max(simulation.finish_times.values()) < 3 * BOUND_S


# ---------------------------------------------------------------- single choice


def list_choices(
    swarm: ChunkSwarm, name: str, holders: dict[str, set[str]]
) -> set[tuple[str, str]]:
    """Return all possible choices while no transfer runs and no peer is suspect or slow."""
    downloader = swarm.downloaders[name]
    choices = set()
    for chunk in downloader.missing:
        peers = holders.get(chunk, set()) - {downloader.server}
        choices |= {(chunk, peer) for peer in peers}
        if not peers:
            choices.add((chunk, SOURCE))
    return choices


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=20), st.integers(0, 4))
def test_assignment_is_a_valid_choice(holdings: list[tuple[int, int]], requester: int) -> None:
    swarm, chunks = ChunkSwarm(SOURCE), [f"c{i}" for i in range(6)]
    for host in range(5):
        swarm.register(f"e{host}", f"h{host}", f"n{host}", chunks, 0.0)
    holders: dict[str, set[str]] = {}
    for host, chunk in holdings:
        swarm.add_holder(f"e{host}", [f"c{chunk}"], 0.0)
        holders.setdefault(f"c{chunk}", set()).add(f"n{host}")
    possible = list_choices(swarm, f"e{requester}", holders)
    pairs = assign_sources(swarm, f"e{requester}", 1, 0.0)
    assert bool(pairs) == bool(possible)
    for pair in pairs:
        assert (pair.chunk, pair.source) in possible
        if any(source == SOURCE for _, source in possible):
            assert pair.source == SOURCE  # chunks that no peer has come first
        else:
            rarest = min(len(holders[chunk]) for chunk, _ in possible)
            assert len(holders[pair.chunk]) == rarest


def make_swarm(hosts: int, *chunks: str) -> ChunkSwarm:
    swarm = ChunkSwarm(SOURCE)
    for host in range(hosts):
        swarm.register(f"e{host}", f"h{host}", f"n{host}", chunks, 0.0)
    return swarm


def test_processes_of_one_host_fetch_different_chunks() -> None:
    swarm = ChunkSwarm(SOURCE)
    for n in range(2):
        swarm.register(f"e{n}", "h", "n", ["a", "b"], 0.0)
    first, second = assign_sources(swarm, "e0", 1, 0.0), assign_sources(swarm, "e1", 4, 0.0)
    assert {first[0].chunk, *(pair.chunk for pair in second)} == {"a", "b"} and len(second) == 1
    swarm.add_holder("e0", [first[0].chunk], 0.1)
    assert assign_sources(swarm, "e1", 4, 0.1) == []
    assert first[0].chunk not in swarm.downloaders["e1"].missing


def test_concurrent_uploads_of_a_peer_are_bounded() -> None:
    swarm = make_swarm(9, "a")
    swarm.add_holder("e0", ["a"], 0.0)
    swarm.start_transfer("e0", "a", SOURCE, 0.0)
    swarm.start_transfer("e0", "a", SOURCE, 0.0)
    assignments = [assign_sources(swarm, f"e{n}", 1, 0.0) for n in range(1, 9)]
    assert sum(bool(pairs) for pairs in assignments) == MAX_UPLOADS_PER_HOST
    assert {pair.source for pairs in assignments for pair in pairs} == {"n0"}


def test_late_transfer_is_assigned_to_the_source() -> None:
    swarm = make_swarm(2, "a")
    swarm.register("e2", "h2", "n2", ["b"], 0.0)
    swarm.start_transfer("e2", "b", SOURCE, 0.0)
    swarm.add_holder("e2", ["b"], 1.0)  # so a chunk takes a second
    assert [pair.source for pair in assign_sources(swarm, "e0", 1, 1.0)] == [SOURCE]
    swarm.source_copies["a"] = MAX_SOURCE_COPIES
    assert not assign_sources(swarm, "e1", 1, 1.0 + swarm.late_after_s)
    assert [pair.source for pair in assign_sources(swarm, "e1", 1, 1.1 + swarm.late_after_s)] == [
        SOURCE
    ]


def test_failed_source_is_avoided_by_one_host_and_then_by_all() -> None:
    swarm = make_swarm(5, "a")
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


def test_peer_without_a_chunk_is_not_assigned_again() -> None:
    swarm = make_swarm(2, "a", "b")
    swarm.add_holder("e0", ["a", "b"], 0.0)
    swarm.fail_transfer("e1", "a", "n0", True, 0.0)
    assert {(p.chunk, p.source) for p in assign_sources(swarm, "e1", 2, 0.0)} >= {("b", "n0")}
    assert "n0" not in swarm.holders["a"]


def test_expired_downloaders_and_holders_are_removed() -> None:
    swarm = make_swarm(2, "a")
    swarm.add_holder("e0", ["a"], 0.0)
    swarm.touch_downloader("e1", DOWNLOADER_TIMEOUT_S)
    swarm.forget_expired(DOWNLOADER_TIMEOUT_S + 0.1)
    assert list(swarm.downloaders) == ["e1"] and swarm.holders
    swarm.forget_expired(HOLDER_MAX_AGE_S + 0.1)
    assert not swarm.downloaders and not swarm.holders and not swarm.source_copies
