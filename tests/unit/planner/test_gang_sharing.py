"""Cores of several jobs on one gang, by request and instead of a pause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshrl.common.base.files.offload_media import make_segment_key
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.decisions import RejectRequest
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.workers.process_names import role_process_name
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.admission.fair_shares import ShareBounds, divide_pool, fill_shares
from meshrl.services.planner.memory import PlannerMemory
from tests.unit.planner.pools import PlannerBench, job, start_pool

MEMORY = RoleMemory(core=400, core_state=300, hybrid=200, engines={1: 100})


def queued(id: str, at: int, **other: Any) -> PlannedJob:
    return job(id, phase=Phase.QUEUED, submitted_ms=at, **other)


def place(bench: PlannerBench, guest: str, partner: str) -> str:
    """Request a place with another job; return the reason of a rejection."""
    request = PoolRequest("op", "place", job=guest, partner=partner)
    bench.update(requests=(*bench.snapshot.requests, request))
    answers = [d for d in bench.decide_once() if isinstance(d, RejectRequest)]
    bench.settle()
    return answers[0].reason


# -- instead of a pause ----------------------------------------------------------------------------


def test_job_without_workers_shares_the_gang_of_another() -> None:
    bench = start_pool([1], queued("a", 0), queued("b", 1), queued("c", 2))
    assert bench.roles("a") == bench.roles("b") == {"w0": "core+rollout"}
    assert bench.roles("c") == {} and bench.snapshot.jobs[2].block_reason.startswith("waiting")
    bench.update(jobs=bench.snapshot.jobs[1:])
    bench.settle()
    assert bench.roles("b") == bench.roles("c") == {"w0": "core+rollout"}
    bench.update(jobs=bench.snapshot.jobs[1:])
    bench.settle()
    assert bench.roles("c") == {"w0": "core+rollout"}


def test_processes_of_two_jobs_on_one_worker_have_different_names() -> None:
    bench = start_pool([2], queued("a", 0, ranks=2), queued("b", 1, ranks=2))
    names = [
        role_process_name(instance, index)
        for id in "ab"
        for _, instance in bench.list_instances(id)
        for index in range(len(instance.ranks))
    ]
    assert len(names) == 8 and len(set(names)) == 8
    assert len(set(map(make_segment_key, names))) == 8, "nor do their offloaded tensors mix"


def test_guest_of_a_smaller_priority_waits_instead() -> None:
    bench = start_pool([1], queued("a", 0, priority=1), queued("b", 1))
    assert bench.roles("b") == {} and bench.snapshot.jobs[1].block_reason.startswith("waiting")


def test_job_of_higher_priority_pauses_the_other_and_shares_nothing_with_it() -> None:
    bench = start_pool([2], job("a", ranks=2, has_checkpoint=True))
    bench.update(jobs=(*bench.snapshot.jobs, queued("b", 1, ranks=2, priority=1)))
    bench.settle()
    assert bench.count_awake_workers("b") == 2 and not bench.count_awake_workers("a")


@pytest.mark.parametrize("colocate", ["auto", "never"])
def test_both_jobs_must_allow_to_share(colocate: str) -> None:
    other = queued("b", 1, ranks=2, colocate=colocate, can_time_slice=colocate == "auto")
    bench = start_pool([2], queued("a", 0, ranks=2), other)
    assert bool(bench.roles("b")) == (colocate == "auto")


def test_jobs_that_do_not_fit_together_are_paused_as_before() -> None:
    jobs = (queued("a", 0, memory=MEMORY), queued("b", 1, memory=MEMORY))
    bench = start_pool([1], *jobs)
    for disk, shares in ((299, False), (300, True)):
        bench = PlannerBench(replace(bench.snapshot, gangs=(), jobs=jobs))
        bench.update_worker("w0", budget=TierBytes(accelerator=400, memory=300, disk=disk))
        bench.settle()
        assert bool(bench.roles("b")) == shares


def test_setting_of_one_job_per_gang_queues_jobs() -> None:
    jobs = (queued("a", 0), queued("b", 1))
    bench = start_pool([1], *jobs, settings=PoolSettings(jobs_per_gang=1))
    assert bench.roles("b") == {}
    bench = start_pool([1], *jobs, queued("c", 2), settings=PoolSettings(jobs_per_gang=3))
    assert all(bench.roles(id) for id in "abc")


def test_guest_leaves_when_a_worker_returns() -> None:
    bench = start_pool([2], queued("a", 0), queued("b", 1, has_checkpoint=True))
    bench.update_worker("w1", alive=False)
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    assert bench.roles("a") == bench.roles("b") == {"w0": "core+rollout"}
    bench.update_worker("w1", alive=True, token=99)
    bench.settle()
    assert {**bench.roles("a"), **bench.roles("b")} == {"w0": "core+rollout", "w1": "core+rollout"}
    assert len(bench.roles("a")) == len(bench.roles("b")) == 1


def test_first_job_joins_the_workers_of_a_running_guest() -> None:
    # The worker of the first job is lost; the second has no checkpoint and cannot leave.
    bench = start_pool([2], queued("a", 0, has_checkpoint=True), queued("b", 1))
    [(first, core)] = [(w, r) for w, r in bench.list_instances("a") if r.core]
    kept = next(r for _, r in bench.list_instances("b") if r.core)
    bench.update_worker(first, alive=False)
    for _ in range(2):
        bench.update(now_ms=bench.snapshot.now_ms + 11_000)
        bench.settle()
    assert bench.roles("a") == bench.roles("b") != {}
    after = next(r for _, r in bench.list_instances("b") if r.core)
    assert (after.id, after.generation) == (kept.id, kept.generation) and core.id != after.id


def test_core_that_is_alone_again_computes_without_time_slices() -> None:
    bench = start_pool([2], queued("a", 0, ranks=2, needs_rollout=False))
    bench.update(jobs=(*bench.snapshot.jobs, queued("b", 1, ranks=2, needs_rollout=False)))
    bench.settle()
    assert [r.time_sliced for id in "ab" for _, r in bench.list_instances(id)] == [True, True]
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    assert [r.time_sliced for _, r in bench.list_instances("a")] == [False]


def test_third_job_gets_the_worker_that_a_guest_without_a_checkpoint_cannot_use() -> None:
    bench = start_pool([1], queued("a", 0), queued("b", 1))
    assert bench.roles("a") == bench.roles("b") == {"w0": "core+rollout"}
    joined = replace(bench.snapshot.workers[0], id="w1", accelerator="cpu:1", token=2, gang="")
    bench.update(workers=(*bench.snapshot.workers, joined))
    bench.update(jobs=(*bench.snapshot.jobs, queued("c", 2)))
    bench.settle()
    assert bench.roles("b") == {"w0": "core+rollout"}, "steps in no checkpoint stay"
    assert bench.roles("c") == {"w1": "core+rollout"}
    bench.update_job("b", has_checkpoint=True)
    assert bench.settle() == [], "nor is the third job paused when it could leave"


def test_guest_stays_while_workers_gather_after_a_restart_of_the_head() -> None:
    bench = start_pool([1], job("a"), job("b", submitted_ms=1))
    assert bench.roles("b") == {"w0": "core+rollout"}
    bench.memory = PlannerMemory()
    bench.update(up_since_ms=bench.snapshot.now_ms)
    assert bench.decide_once() == []
    bench.update(up_since_ms=0)
    assert bench.settle() == []


def test_job_whose_engines_do_not_fit_beside_its_core_reports_why() -> None:
    bench = start_pool([1], job("a", memory=MEMORY, has_checkpoint=True))
    bench.update(gangs=())
    bench.update_worker("w0", budget=TierBytes(accelerator=400, memory=50, disk=49))
    bench.settle()
    assert bench.roles("a") == {"w0": "core"}
    why = bench.snapshot.jobs[0].block_reason
    assert why.startswith("waiting: its core has no engine") and "500 bytes" in why
    bench.update_worker("w0", budget=TierBytes(accelerator=400, memory=50, disk=50))
    bench.settle()
    assert bench.roles("a") == {"w0": "core+rollout"} and not bench.snapshot.jobs[0].block_reason


# -- by request ------------------------------------------------------------------------------------


def test_request_places_a_core_with_another_job_and_apart_again() -> None:
    bench = start_pool([4], job("a"), job("b", submitted_ms=1, has_checkpoint=True))
    assert place(bench, "b", "a") == ""
    there = {id: bench.roles(id) for id in "ab"}
    assert there["a"]["w0"] == there["b"]["w0"] == "core"
    assert sorted(len(roles) for roles in there.values()) == [2, 3], "each has engines of its own"
    assert bench.memory.requested_partners == {"b": "a"}
    bench.memory = PlannerMemory.decode(bench.memory.encode())
    bench.settle()
    assert {id: bench.roles(id) for id in "ab"} == there, "the next leader keeps it"
    assert next(r for _, r in bench.list_instances("b") if r.core).pinned
    assert place(bench, "b", "") == ""
    assert len({*bench.roles("a"), *bench.roles("b")}) == 4
    cores = [r for id in "ab" for _, r in bench.list_instances(id) if r.core]
    assert not any(r.time_sliced for r in cores)


def test_requested_guest_without_a_checkpoint_moves_once_it_has_one() -> None:
    bench = start_pool([4], job("a"), job("b", submitted_ms=1))
    assert place(bench, "b", "a") == ""
    assert not set(bench.roles("a")) & set(bench.roles("b"))
    bench.update_job("b", has_checkpoint=True)
    bench.settle()
    assert len(set(bench.roles("a")) & set(bench.roles("b"))) == 1


def test_requests_that_can_never_hold_are_rejected_with_the_figures() -> None:
    budget = TierBytes(accelerator=400, memory=100, disk=100)
    jobs = [job("a", memory=MEMORY), job("b", memory=MEMORY, submitted_ms=1), job("c", ranks=2)]
    bench = start_pool([8], *jobs)
    for worker in bench.snapshot.workers:
        bench.update_worker(worker.id, budget=budget)
    assert "1000 bytes" in place(bench, "b", "a") and not bench.memory.requested_partners
    assert "2 ranks" in place(bench, "c", "a")
    assert "no job x" in place(bench, "a", "x")
    assert "itself" in place(bench, "a", "a")
    assert "not placed with" in place(bench, "a", "")
    bench.update(settings=PoolSettings(jobs_per_gang=1))
    assert "pool.jobs_per_gang" in place(bench, "b", "c")


def test_gang_takes_no_more_requested_jobs_than_allowed() -> None:
    jobs = [job(id, submitted_ms=at, has_checkpoint=True) for at, id in enumerate("abc")]
    bench = start_pool([6], *jobs)
    assert place(bench, "b", "a") == ""
    assert "pool.jobs_per_gang is 2" in place(bench, "c", "a")
    assert "placed with a; place c with a" in place(bench, "c", "b")
    assert "place b apart" in place(bench, "a", "b")
    assert "place them apart" in place(bench, "a", "c")


def test_job_that_is_placed_apart_without_free_workers_shares_no_longer_by_request() -> None:
    bench = start_pool([1], *(job(id, submitted_ms=at) for at, id in enumerate("ab")))
    assert place(bench, "b", "a") == "" and bench.roles("b")
    bench.update_job("b", has_checkpoint=True)
    bench.update(gangs=())
    bench.settle()
    assert next(r for _, r in bench.list_instances("b") if r.core).pinned
    assert place(bench, "b", "") == ""
    assert bench.roles("a") == bench.roles("b") == {"w0": "core+rollout"}
    assert not next(r for _, r in bench.list_instances("b") if r.core).pinned


def test_requested_guest_runs_alone_while_its_partner_is_paused() -> None:
    jobs = [job("a", has_checkpoint=True), job("b", submitted_ms=1, has_checkpoint=True)]
    bench = start_pool([4], *jobs)
    assert place(bench, "b", "a") == ""
    urgent = queued("c", 9, priority=1, min_workers=3, max_workers=3)
    bench.update(jobs=(*bench.snapshot.jobs, urgent))
    bench.settle()
    assert bench.count_awake_workers("c") == 3
    assert bench.roles("a") == bench.roles("b") and len(bench.roles("a")) == 1
    bench.update(jobs=tuple(j for j in bench.snapshot.jobs if j.id != "a"))
    bench.settle()
    assert list(bench.roles("b").values()) == ["core+rollout"]
    assert bench.memory.requested_partners == {}
    assert not any(r.pinned for _, r in bench.list_instances("b")), "the request has ended"


def test_guest_colocates_with_its_engine_if_both_are_requested() -> None:
    bench = start_pool([3], job("a"), job("b", submitted_ms=1, has_checkpoint=True))
    assert place(bench, "b", "a") == ""
    needs = replace(bench.snapshot.jobs[1].requirements, colocate="always", max_workers=1)
    bench.update_job("b", requirements=needs)
    bench.settle()
    assert bench.roles("b") == {"w0": "core+rollout"}
    assert bench.roles("a") == {"w0": "core", "w1": "rollout", "w2": "rollout"}
    assert all(r.tier == Tier.ACCELERATOR for _, r in bench.list_instances("b"))


# -- shares ----------------------------------------------------------------------------------------


def test_shared_workers_count_half_for_each_job() -> None:
    host, guest = ShareBounds(2, 99, 1.0, -0.5), ShareBounds(1, 99, 1.0, 0.5)
    other = ShareBounds(2, 99, 1.0)
    assert fill_shares({"a": host, "b": guest, "c": other}, 9) == {"a": 4, "b": 2, "c": 3}
    assert fill_shares({"a": host, "b": guest}, 3) == {"a": 2, "b": 1}


def test_guest_has_the_workers_that_it_shares_beside_its_own() -> None:
    found = divide_pool([job("a"), job("b")], {"host": 5}, {}, True, "host", {"b": "a"})
    assert found.workers == {"a": 3, "b": 3} and found.core_places == {"a": "host"}
    assert found.get_companions("a") == ["b"] and found.get_companions("b") == ["a"]
    gone = divide_pool([job("b")], {"host": 5}, {}, True, "host", {"b": "a"})
    assert gone.workers == {"b": 5} and gone.partners == {}
