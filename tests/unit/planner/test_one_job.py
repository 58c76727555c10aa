"""One job and the workers of its mesh: the first split, repairs, losses, time slices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    FailJob,
    MarkWorkerLost,
    PlaceInstance,
    RejectRequest,
    ReportHostPresence,
)
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT, PoolHost, PoolRequest
from meshrl.common.state.pool.workers.rows import Role, TierBytes
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.launch.up_down import make_default_pool
from tests.unit.planner.plant import Plant, run
from tests.unit.planner.pools import NOW_MS, QUIET, PlannerBench, job, pool, start_pool

LOST_MS = round(1000 * PoolSettings().worker_lost_s) + 1
SHORT_MS = round(1000 * PoolSettings().shortage_grace_s) + 1
DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("workers", "about", "roles"),
    [
        (2, {}, ["core", "rollout"]),
        (4, {}, ["core", "rollout", "rollout", "rollout"]),
        (4, {"needs_scoring": True}, ["core", "scoring", "rollout", "rollout"]),
        (4, {"config": PlannerConfig(training=2)}, ["core", "rollout", "training", "rollout"]),
        (4, {"ranks": 2}, ["core", "core", "rollout", "rollout"]),
        (1, {}, ["core+rollout"]),
        (2, {"ranks": 2}, ["core+rollout", "core+rollout"]),
        (2, {"needs_scoring": True}, ["core+rollout", "scoring"]),
        (1, {"needs_rollout": False}, ["core"]),
        (8, {"max_workers": 3}, ["core", "rollout", "rollout"]),
    ],
)
def test_job_is_placed_on_idle_workers(
    workers: int, about: dict[str, Any], roles: list[str]
) -> None:
    bench = start_pool([workers], job(**about))
    assert list(bench.roles().values()) == roles


def test_joining_worker_becomes_an_engine() -> None:
    bench = start_pool([2], job())
    bench.update(workers=pool([3]).workers[:2] + pool([3]).workers[2:])
    decisions = bench.settle()
    assert list(bench.roles().values()) == ["core", "rollout", "rollout"]
    assert [d.instance.role for d in decisions if isinstance(d, PlaceInstance)] == [Role.ROLLOUT]


def lose_worker(bench: PlannerBench, worker: str) -> None:
    bench.update_worker(worker, alive=False)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + LOST_MS)


def test_briefly_missing_worker_changes_nothing() -> None:
    bench = start_pool([3], job())
    bench.update_worker("w0", alive=False)
    assert bench.settle() == []
    bench.update_worker("w0", alive=True, token=77)
    bench.update(now_ms=bench.snapshot.now_ms + LOST_MS)
    assert bench.settle() == []


def test_lost_core_is_replaced_by_a_hybrid() -> None:
    bench = start_pool([4], job(config=PlannerConfig(training=2)))
    lose_worker(bench, "w0")
    decisions = bench.settle()
    assert isinstance(decisions[0], MarkWorkerLost) and decisions[0].worker == "w0"
    assert bench.roles() == {"w1": "rollout", "w2": "core", "w3": "rollout"}
    assert next(d for d in decisions if isinstance(d, PlaceInstance)).rationale.rule == "repair"


def test_returning_worker_is_used_again() -> None:
    bench = start_pool([3], job())
    lose_worker(bench, "w0")
    bench.settle()
    bench.update_worker("w0", alive=True, token=78)
    bench.settle()
    assert sorted(bench.roles().values()) == ["core", "rollout", "rollout"]


def test_worker_is_marked_lost_once() -> None:
    bench = start_pool([3], job())
    lose_worker(bench, "w2")
    assert sum(isinstance(d, MarkWorkerLost) for d in bench.settle()) == 1
    bench.update(now_ms=bench.snapshot.now_ms + 10 * LOST_MS)
    assert bench.settle() == []


def test_last_worker_is_time_sliced_until_another_returns() -> None:
    bench = start_pool([2], job())
    lose_worker(bench, "w0")
    bench.settle()
    assert bench.roles() == {"w1": "core+rollout"}
    bench.update_worker("w0", alive=True, token=79)
    decisions = bench.settle()
    assert bench.roles() == {"w0": "rollout", "w1": "core"}
    core = next(r for _, r in bench.list_instances() if r.core)
    assert not core.time_sliced and core.generation == 1
    assert all(d.instance.generation == 1 for d in decisions if isinstance(d, PlaceInstance))


def test_job_without_time_slicing_continues_with_remaining_workers() -> None:
    bench = start_pool([2], job(), settings=QUIET)
    lose_worker(bench, "w1")
    bench.settle()
    assert bench.roles() == {"w0": "core"}
    assert bench.snapshot.jobs[0].block_reason == ""


def test_core_with_a_lost_rank_forms_again() -> None:
    bench = start_pool([5], job(ranks=2))
    lose_worker(bench, "w1")
    bench.settle()
    cores = [w for w, role in bench.roles().items() if role == "core"]
    assert len(cores) == 2 and "w1" not in cores
    assert any(role == "rollout" for role in bench.roles().values())


def test_core_ranks_are_on_one_host() -> None:
    bench = start_pool([1, 3], job(ranks=3))
    assert [w for w, role in bench.roles().items() if role == "core"] == ["w1", "w2", "w3"]


def test_job_waits_for_a_new_mesh_before_time_slicing() -> None:
    bench = start_pool([1], job(phase=Phase.QUEUED), up_since_ms=NOW_MS)
    assert bench.snapshot.jobs[0].block_reason == "", "nobody waits while workers may still join"
    bench.update(now_ms=NOW_MS + 6000)
    bench.settle()
    assert bench.roles() == {"w0": "core+rollout"}
    assert bench.snapshot.jobs[0].block_reason == ""


def test_infeasible_job_waits_and_then_fails_with_a_fix() -> None:
    bench = start_pool([1], job(ranks=2, phase=Phase.QUEUED))
    assert bench.snapshot.jobs
    bench.update(now_ms=bench.snapshot.now_ms + SHORT_MS)
    failed = next(d for d in bench.decide_once() if isinstance(d, FailJob))
    assert "--workers 2" in failed.error


def test_job_waits_for_the_first_worker_of_a_slow_new_mesh() -> None:
    bench = start_pool([], job(phase=Phase.QUEUED), up_since_ms=NOW_MS)
    for after_s in (10, 29):  # beyond the grace for joining and for a shortage
        bench.update(now_ms=NOW_MS + 1000 * after_s)
        assert not [d for d in bench.decide_once() if isinstance(d, FailJob)], after_s
    bench.update(now_ms=NOW_MS + 31_000)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + SHORT_MS)
    assert [d for d in bench.decide_once() if isinstance(d, FailJob)]


def test_job_waits_for_hosts_if_the_head_has_no_workers() -> None:
    settings = make_default_pool(0)
    bench = start_pool([1], job(ranks=2, phase=Phase.QUEUED), settings=settings)
    bench.update(now_ms=bench.snapshot.now_ms + DAY_MS)
    assert bench.snapshot.jobs and not [d for d in bench.decide_once() if isinstance(d, FailJob)]
    assert make_default_pool(1) == PoolSettings()


def test_job_too_large_for_every_accelerator_fails_with_its_bytes() -> None:
    bench = PlannerBench(pool([2], job(memory=RoleMemory(core=400))))
    for worker in ("w0", "w1"):
        bench.update_worker(worker, budget=TierBytes(accelerator=300))
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + SHORT_MS)
    failed = next(d for d in bench.decide_once() if isinstance(d, FailJob))
    assert "400 bytes" in failed.error and "the largest accelerator has 300" in failed.error
    assert "training.ranks" in failed.error


def test_ended_job_leaves_no_instances() -> None:
    bench = start_pool([4], job(ranks=2))
    bench.update(jobs=())
    bench.settle()
    assert bench.snapshot.gangs == ()
    assert all(worker.gang == "" for worker in bench.snapshot.workers)
    assert all(update_host.services == () for update_host in bench.snapshot.hosts)


def test_core_leaves_a_draining_host_after_a_checkpoint() -> None:
    bench = start_pool([2, 2], job())
    assert bench.roles()["w0"] == "core"
    bench.drain("host0")
    bench.settle()
    assert bench.roles()["w0"] == "core" and "w1" not in bench.roles()
    bench.update_job("job", has_checkpoint=True)
    bench.settle()
    assert set(bench.roles()) == {"w2", "w3"}
    assert sorted(bench.roles().values()) == ["core", "rollout"]


GONE_MS = 11_000


def update_host(bench: PlannerBench, name: str, **state: Any) -> None:
    hosts = (replace(h, **state) if h.name == name else h for h in bench.snapshot.hosts)
    bench.update(hosts=tuple(hosts))


def advance(bench: PlannerBench, ms: int) -> list[Decision]:
    bench.update(now_ms=bench.snapshot.now_ms + ms)
    return bench.settle()


def list_presence_reports(decisions: list[Decision]) -> list[ReportHostPresence]:
    return [one for one in decisions if isinstance(one, ReportHostPresence)]


def set_host_alive(bench: PlannerBench, name: str, alive: bool = False) -> None:
    update_host(bench, name, alive=alive)
    for worker in bench.snapshot.workers:
        if worker.host == name:
            bench.update_worker(worker.id, alive=alive)


def test_lost_host_is_reported_once_with_its_instances_and_again_on_return() -> None:
    bench = start_pool([2, 2], job(shards=4))
    there = {g.id for g in bench.snapshot.gangs if {"w2", "w3"} & set(g.workers)}
    services = bench.snapshot.hosts[1].services
    set_host_alive(bench, "host1")
    assert list_presence_reports(bench.settle()) == [], "its agent may only be starting again"
    [lost] = list_presence_reports(advance(bench, GONE_MS))
    assert (lost.host, lost.is_back) == ("host1", False)
    inputs = lost.rationale.inputs
    assert inputs["workers"] == ["w2", "w3"]
    assert {resident.partition(".")[0] for resident in inputs["residents"]} == there != set()
    assert inputs["services"] == list(services) != []
    assert list_presence_reports(advance(bench, GONE_MS)) == []
    assert bench.snapshot.hosts[1].services == ()
    set_host_alive(bench, "host1", alive=True)
    assert [(one.host, one.is_back) for one in list_presence_reports(bench.settle())] == [
        ("host1", True)
    ]
    set_host_alive(bench, "host1")
    bench.settle()
    assert len(list_presence_reports(advance(bench, GONE_MS))) == 1, "it has vanished once more"


def test_services_of_a_departed_host_move_at_once() -> None:
    bench = start_pool([2, 2], job(shards=4))
    assert bench.snapshot.hosts[1].services
    set_host_alive(bench, "host1")
    update_host(bench, "host1", drain_reason=HOST_LEFT)
    decisions = bench.settle()
    assert len(bench.snapshot.hosts[0].services) == 4
    assert list_presence_reports(decisions + advance(bench, GONE_MS)) == []


def test_small_host_gets_fewer_services() -> None:
    bench = start_pool([6, 2], job(shards=8))
    assert [len(one.services) for one in bench.snapshot.hosts] == [6, 2]


def test_single_shard_is_on_the_host_of_its_core() -> None:
    bench = start_pool([2, 2], job(shards=0))
    core = next(g.workers[0] for g in bench.snapshot.gangs for r in g.instances if r.core)
    core_host = next(w.host for w in bench.snapshot.workers if w.id == core)
    names = tuple(reversed(bench.snapshot.hosts))  # in any order
    for hosts in (bench.snapshot.hosts, names):
        bench.update(jobs=(job(shards=1),), hosts=tuple(PoolHost(h.name) for h in hosts))
        bench.settle()
        [one] = [h.name for h in bench.snapshot.hosts if h.services]
        assert one == core_host


def test_core_on_a_draining_host_moves_after_its_checkpoint() -> None:
    bench = start_pool([3, 1], job())
    update_host(bench, "host0", drain_reason="maintenance")
    bench.settle()
    assert bench.roles() == {"w0": "core+rollout"}, "by turns, as nothing else is where it computes"
    bench.update_job("job", has_checkpoint=True)
    bench.settle()
    assert bench.roles() == {"w3": "core+rollout"}


def test_core_without_a_checkpoint_leaves_a_draining_host_after_a_timeout() -> None:
    bench = start_pool([3, 1], job())
    update_host(bench, "host0", drain_reason="maintenance")
    bench.settle()
    advance(bench, 121_000)
    assert bench.roles() == {"w3": "core+rollout"}


def submit_request(bench: PlannerBench, **about: Any) -> list[str]:
    """Apply a request until the pool is at rest, and return the reasons of rejections."""
    bench.update(requests=(PoolRequest("op", about.pop("kind", "move"), **about),))
    return [d.reason for d in bench.settle() if isinstance(d, RejectRequest)]


def test_requested_move_is_pinned() -> None:
    bench = start_pool([4], job())
    assert submit_request(bench, worker="w1", role="training") == []
    assert bench.roles()["w1"] == "training"
    resident = dict(bench.list_instances())["w1"]
    assert resident.pinned
    run(bench, Plant(base_s=0.3, work_s=0.2), 20)
    assert bench.roles()["w1"] == "training", "the policy leaves it alone"


def test_worker_is_cordoned_and_uncordoned() -> None:
    bench = start_pool([3], job())
    submit_request(bench, worker="w2", role="idle")
    assert bench.roles() == {"w0": "core", "w1": "rollout"}
    submit_request(bench, worker="w2", role="rollout")
    assert bench.roles() == {"w0": "core", "w1": "rollout", "w2": "rollout"}


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"worker": "w9", "role": "rollout"}, "there is no worker w9"),
        ({"worker": "w1", "role": "dance"}, "dance is not a role"),
        ({"worker": "w0", "role": "rollout"}, "w0 is in the core of job"),
        ({"worker": "w2", "role": "training", "job": "x"}, "there is no job x"),
        ({"worker": "w1", "role": "rollout"}, "hosts the frozen models"),
        ({"kind": "drain", "host": "nowhere"}, "there is no host nowhere"),
    ],
)
def test_infeasible_request_is_rejected(about: dict[str, str], reason: str) -> None:
    bench = start_pool([4], job(needs_scoring=True))
    roles = bench.roles()
    refusals = submit_request(bench, **about)
    assert len(refusals) == 1 and reason in refusals[0]
    assert bench.roles() == roles


def test_worker_is_moved_to_another_job() -> None:
    bench = start_pool([6], job("a"), job("b", submitted_ms=1))
    worker = next(w for w, role in bench.roles("b").items() if role == "rollout")
    submit_request(bench, worker=worker, role="rollout", job="a")
    assert bench.roles("a")[worker] == "rollout"
    assert (bench.count_awake_workers("a"), bench.count_awake_workers("b")) == (3, 3), (
        "each keeps its share"
    )


def test_drain_completes_when_the_host_is_empty() -> None:
    bench = start_pool([2, 2], job(has_checkpoint=True))
    bench.drain("host0")
    bench.update(
        evictable_services=frozenset(
            n for update_host in bench.snapshot.hosts for n in update_host.services
        )
    )
    assert submit_request(bench, kind="drain", host="host0") == [""]
    assert set(bench.roles()) == {"w2", "w3"}
