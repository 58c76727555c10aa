"""Engines of a job on the workers of its core, by time slices: `pool.colocate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from meshrl.common.job.config import JobConfig, PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.common.state.pool.demand.requirements import derive_requirements, shares_core_worker
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.decisions import ReportMoveOutcome
from meshrl.common.state.pool.scheduling.feasibility import (
    SliceBytes,
    count_shared_bytes,
    estimate_slice_bytes,
    explain_infeasible,
    explain_no_residency,
)
from meshrl.common.state.pool.workers.rows import Role, Tier, TierBytes
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.balance.colocation import predict_switch_s
from meshrl.services.planner.forecast.step_quantities import (
    StepDemand,
    StepRates,
    StepTerms,
    WorkerSplit,
)
from meshrl.services.planner.forecast.step_simulation import simulate_step_s
from meshrl.services.planner.memory import PlannerMemory
from tests.unit.planner.plant import Plant, run
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool


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


def make_whole(size_bytes: int) -> SliceBytes:
    return SliceBytes(size_bytes, size_bytes, size_bytes)


def test_residency_needs_the_largest_function_and_space_for_all() -> None:
    budget = TierBytes(accelerator=100, memory=50, disk=50)
    assert explain_no_residency(budget, [make_whole(100), make_whole(100)]) == ""
    assert "101 bytes" in explain_no_residency(budget, [make_whole(101)])
    assert "201 bytes" in explain_no_residency(budget, [make_whole(100), make_whole(100)], 1)
    assert explain_no_residency(replace(budget, disk=0), [make_whole(100)] * 3) == ""
    assert explain_no_residency(TierBytes(), [make_whole(1 << 50), make_whole(1 << 50)]) == ""
    # a pass takes 40 beside 80 of tensors, 30 of which are the optimizer's; an update takes 5
    core = SliceBytes(passes=120, update=85, largest=90)
    assert explain_no_residency(budget, [core]) == ""
    assert explain_no_residency(budget, [core, make_whole(80)]) == "", (
        "two cores never compute at once"
    )
    assert count_shared_bytes([core, core]) == 85 + 85 + 35
    assert "205 bytes" in explain_no_residency(budget, [core, core])


def test_core_needs_its_largest_function_in_time_slices() -> None:
    memory = RoleMemory(core=120, core_pass=120, core_update=85, core_moments=30, engines={1: 60})
    requirements = job(memory=memory).requirements
    assert estimate_slice_bytes(Role.TRAINING, True, 1, requirements) == (120, 85, 90)
    assert estimate_slice_bytes(Role.ROLLOUT, False, 1, requirements) == make_whole(60)
    unknown = job(memory=RoleMemory(core=120)).requirements
    assert estimate_slice_bytes(Role.TRAINING, True, 1, unknown) == make_whole(120)


def test_job_colocates_where_its_largest_function_fits() -> None:
    memory = RoleMemory(core=120, core_pass=120, core_update=85, core_moments=30, engines={1: 60})
    budget = TierBytes(accelerator=120, memory=40, disk=20)
    workers = [replace(worker, budget=budget) for worker in pool([1]).workers]
    fits = job(colocate="always", memory=memory).requirements
    assert explain_infeasible(fits, workers, PoolSettings()) == ""
    larger = replace(fits, memory=replace(memory, engines={1: 61}))
    assert "181 bytes" in explain_infeasible(larger, workers, PoolSettings())


# -- frozen models beside the core -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "about", "roles"),
    [
        ([1], {}, ["core+scoring+rollout"]),
        ([1], {"colocate": "always"}, ["core+scoring+rollout"]),
        ([1], {"needs_rollout": False}, ["core+scoring"]),
        ([2], {}, ["core+rollout", "scoring"]),
        ([2], {"ranks": 2}, ["core+scoring+rollout", "core+rollout"]),
        ([2], {"can_time_slice": False}, ["core+scoring", "rollout"]),
        ([2], {"needs_rollout": False}, ["core", "scoring"]),
        ([3], {"can_time_slice": False}, ["core", "scoring", "rollout"]),
    ],
)
def test_frozen_models_share_the_core_only_where_workers_are_few(
    hosts: list[int], about: dict[str, Any], roles: list[str]
) -> None:
    bench = start_pool(hosts, job(needs_scoring=True, **about))
    assert sorted(bench.roles().values()) == sorted(roles)
    requirements = bench.snapshot.jobs[0].requirements
    assert explain_infeasible(requirements, bench.snapshot.workers, PoolSettings()) == ""
    assert bench.snapshot.jobs[0].block_reason == ""


def test_frozen_models_leave_the_core_for_a_joining_worker_and_return() -> None:
    bench = start_pool([1], job(needs_scoring=True))
    bench.update(workers=bench.snapshot.workers + pool([2]).workers[1:])
    bench.settle()
    assert bench.roles() == {"w0": "core+rollout", "w1": "scoring"}
    bench.update_worker("w1", alive=False)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    assert bench.roles() == {"w0": "core+rollout+scoring"}
    assert all(r.time_sliced for _, r in bench.list_instances())


def test_frozen_models_give_their_worker_to_another_job_and_get_it_back() -> None:
    bench = start_pool([2], job("a", needs_scoring=True))
    assert bench.roles("a") == {"w0": "core+rollout", "w1": "scoring"}
    late = job("b", phase=Phase.QUEUED, submitted_ms=1)
    bench.update(jobs=(*bench.snapshot.jobs, late))
    bench.settle()
    assert bench.roles("a") == {"w0": "core+rollout+scoring"}
    assert bench.roles("b") == {"w1": "core+rollout"}
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    assert bench.roles("a") == {"w0": "core+rollout", "w1": "scoring"}


def test_frozen_models_follow_the_core_that_resumes_elsewhere() -> None:
    bench = start_pool([1, 1], job(needs_scoring=True, max_workers=1, has_checkpoint=True))
    assert bench.roles() == {"w0": "core+scoring+rollout"}
    bench.drain("host0")
    bench.settle()
    assert bench.roles() == {"w1": "core+scoring+rollout"}


def test_jobs_with_frozen_models_share_one_worker() -> None:
    jobs = [
        job(id, phase=Phase.QUEUED, submitted_ms=at, needs_scoring=True)
        for at, id in enumerate("ab")
    ]
    bench = start_pool([1], *jobs)
    assert [bench.roles(id) for id in "ab"] == [{"w0": "core+scoring+rollout"}] * 2


def test_never_and_meshes_without_time_slices_keep_a_worker_for_frozen_models() -> None:
    document = JobConfig().to_document()
    never = document | {"pool": document["pool"] | {"colocate": "never"}}
    assert not derive_requirements(never).can_share_scoring
    bound = job(needs_scoring=True, colocate="never", can_time_slice=False, can_share_scoring=False)
    workers = pool([2]).workers
    why = explain_infeasible(bound.requirements, workers, PoolSettings())
    assert "3 workers (1 for its core, 1 to roll out, 1 for its frozen models)" in why
    free = job(needs_scoring=True).requirements
    assert "3 workers" in explain_infeasible(free, workers, PoolSettings(time_slicing=False))


def test_frozen_models_that_do_not_fit_beside_the_core_are_rejected_with_the_figures() -> None:
    memory = RoleMemory(core=400, core_state=300, hybrid=200, scoring=60, engines={1: 100})
    requirements = job(needs_scoring=True, memory=memory).requirements
    [worker] = pool([1]).workers
    fits = replace(worker, budget=TierBytes(accelerator=400, memory=100, disk=60))
    assert explain_infeasible(requirements, [fits], PoolSettings()) == ""
    small = replace(worker, budget=TierBytes(accelerator=400, memory=100, disk=59))
    why = explain_infeasible(requirements, [small], PoolSettings())
    assert "frozen models" in why and "560 bytes" in why and "559 bytes" in why
    assert explain_infeasible(requirements, [small, small], PoolSettings()) == ""


def test_frozen_models_wait_with_the_figures_where_the_core_has_too_little_space() -> None:
    memory = RoleMemory(core=400, core_state=300, hybrid=200, scoring=60, engines={1: 100})
    waiting = job(needs_scoring=True, memory=memory, max_workers=1)
    bench = PlannerBench(pool([2], waiting))
    bench.update_worker("w0", budget=TierBytes(accelerator=400, memory=100, disk=50))
    bench.settle()
    assert bench.roles() == {"w0": "core+rollout"}
    reason = bench.snapshot.jobs[0].block_reason
    assert "frozen models" in reason and "560 bytes" in reason and "550 bytes" in reason


# -- the planner's choice --------------------------------------------------------------------------


@dataclass
class SharedPlant(Plant):
    """Job with one worker for its core, whose engine there slows both stages by `shared_drag`."""

    own_engines: int = 1
    shared_drag: float = 1.0

    def stages(self, engines: int, trainers: int) -> tuple[float, float]:
        rollout_s, train_s = super().stages(engines, trainers)
        drag = self.shared_drag if engines > self.own_engines else 1.0
        return rollout_s * drag, train_s * drag


def run_auto(drag: float, steps: int, **requirements: Any) -> tuple[PlannerBench, list[Any]]:
    """Run a job on two workers whose rollout takes most of a step; return its verdicts."""
    requirements |= {"allows_hybrids": False}
    bench = start_pool([2], job(steps_done=0, config=PlannerConfig(), **requirements))
    plant, verdicts = SharedPlant(base_s=0.05, work_s=0.5, shared_drag=drag), []
    for _ in range(steps):
        run(bench, plant, 1)
        verdicts += [d.details for d in bench.decisions if isinstance(d, ReportMoveOutcome)]
    return bench, verdicts


def test_auto_colocates_a_job_whose_rollout_takes_most_of_a_step() -> None:
    bench, verdicts = run_auto(1.0, 30)
    assert bench.roles() == {"w0": "core+rollout", "w1": "rollout"}
    assert [(one["to"], one["paid"]) for one in verdicts] == [("colocated", True)]
    assert verdicts[0]["predicted_s"] < 0.8 * verdicts[0]["before_s"]
    bench.memory = PlannerMemory.decode(bench.memory.encode())
    assert bench.settle() == [] and bench.memory.split_states["job"].is_colocated


def test_auto_undoes_a_change_that_did_not_pay() -> None:
    bench, verdicts = run_auto(3.0, 45)
    assert bench.roles() == {"w0": "core", "w1": "rollout"}
    assert (verdicts[0]["to"], verdicts[0]["undone"]) == ("colocated", True)
    assert bench.memory.split_states["job"].failed_moves["colocated"] >= 1
    assert not any(r.time_sliced for _, r in bench.list_instances())


@pytest.mark.parametrize("colocate", ["never", "always"])
def test_planner_changes_no_mode_that_the_job_file_sets(colocate: str) -> None:
    bench, verdicts = run_auto(1.0, 15, colocate=colocate)
    assert verdicts == [] and ("core+rollout" in bench.roles().values()) == (colocate == "always")


def test_switches_between_slices_take_the_time_of_the_bytes_that_do_not_fit() -> None:
    [worker] = pool([1]).workers
    assert predict_switch_s([worker], 1 << 41) == 0.0
    small = replace(worker, budget=TierBytes(accelerator=1_000_000_000))
    assert predict_switch_s([small], 1_500_000_000) == pytest.approx(1.0)
    gpu = replace(small, accelerator="cuda:0 NVIDIA H200")
    assert predict_switch_s([gpu], 1_500_000_000) == pytest.approx(1 / 12)
    measured = replace(small, copy_rates={"accelerator>memory": 2.5e8})
    assert predict_switch_s([measured], 1_500_000_000) == pytest.approx(2.5)
    both = replace(measured, copy_rates={**measured.copy_rates, "memory>accelerator": 5e8})
    assert predict_switch_s([gpu, both], 1_500_000_000) == pytest.approx(3.0)


def test_colocated_step_is_serial_on_shared_workers() -> None:
    demand = StepDemand(96.0, 50.0, 0.0, 4800.0)
    rates = StepRates(DecodeCurve("cpu", 1, 0.02), 1.0, gradient_s=2.0, fixed_s=0.0, core_share=0.0)
    terms = StepTerms(16, 6, 0, engine_slots=64, bin_tokens=0)
    rolls_s, split = 50 * 0.02, WorkerSplit(2, 1)
    assert simulate_step_s(demand, rates, split, terms) == pytest.approx(rolls_s + 2.0)
    shared = replace(split, shared_engines=1)
    assert simulate_step_s(demand, rates, shared, terms) == pytest.approx(rolls_s + 2.0)
    dear = replace(terms, switch_s=0.5)
    assert simulate_step_s(demand, rates, shared, dear) == pytest.approx(rolls_s + 2.0 + 1.0)
    overlapped = replace(terms, max_staleness=2)
    alone_s = simulate_step_s(demand, rates, split, overlapped)
    assert simulate_step_s(demand, rates, shared, overlapped) > 1.5 * alone_s, "slices alternate"
