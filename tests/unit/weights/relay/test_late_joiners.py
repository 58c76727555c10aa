"""Hosts that join while others update: sources that are near, and updates that come first."""

from __future__ import annotations

import pytest

from loadtests.weights.swarm_simulation import LINK, SOURCE, SwarmSimulation
from meshrl.services.weights.chunk_swarm import ChunkSwarm
from meshrl.services.weights.tracker import (
    MAX_JOINER_UPLOADS,
    MAX_SOURCE_UPLOADS,
    MAX_UPLOADS_PER_HOST,
    assign_sources,
)

RUNNING, JOINERS, CHUNKS = 4, 20, 16
CROWD = frozenset(range(RUNNING, RUNNING + JOINERS))
COMMIT_S = 0.4


def run_crowd(joiners: int, **more: object) -> SwarmSimulation:
    """Run hosts that update at COMMIT_S beside others that join at 0.

    The latter take the newer version half a second after its commit.
    """
    hosts = range(RUNNING + joiners)
    return SwarmSimulation(
        RUNNING + joiners,
        chunks=CHUNKS,
        joiners=CROWD,
        first_holders=frozenset(range(RUNNING)),
        next_times={n: COMMIT_S + (0.5 if n in CROWD else 0.0) for n in hosts},
        **more,  # type: ignore[arg-type]
    ).run()


def measure_update_s(simulation: SwarmSimulation) -> float:
    return max(simulation.finish_times[n] for n in range(RUNNING)) - COMMIT_S


@pytest.mark.parametrize(
    ("more", "ratio"),
    [
        ({}, 1.4),
        ({"link_rates": dict.fromkeys(CROWD, LINK / 4)}, 2.0),
        ({"no_upload_hosts": CROWD}, 1.6),
    ],
    ids=["relaying", "slow links", "without uploads"],
)
def test_joining_hosts_hardly_delay_updates(more: dict[str, object], ratio: float) -> None:
    alone = measure_update_s(run_crowd(0))
    assert measure_update_s(run_crowd(JOINERS, **more)) < ratio * alone


def test_joining_hosts_share_few_uploads_while_others_update() -> None:
    swarm = ChunkSwarm(SOURCE)
    chunks = [f"c{i}" for i in range(8)]
    swarm.register("old", "old", "n-old", [], 0.0)
    swarm.add_holder("old", chunks[:4], 0.0)
    for n in range(12):
        swarm.register(f"new{n}", f"new{n}", "", chunks, 0.0, is_joining=True)
    swarm.register("busy", "busy", "", chunks, 0.0)

    def take(name: str) -> list[str]:
        return [pair.source for pair in assign_sources(swarm, name, 1, 0.0)]

    sources = [source for n in range(12) for source in take(f"new{n}")]
    assert {source: sources.count(source) for source in (SOURCE, "n-old")} == {
        SOURCE: MAX_JOINER_UPLOADS,
        "n-old": MAX_JOINER_UPLOADS,
    }
    assert sorted(take("busy") + take("busy")) == sorted([SOURCE, "n-old"])
    swarm.unregister("busy")  # no update is left
    sources += [source for n in range(12) for source in take(f"new{n}")]
    assert sources.count("n-old") == MAX_UPLOADS_PER_HOST
    assert sources.count(SOURCE) == MAX_SOURCE_UPLOADS


def test_chunk_enters_each_network_at_most_once() -> None:
    networks = {n: "far" if n < 6 else "third" for n in range(9)}
    simulation = SwarmSimulation(14, chunks=CHUNKS, networks=networks).run()
    assert max(simulation.crossed.values()) <= 3  # networks: the source's too, from another one


def test_near_source_is_preferred_and_a_far_one_replaces_it() -> None:
    swarm = ChunkSwarm(SOURCE)
    for name, network in (("a", "far"), ("b", ""), ("c", "far"), ("d", "")):
        swarm.register(name, name, f"n{name}", ["x"], 0.0, network=network)
    swarm.add_holder("a", ["x"], 0.0)
    swarm.source_copies["x"] = 2

    def take(name: str) -> list[str]:
        return [pair.source for pair in assign_sources(swarm, name, 1, 0.0)]

    assert take("b") == [SOURCE]  # of its network
    swarm.add_holder("b", ["x"], 0.1)
    assert take("c") == ["na"] and take("d") == ["nb"]
    for host in ("e", "f"):
        swarm.register(host, host, "", ["x"], 0.1, network="far")
        swarm.fail_transfer(host, "x", "na", False, 0.1)
    swarm.unregister("c")
    assert take("e") == ["nb"]  # `na` has failed twice, so no near host has the chunk
