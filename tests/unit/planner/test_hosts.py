"""Hosts that vanish, come back, drain and leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshrl.common.state.pool.placing.decisions import Decision, HostGone
from meshrl.common.state.pool.placing.snapshot import LEFT, PoolHost
from tests.unit.planner.pools import Looks, begun, job

GONE_MS = 11_000


def host(looks: Looks, name: str, **state: Any) -> None:
    hosts = (replace(h, **state) if h.name == name else h for h in looks.snapshot.hosts)
    looks.change(hosts=tuple(hosts))


def later(looks: Looks, ms: int) -> list[Decision]:
    looks.change(now_ms=looks.snapshot.now_ms + ms)
    return looks.settle()


def told(decisions: list[Decision]) -> list[HostGone]:
    return [one for one in decisions if isinstance(one, HostGone)]


def vanish(looks: Looks, name: str, alive: bool = False) -> None:
    host(looks, name, alive=alive)
    for worker in looks.snapshot.workers:
        if worker.host == name:
            looks.worker(worker.id, alive=alive)


def test_a_host_that_vanishes_is_told_once_with_what_was_on_it_and_again_when_it_is_back() -> None:
    looks = begun([2, 2], job(shards=4))
    there = {g.id for g in looks.snapshot.gangs if {"w2", "w3"} & set(g.workers)}
    services = looks.snapshot.hosts[1].services
    vanish(looks, "host1")
    assert told(looks.settle()) == [], "its agent may only be starting again"
    [lost] = told(later(looks, GONE_MS))
    assert (lost.host, lost.back) == ("host1", False)
    inputs = lost.why.inputs
    assert inputs["workers"] == ["w2", "w3"]
    assert {resident.partition(".")[0] for resident in inputs["residents"]} == there != set()
    assert inputs["services"] == list(services) != []
    assert told(later(looks, GONE_MS)) == []
    assert looks.snapshot.hosts[1].services == ()
    vanish(looks, "host1", alive=True)
    assert [(one.host, one.back) for one in told(looks.settle())] == [("host1", True)]
    vanish(looks, "host1")
    looks.settle()
    assert len(told(later(looks, GONE_MS))) == 1, "it has vanished once more"


def test_a_host_that_has_left_is_no_loss_and_its_services_begin_elsewhere_at_once() -> None:
    looks = begun([2, 2], job(shards=4))
    assert looks.snapshot.hosts[1].services
    vanish(looks, "host1")
    host(looks, "host1", draining=LEFT)
    decisions = looks.settle()
    assert len(looks.snapshot.hosts[0].services) == 4
    assert told(decisions + later(looks, GONE_MS)) == []


def test_a_small_host_is_given_fewer_services_than_a_large_one() -> None:
    looks = begun([6, 2], job(shards=8))
    assert [len(one.services) for one in looks.snapshot.hosts] == [6, 2]


def test_a_single_shard_is_on_the_host_of_its_jobs_core() -> None:
    looks = begun([2, 2], job(shards=0))
    core = next(g.workers[0] for g in looks.snapshot.gangs for r in g.residents if r.core)
    home = next(w.host for w in looks.snapshot.workers if w.id == core)
    names = tuple(reversed(looks.snapshot.hosts))  # whichever comes first
    for hosts in (looks.snapshot.hosts, names):
        looks.change(jobs=(job(shards=1),), hosts=tuple(PoolHost(h.name) for h in hosts))
        looks.settle()
        [one] = [h.name for h in looks.snapshot.hosts if h.services]
        assert one == home


def test_a_core_without_a_checkpoint_computes_on_where_its_host_drains_and_moves_with_it() -> None:
    looks = begun([3, 1], job())
    host(looks, "host0", draining="maintenance")
    looks.settle()
    assert looks.roles() == {"w0": "core+rollout"}, "by turns, as nothing else is where it computes"
    looks.job("job", checkpointed=True)
    looks.settle()
    assert looks.roles() == {"w3": "core+rollout"}


def test_a_core_that_no_checkpoint_gets_leaves_when_a_move_would_be_undone() -> None:
    looks = begun([3, 1], job())
    host(looks, "host0", draining="maintenance")
    looks.settle()
    later(looks, 121_000)
    assert looks.roles() == {"w3": "core+rollout"}
