"""Placement of shards and sandboxes: they follow jobs and stay on their hosts while possible."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    RejectRequest,
    ReportHostPresence,
)
from meshrl.common.state.pool.scheduling.host_services import (
    ALL_SERVICES,
    explain_rejected_service,
    explain_unplaced_service,
)
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolHost, PoolRequest
from meshrl.common.state.pool.workers.process_names import SERVICE_NAMES, parse_service_name
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool


def test_services_follow_jobs() -> None:
    bench = start_pool([2, 2], job("a", shards=2, sandboxes=1), job("b", submitted_ms=1, shards=2))
    assert sorted(n for host in bench.snapshot.hosts for n in host.services) == [
        "rollout/a/0",
        "rollout/a/1",
        "rollout/b/0",
        "rollout/b/1",
        "sandbox/a/0",
    ]
    assert {len(host.services) for host in bench.snapshot.hosts} == {2, 3}
    placed_before = {h.name: [n for n in h.services if "/a/" in n] for h in bench.snapshot.hosts}
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    assert {h.name: list(h.services) for h in bench.snapshot.hosts} == placed_before


def test_waiting_job_has_no_shards_and_paused_job_keeps_them() -> None:
    bench = start_pool([2], job("a"))
    urgent = job("b", phase=Phase.QUEUED, priority=5, min_workers=2, submitted_ms=1)
    small = job("c", phase=Phase.QUEUED, submitted_ms=2)
    bench.update(jobs=(*bench.snapshot.jobs, urgent, small))
    bench.settle()
    block_reasons = {j.id: j.block_reason.partition(":")[0] for j in bench.snapshot.jobs}
    assert block_reasons == {"a": "paused", "b": "", "c": "waiting"}
    assert bench.snapshot.hosts[0].services == ("rollout/a/0", "rollout/b/0")


def test_shards_of_a_lost_host_move() -> None:
    bench = start_pool([2, 2], job(shards=2))
    hosts = bench.snapshot.hosts
    bench.update(hosts=(replace(hosts[0], alive=False), hosts[1]))
    assert bench.settle() == [], "its agent may only be starting again"
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    assert bench.snapshot.hosts[0].services == ()
    assert sorted(bench.snapshot.hosts[1].services) == ["rollout/job/0", "rollout/job/1"]


def test_idle_services_leave_a_draining_host() -> None:
    bench = start_pool([2, 2], job(shards=2, sandboxes=2, has_checkpoint=True))
    there = bench.snapshot.hosts[0].services
    assert len([*there]) == 2
    bench.drain("host0")
    bench.update(requests=(PoolRequest("op", "drain", host="host0"),))
    assert not list_completed_drains(bench.settle()) and bench.snapshot.hosts[0].services == there
    bench.update(evictable_services=frozenset(there[:1]))
    assert (
        not list_completed_drains(bench.settle()) and bench.snapshot.hosts[0].services == there[1:]
    )
    bench.update(evictable_services=frozenset(there))
    assert list_completed_drains(bench.settle()) == [""]
    assert bench.snapshot.hosts[0].services == ()
    assert len(bench.snapshot.hosts[1].services) == 4
    bench.update(jobs=(*bench.snapshot.jobs, job("b", submitted_ms=1)))
    bench.settle()
    assert bench.snapshot.hosts[0].services == (), "what is new goes elsewhere too"


def test_drain_waits_at_most_the_move_timeout() -> None:
    bench = start_pool([2, 2], job(shards=4))
    bench.drain("host1")
    bench.settle()
    assert bench.snapshot.hosts[1].services
    bench.update(now_ms=bench.snapshot.now_ms + 121_000)
    bench.settle()
    assert [len(host.services) for host in bench.snapshot.hosts] == [4, 0]


def test_idle_shards_stay_if_no_other_host_accepts_them() -> None:
    bench = start_pool([2], job(shards=2))
    there = bench.snapshot.hosts[0].services
    bench.update(evictable_services=frozenset(there))
    assert bench.settle() == [], "its host does not drain"
    bench.drain("host0")
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + 121_000)
    bench.settle()
    assert bench.snapshot.hosts[0].services == there


@pytest.mark.parametrize("seed", range(12))
def test_drains_keep_each_service_on_one_host_until_it_is_idle(seed: int) -> None:
    drawn = random.Random(seed)
    bench = start_pool([2, 2, 2], job(shards=3, sandboxes=2, has_checkpoint=True))
    for _ in range(30):
        names = [name for host in bench.snapshot.hosts for name in host.services]
        rests = frozenset(name for name in names if drawn.random() < 0.3)
        hosts = tuple(
            replace(host, drain_reason="maintenance" if drawn.random() < 0.4 else "")
            for host in bench.snapshot.hosts
        )
        bench.update(evictable_services=rests, hosts=hosts)
        before = {name: host for host in hosts for name in host.services}
        bench.decide_once()
        after = {name: host.name for host in bench.snapshot.hosts for name in host.services}
        assert sorted(after) == sorted(names) == sorted(set(names)), "each on one"
        for name, place in after.items():
            was = before[name]
            if place != was.name:
                assert was.drain_reason and name in rests
                assert not next(host for host in hosts if host.name == place).drain_reason
            else:
                stays = not was.drain_reason or name not in rests
                assert stays or all(host.drain_reason for host in hosts)


def list_completed_drains(decisions: list[Decision]) -> list[str]:
    return [one.reason for one in decisions if isinstance(one, RejectRequest)]


def test_shards_of_a_lost_host_stay_assigned_if_no_other_accepts_them() -> None:
    bench = start_pool([2], job(shards=2))
    host = bench.snapshot.hosts[0]
    bench.update(hosts=(replace(host, alive=False),))
    bench.decide_once()
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    assert bench.settle() == [ReportHostPresence("host0", False, ANY)], (
        "what was on it is told once"
    )
    assert bench.snapshot.hosts[0].services == host.services != ()


def set_accepted_services(bench: PlannerBench, host: str, **offer: Any) -> None:
    """Set the services that a host accepts."""
    hosts = bench.snapshot.hosts
    bench.update(hosts=tuple(replace(h, **offer) if h.name == host else h for h in hosts))


def map_services_to_hosts(bench: PlannerBench) -> dict[str, str]:
    """Return the host of each service."""
    return {name: host.name for host in bench.snapshot.hosts for name in host.services}


def test_services_go_to_hosts_that_accept_them() -> None:
    bench = PlannerBench(pool([3, 0, 0, 2], job(shards=2, sandboxes=2)))
    set_accepted_services(bench, "host0", accepted_services=())
    set_accepted_services(bench, "host1", accepted_services=("sandboxes",))
    set_accepted_services(bench, "host2", accepted_services=("shards",))
    set_accepted_services(bench, "host3", accepted_services=())
    bench.settle()
    assert map_services_to_hosts(bench) == {
        "rollout/job/0": "host2",
        "rollout/job/1": "host2",
        "sandbox/job/0": "host1",
        "sandbox/job/1": "host1",
    }
    assert bench.count_awake_workers("job") == 5, "who takes no services computes all the same"


def test_job_without_a_host_for_its_services_waits_without_workers() -> None:
    bench = PlannerBench(pool([2], job("a", phase=Phase.QUEUED, sandboxes=1)))
    set_accepted_services(bench, "host0", accepted_services=("shards",))
    bench.update(jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, submitted_ms=1)))
    bench.settle()
    assert bench.snapshot.jobs[0].block_reason == (
        "waiting: no host accepts its sandboxes now: host0 accepts shards"
    )
    assert bench.count_awake_workers("b") == 2 and list(map_services_to_hosts(bench)) == [
        "rollout/b/0"
    ]
    bench.update(hosts=(*bench.snapshot.hosts, PoolHost("host1", accepted_services=("sandboxes",))))
    bench.settle()
    assert (
        bench.snapshot.jobs[0].block_reason == ""
        and map_services_to_hosts(bench)["sandbox/a/0"] == "host1"
    )


def test_sandboxes_go_to_hosts_with_the_required_isolation() -> None:
    jobs = (
        job("a", sandboxes=2, isolation_tier="bwrap"),
        job("b", sandboxes=2, submitted_ms=1),
        job("c", sandboxes=1, isolation_tier="runner", submitted_ms=2, phase=Phase.QUEUED),
    )
    bench = PlannerBench(pool([6, 1], *jobs))
    set_accepted_services(bench, "host0", isolation_tiers=("landlock",))
    set_accepted_services(bench, "host1", isolation_tiers=("trying",))
    bench.settle()
    assert {name for name in map_services_to_hosts(bench) if name.startswith("sandbox/a")} == set()
    assert bench.snapshot.jobs[0].block_reason == "", (
        "it has begun: its host may turn out as it was"
    )
    set_accepted_services(bench, "host1", isolation_tiers=("cgroup",))
    bench.settle()
    assert {map_services_to_hosts(bench)[f"sandbox/a/{n}"] for n in range(2)} == {"host1"}
    assert {map_services_to_hosts(bench)[f"sandbox/b/{n}"] for n in range(2)} == {"host0"}, (
        "there is more room"
    )
    assert bench.snapshot.jobs[2].block_reason == (
        "waiting: no host accepts its sandboxes with sandbox.tier = runner now: host0 has "
        "landlock; host1 has cgroup"
    )
    set_accepted_services(bench, "host1", isolation_tiers=("cgroup", "runner"))
    bench.settle()
    assert (
        map_services_to_hosts(bench)["sandbox/c/0"] == "host1"
        and bench.snapshot.jobs[2].block_reason == ""
    )


def test_job_is_paused_if_its_only_host_no_longer_accepts_its_services() -> None:
    bench = PlannerBench(pool([2, 0], job(sandboxes=1, isolation_tier="bwrap")))
    set_accepted_services(bench, "host0", accepted_services=("shards",))
    set_accepted_services(
        bench, "host1", accepted_services=("sandboxes",), isolation_tiers=("bwrap",)
    )
    bench.settle()
    assert map_services_to_hosts(bench)["sandbox/job/0"] == "host1"
    set_accepted_services(bench, "host1", alive=False)
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    assert (
        map_services_to_hosts(bench)["sandbox/job/0"] == "host1"
        and not bench.snapshot.jobs[0].block_reason
    )
    set_accepted_services(bench, "host1", alive=True, isolation_tiers=("trying",))
    bench.settle()
    assert (
        map_services_to_hosts(bench)["sandbox/job/0"] == "host1"
        and not bench.snapshot.jobs[0].block_reason
    )
    set_accepted_services(bench, "host1", isolation_tiers=())
    bench.settle()
    assert list(map_services_to_hosts(bench)) == ["rollout/job/0"]
    assert bench.snapshot.jobs[0].block_reason.startswith("paused: no host accepts its sandboxes")
    assert "host1 has no isolation" in bench.snapshot.jobs[0].block_reason
    set_accepted_services(bench, "host1", isolation_tiers=("bwrap",))
    bench.settle()
    assert (
        map_services_to_hosts(bench)["sandbox/job/0"] == "host1"
        and not bench.snapshot.jobs[0].block_reason
    )


def test_drain_completes_for_services_that_no_other_host_accepts() -> None:
    bench = PlannerBench(pool([1, 0], job(sandboxes=1)))
    set_accepted_services(bench, "host0", accepted_services=("shards",))
    set_accepted_services(bench, "host1", accepted_services=("sandboxes",))
    bench.settle()
    bench.drain("host1")
    bench.update(
        requests=(PoolRequest("op", "drain", host="host1"),),
        evictable_services=frozenset(map_services_to_hosts(bench)),
    )
    assert list_completed_drains(bench.settle()) == [""], "nobody else could have it"
    assert map_services_to_hosts(bench)["sandbox/job/0"] == "host1"
    bench.update(hosts=(*bench.snapshot.hosts, PoolHost("host2", accepted_services=("sandboxes",))))
    bench.settle()
    assert map_services_to_hosts(bench)["sandbox/job/0"] == "host2"


taking = st.sets(st.sampled_from(ALL_SERVICES)).map(tuple)
tiers = st.one_of(
    st.none(), st.sampled_from([(), ("trying",), ("landlock",), ("bwrap",), ("cgroup", "runner")])
)
drawn_hosts = st.lists(
    st.tuples(taking, tiers, st.booleans(), st.sampled_from(["", "", "maintenance", HOST_LEFT])),
    min_size=1,
    max_size=4,
)
demands = st.sampled_from(["", "landlock", "bwrap", "cgroup", "runner"])


@given(st.lists(drawn_hosts, min_size=1, max_size=4), st.lists(demands, min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_random_hosts_get_exactly_the_services_they_accept(
    walks: list[list[tuple[Any, ...]]], required: list[str]
) -> None:
    """Let hosts return with changed options repeatedly; jobs differ in their requirements."""
    about = {"shards": 2, "sandboxes": 2, "has_checkpoint": True}
    jobs = [job(f"j{n}", isolation_tier=tier, **about) for n, tier in enumerate(required)]
    bench = PlannerBench(pool([3, 1, 0, 0], *jobs))
    for walk in walks:
        for number, (takes, known, alive, draining) in enumerate(walk):
            offer = {
                "accepted_services": takes,
                "isolation_tiers": known,
                "alive": alive,
                "drain_reason": draining,
            }
            set_accepted_services(bench, f"host{number}", **offer)
        before = map_services_to_hosts(bench)
        bench.update(now_ms=bench.snapshot.now_ms + 11_000)
        bench.settle(within=40)
        bench.update(now_ms=bench.snapshot.now_ms + 121_000)
        bench.settle(within=40)
        hosts = {host.name: host for host in bench.snapshot.hosts}
        needs = {planned.id: planned.requirements for planned in bench.snapshot.jobs}
        there = map_services_to_hosts(bench)
        for name, host in there.items():
            kind, of, _ = parse_service_name(name)
            if before.get(name) != host:
                assert not explain_rejected_service(hosts[host], kind, needs[of]), (
                    "what is new is taken"
                )
                assert hosts[host].alive and not hosts[host].drain_reason
            if hosts[host].alive and not hosts[host].is_probing_isolation:
                assert not explain_rejected_service(hosts[host], kind, needs[of])
        for planned in bench.snapshot.jobs:
            for kind in SERVICE_NAMES:
                fits = [
                    host
                    for host in hosts.values()
                    if host.alive
                    and not host.drain_reason
                    and not explain_rejected_service(host, kind, planned.requirements)
                ]
                names = [f"{kind}/{planned.id}/{n}" for n in range(2)]
                assert not fits or set(names) <= set(there), "what may be somewhere is"
                why = planned.block_reason or explain_unplaced_service(
                    hosts.values(), kind, planned.requirements
                )
                assert fits or why or all(h.drain_reason == HOST_LEFT for h in hosts.values())
