"""Engines of a job on the workers of its core, by time slices: `pool.colocate`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshrl.common.job.config import JobConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import derive_requirements, shares_core_worker
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.feasibility import (
    explain_infeasible,
    explain_no_residency,
)
from meshrl.common.state.pool.workers.rows import Tier, TierBytes
from meshrl.common.state.pool.workers.settings import PoolSettings
from tests.unit.planner.pools import job, pool, start_pool


@pytest.mark.parametrize(
    ("hosts", "ranks", "roles"),
    [
        ([1], 1, ["core+rollout"]),
        ([3], 1, ["core+rollout", "rollout", "rollout"]),
        ([2], 2, ["core+rollout", "core+rollout"]),
        ([4], 3, ["core+rollout", "core+rollout", "core+rollout", "rollout"]),
    ],
)
def test_always_places_an_engine_on_each_worker_of_the_core(
    hosts: list[int], ranks: int, roles: list[str]
) -> None:
    bench = start_pool(hosts, job(colocate="always", ranks=ranks))
    assert list(bench.roles().values()) == roles
    sliced = {instance.id for _, instance in bench.list_instances() if instance.time_sliced}
    assert len(sliced) == 1 + ranks


def test_colocated_engine_that_is_lost_is_placed_again() -> None:
    bench = start_pool([3], job(colocate="always", ranks=2))
    core = next(r for _, r in bench.list_instances() if r.core)
    gangs = tuple(
        replace(gang, instances=tuple(r for r in gang.instances if r.core or 0 in r.ranks))
        for gang in bench.snapshot.gangs
    )
    bench.update(gangs=gangs)
    bench.settle()
    assert list(bench.roles().values()) == ["core+rollout", "core+rollout", "rollout"]
    assert core.id in {r.id for _, r in bench.list_instances()}


def test_colocated_core_sleeps_and_wakes_with_its_engines() -> None:
    bench = start_pool([2], job("a", colocate="always", ranks=2, has_checkpoint=True))
    urgent = job("b", phase=Phase.QUEUED, priority=5, min_workers=2, submitted_ms=9)
    bench.update(jobs=(*bench.snapshot.jobs, urgent))
    bench.settle()
    assert bench.count_awake_workers("b") == 2 and not bench.count_awake_workers("a")
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    assert list(bench.roles("a").values()) == ["core+rollout", "core+rollout"]
    assert all(r.tier == Tier.ACCELERATOR for _, r in bench.list_instances("a"))


def test_never_waits_for_a_worker_of_its_own_and_status_has_the_reason() -> None:
    jobs = [
        job("a", phase=Phase.QUEUED),
        job("b", phase=Phase.QUEUED, colocate="never", can_time_slice=False, submitted_ms=1),
    ]
    bench = start_pool([2], *jobs)
    assert bench.roles("b") == {}
    assert 'pool.colocate = "never"' in bench.snapshot.jobs[1].block_reason
    bench.update(jobs=bench.snapshot.jobs[1:])
    bench.settle()
    assert sorted(bench.roles("b").values()) == ["core", "rollout"]


def test_change_of_the_key_ends_and_begins_colocation() -> None:
    bench = start_pool([3], job())
    assert list(bench.roles().values()) == ["core", "rollout", "rollout"]
    requirements = bench.snapshot.jobs[0].requirements
    bench.update_job("job", requirements=replace(requirements, colocate="always"))
    bench.settle()
    assert list(bench.roles().values()) == ["core+rollout", "rollout", "rollout"]
    bench.update_job("job", requirements=requirements)
    bench.settle()
    assert list(bench.roles().values()) == ["core", "rollout", "rollout"]


def test_document_sets_what_engines_may_share() -> None:
    document = JobConfig().to_document()
    assert derive_requirements(document).colocate == "auto"
    del document["pool"]["colocate"]
    assert derive_requirements(document).can_time_slice
    never = derive_requirements(document | {"pool": document["pool"] | {"colocate": "never"}})
    assert not never.can_time_slice and never.worker_floor == 2
    always = document | {"pool": document["pool"] | {"colocate": "always"}}
    assert derive_requirements(always).worker_floor == 1
    assert shares_core_worker(JobConfig.from_document(always | {"mesh": {"workers": 3}}))


def test_always_is_rejected_where_it_can_never_hold() -> None:
    memory = RoleMemory(core=400, core_state=300, hybrid=200, engines={1: 100})
    always = job(colocate="always", memory=memory).requirements
    workers = pool([3]).workers
    assert explain_infeasible(always, workers, PoolSettings()) == ""
    assert "time slices" in explain_infeasible(always, workers, PoolSettings(time_slicing=False))
    wide = replace(always, tensor_parallel=(2,), can_time_slice=False)
    assert "rollout.tensor_parallel" in explain_infeasible(wide, workers, PoolSettings())
    small = TierBytes(accelerator=400, memory=50, disk=40)
    full = [replace(worker, budget=small) for worker in workers]
    assert "500 bytes" in explain_infeasible(always, full, PoolSettings())


def test_residency_needs_the_largest_slice_and_space_for_all() -> None:
    budget = TierBytes(accelerator=100, memory=50, disk=50)
    assert explain_no_residency(budget, [100, 100]) == ""
    assert "101 bytes" in explain_no_residency(budget, [101])
    assert "201 bytes" in explain_no_residency(budget, [100, 100], 1)
    assert explain_no_residency(replace(budget, disk=0), [100, 100, 100]) == ""
    assert explain_no_residency(TierBytes(), [1 << 50, 1 << 50]) == ""
