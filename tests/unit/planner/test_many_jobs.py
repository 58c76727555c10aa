"""Several jobs on one pool: shares, preemption, pauses, and invariants of the decisions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.errors import Refused
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.demand.role_memory import RoleMemory
from meshrl.common.state.pool.scheduling.decisions import Decision, PlaceInstance
from meshrl.common.state.pool.scheduling.feasibility import count_min_workers, explain_infeasible
from meshrl.common.state.pool.store.snapshot_documents import decode_snapshot, encode_snapshot
from meshrl.common.state.pool.workers.rows import InstancePhase, Tier, TierBytes
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.admission.fair_shares import ShareBounds, fill_shares
from meshrl.services.planner.explain import get_decision_kind
from tests.load import scaled
from tests.unit.planner.pools import PlannerBench, job, pool, set_phase, start_pool


def test_second_job_takes_its_share_and_returns_it() -> None:
    bench = start_pool([6], job("a"))
    assert bench.count_awake_workers("a") == 6
    core = next(r for _, r in bench.list_instances("a") if r.core)
    bench.update(jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, submitted_ms=1)))
    bench.settle()
    assert (bench.count_awake_workers("a"), bench.count_awake_workers("b")) == (3, 3)
    assert core.id in {r.id for _, r in bench.list_instances("a")}, "its core was not touched"
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    assert bench.count_awake_workers("a") == 6


def test_higher_priority_pauses_a_job_that_resumes_later() -> None:
    bench = start_pool([4], job("a"))
    core = next(r for _, r in bench.list_instances("a") if r.core)
    urgent = job("b", phase=Phase.QUEUED, priority=5, min_workers=4, submitted_ms=9)
    bench.update(jobs=(*bench.snapshot.jobs, urgent))
    bench.settle()
    assert bench.count_awake_workers("b") == 4
    assert bench.roles("a") == {"w0": "core@disk"}
    assert bench.snapshot.jobs[0].block_reason.startswith("paused: it needs")
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    after = next(r for _, r in bench.list_instances("a") if r.core)
    assert (after.id, after.generation) == (core.id, core.generation), "the same process goes on"
    assert bench.count_awake_workers("a") == 4 and bench.snapshot.jobs[0].block_reason == ""


def test_worker_is_reassigned_only_after_its_instance_sleeps() -> None:
    bench = start_pool([2], job("a"))
    bench.update(
        jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, priority=5, min_workers=2))
    )
    bench.decide_once(ready=False)
    assert bench.roles("a") == {"w0": "core@disk"}
    assert "w0" not in bench.roles("b")
    assert bench.decide_once() == [], "it is asleep only now"
    bench.settle()
    assert set(bench.roles("b")) == {"w0", "w1"}


def test_starting_core_is_removed_unless_it_has_the_only_trained_state() -> None:
    urgent = job("b", phase=Phase.QUEUED, priority=5, min_workers=2)
    for about in ({"steps_done": 0}, {"steps_done": 9, "has_checkpoint": True}):
        bench = PlannerBench(pool([2], job("a", **about)))
        bench.decide_once(ready=False)
        bench.update(jobs=(*bench.snapshot.jobs, urgent))
        bench.decide_once(ready=False)
        assert bench.roles("a") == {} and set(bench.roles("b")) == {"w0", "w1"}
        bench.update(jobs=bench.snapshot.jobs[:1])
        bench.settle()
        assert bench.count_awake_workers("a") == 2, "it starts anew"
    bench = PlannerBench(pool([2], job("a", steps_done=9)))
    bench.decide_once(ready=False)
    bench.update(jobs=(*bench.snapshot.jobs, urgent))
    bench.decide_once(ready=False)
    assert bench.roles("a") == {"w0": "core@disk"}


def set_sleeping_phase(bench: PlannerBench, phase: InstancePhase) -> None:
    """Set the phase that instances report whose desired tier is disk."""
    gangs = [
        replace(
            gang,
            instances=tuple(
                set_phase(r, phase) if r.tier == Tier.DISK else r for r in gang.instances
            ),
        )
        for gang in bench.snapshot.gangs
    ]
    bench.update(gangs=tuple(gangs))


def test_core_that_died_asleep_blocks_no_job_and_wakes_in_place() -> None:
    bench = start_pool([2], job("a"))
    core = next(r for _, r in bench.list_instances("a") if r.core)
    bench.update(
        jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, priority=5, min_workers=2))
    )
    bench.decide_once(ready=False)
    set_sleeping_phase(bench, InstancePhase.GONE)
    bench.settle()
    assert bench.count_awake_workers("b") == 2 and bench.roles("a") == {"w0": "core@disk"}
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    after = next(r for _, r in bench.list_instances("a") if r.core)
    assert after.id == core.id and bench.count_awake_workers("a") == 2


def test_core_sleeps_in_memory_if_the_disk_is_full() -> None:
    bench = start_pool([2], job("a"))
    bench.update(
        jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, priority=5, min_workers=2))
    )
    bench.decide_once(ready=False)
    set_sleeping_phase(bench, InstancePhase.FAILED)
    bench.settle()
    assert bench.roles("a") == {"w0": "core@memory"}
    assert bench.count_awake_workers("b") == 2


def test_gang_of_a_sleeping_core_dissolves_only_after_a_checkpoint() -> None:
    bench = start_pool([2], job("a"))
    large = job("b", phase=Phase.QUEUED, priority=5, ranks=2, min_workers=2)
    bench.update(jobs=(*bench.snapshot.jobs, large))
    bench.settle()
    assert bench.roles("a") == {"w0": "core@disk"} and bench.count_awake_workers("b") == 0
    bench.update_job("a", has_checkpoint=True)
    bench.settle()
    assert bench.roles("a") == {} and bench.count_awake_workers("b") == 2
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    assert bench.count_awake_workers("a") == 2


def test_four_jobs_share_six_workers_by_time_slices() -> None:
    jobs = [job(id, phase=Phase.QUEUED, submitted_ms=at) for at, id in enumerate("abcd")]
    bench = start_pool([6], *jobs)
    roles = sorted(tuple(bench.roles(id).values()) for id in "abcd")
    assert roles == [("core", "rollout"), ("core", "rollout"), ("core+rollout",), ("core+rollout",)]


def test_engine_without_time_slicing_has_its_own_worker() -> None:
    """Let two such jobs share three workers: one waits; a job of another engine passes it."""
    jobs = [job(id, phase=Phase.QUEUED, submitted_ms=at) for at, id in enumerate("abc")]
    jobs[:2] = [
        replace(one, requirements=replace(one.requirements, can_time_slice=False))
        for one in jobs[:2]
    ]
    bench = start_pool([3], *jobs, settings=PoolSettings(jobs_per_gang=1))
    assert sorted(bench.roles("a").values()) == ["core", "rollout"]
    assert bench.roles("b") == {} and "it needs 2 workers" in bench.snapshot.jobs[1].block_reason
    assert list(bench.roles("c").values()) == ["core+rollout"]
    output = explain_infeasible(jobs[0].requirements, bench.snapshot.workers[:1], PoolSettings())
    assert "2 workers (1 for its core, 1 to roll out)" in output


# Of a model with 25 float32 parameters and two moments each.
MEMORY = RoleMemory(core=400, core_state=300, hybrid=200, engines={1: 100})


def test_engine_and_core_take_turns_if_the_tiers_together_hold_both() -> None:
    bench = PlannerBench(pool([1], job("a", memory=MEMORY)))
    small = TierBytes(accelerator=450, memory=20, disk=20)
    bench.update_worker("w0", budget=small)
    bench.settle()
    assert bench.roles("a") == {"w0": "core"}
    bench.update_worker("w0", budget=replace(small, memory=30))
    bench.settle()
    assert bench.roles("a") == {"w0": "core+rollout"}


def test_job_whose_engine_never_fits_beside_its_core_fails_with_the_figures() -> None:
    bench = PlannerBench(pool([1], job("a", phase=Phase.QUEUED, memory=MEMORY)))
    bench.update_worker("w0", budget=TierBytes(accelerator=399, memory=20, disk=20))
    needs, workers = bench.snapshot.jobs[0].requirements, bench.snapshot.workers
    assert "400 bytes" in explain_infeasible(needs, workers, PoolSettings())
    bench.update_worker("w0", budget=TierBytes(accelerator=400, memory=20, disk=20))
    workers = bench.snapshot.workers
    why = explain_infeasible(needs, workers, PoolSettings())
    assert "500 bytes" in why and "440 bytes" in why
    assert (
        explain_infeasible(replace(needs, can_time_slice=False), workers * 2, PoolSettings()) == ""
    )


def test_second_core_does_not_sleep_on_a_full_disk() -> None:
    """Check that of two cores that would sleep on the same worker, the second finds the disk
    full.
    """
    bench = PlannerBench(pool([1], job("a", memory=MEMORY)))
    budget = replace(bench.snapshot.workers[0].budget, disk=400)
    bench.update_worker("w0", budget=budget)
    bench.settle()
    for number, id in enumerate("bc", 1):
        jobs = (
            *bench.snapshot.jobs,
            job(id, memory=MEMORY, priority=number, submitted_ms=number),
        )
        bench.update(jobs=jobs)
        bench.settle()
    assert bench.roles("a") == {"w0": "core@disk"}
    assert bench.roles("b") == {"w0": "core@memory"}
    assert bench.roles("c") == {"w0": "core+rollout"}
    assert bench.snapshot.jobs[0].block_reason.endswith("beside c")


needs = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([1, 1, 1, 2]),
        "needs_scoring": st.booleans(),
        "can_time_slice": st.sampled_from([True, True, True, False]),
        "min_workers": st.sampled_from([0, 0, 3]),
        "max_workers": st.sampled_from([0, 0, 4]),
        "priority": st.integers(0, 1),
        "share": st.sampled_from([1.0, 3.0]),
    }
)
pools = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.lists(needs, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(["host", "host", "network"]),
)


def create_bench(drawn: tuple[Any, ...]) -> PlannerBench:
    hosts, job_sizes, turns, gangs = drawn
    jobs = [
        job(f"j{n}", phase=Phase.QUEUED, submitted_ms=n, has_checkpoint=True, **need)
        for n, need in enumerate(job_sizes)
    ]
    about = PoolSettings(time_slicing=turns, gang_scope=gangs, shortage_grace_s=1e6)
    return PlannerBench(pool(hosts, *jobs, settings=about))


def count_possible_workers(bench: PlannerBench, planned: PlannedJob) -> bool:
    return not explain_infeasible(
        planned.requirements, bench.snapshot.workers, bench.snapshot.settings
    )


@given(pools)
@settings(max_examples=60, deadline=None)
def test_decisions_converge_and_running_jobs_have_their_minimum(
    drawn: tuple[Any, ...],
) -> None:
    bench = create_bench(drawn)
    bench.settle()
    for planned in bench.snapshot.jobs:
        has = bench.count_awake_workers(planned.id)
        if planned.block_reason:
            assert has == 0
        elif has:
            assert has >= count_min_workers(
                planned.requirements, bench.snapshot.settings.time_slicing
            )
            roles = "+".join(bench.roles(planned.id).values())
            assert "core" in roles and "rollout" in roles
            assert not planned.requirements.max_workers or has <= planned.requirements.max_workers
        else:
            raise AssertionError(f"{planned.id} is said to run and has nothing")


@given(pools)
@settings(max_examples=40, deadline=None)
def test_every_feasible_job_runs_eventually(drawn: tuple[Any, ...]) -> None:
    """Check that all jobs run and end until none is left."""
    bench = create_bench(drawn)
    fits = {planned.id for planned in bench.snapshot.jobs if count_possible_workers(bench, planned)}
    ran: set[str] = set()
    for _ in range(len(bench.snapshot.jobs) + 1):
        bench.settle()
        runs = [j.id for j in bench.snapshot.jobs if bench.count_awake_workers(j.id)]
        ran.update(runs)
        remaining_jobs = tuple(j for j in bench.snapshot.jobs if j.id not in runs[:1])
        bench.update(jobs=remaining_jobs)
    assert ran == fits


@given(pools, st.integers(0, 7), st.data())
@settings(max_examples=40, deadline=None)
def test_decisions_converge_after_loss_and_return_of_any_worker(
    drawn: tuple[Any, ...], lost: int, data: st.DataObject
) -> None:
    bench = create_bench(drawn)
    bench.settle()
    worker = bench.snapshot.workers[lost % len(bench.snapshot.workers)].id
    bench.update_worker(worker, alive=False)
    bench.settle()
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    bench.settle()
    assert all(worker not in bench.roles(j.id) for j in bench.snapshot.jobs)
    bench.update_worker(worker, alive=True, token=99)
    bench.settle()
    if data.draw(st.booleans()):
        bench.drain("host0")
        bench.settle()


@given(pools)
@settings(max_examples=30, deadline=None)
def test_high_priority_job_gets_its_minimum_and_paused_jobs_resume(drawn: tuple[Any, ...]) -> None:
    bench = create_bench(drawn)
    bench.settle()
    ran = {j.id for j in bench.snapshot.jobs if bench.count_awake_workers(j.id)}
    total = len(bench.snapshot.workers)
    urgent = job("urgent", phase=Phase.QUEUED, priority=9, min_workers=total, submitted_ms=99)
    before = bench.snapshot.jobs
    bench.update(jobs=(*before, urgent))
    bench.settle()
    if count_possible_workers(bench, urgent):
        assert bench.count_awake_workers("urgent") == total
        assert all(j.block_reason for j in bench.snapshot.jobs if j.id != "urgent")
    bench.update(jobs=tuple(j for j in bench.snapshot.jobs if j.id != "urgent"))
    bench.settle()
    assert ran <= {j.id for j in bench.snapshot.jobs if bench.count_awake_workers(j.id)}


@given(st.integers(4, 12), st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=3))
@settings(max_examples=25, deadline=None)
def test_jobs_have_their_max_min_shares(workers: int, weights: list[float]) -> None:
    jobs = [job(f"j{n}", submitted_ms=n, share=weight) for n, weight in enumerate(weights)]
    if workers < 2 * len(jobs):
        return
    bench = start_pool([workers], *jobs)
    wanted = fill_shares(
        {j.id: ShareBounds(2, float("inf"), j.requirements.share) for j in jobs}, workers
    )
    assert {j.id: bench.count_awake_workers(j.id) for j in jobs} == wanted


def test_a_thousand_failing_jobs_leave_no_instances() -> None:
    bench = start_pool([4], job("a"))
    for number in range(200):
        infeasible = job(f"b{number}", phase=Phase.QUEUED, submitted_ms=number + 1)
        bench.update(jobs=(bench.snapshot.jobs[0], infeasible))
        bench.decide_once()
        bench.update(jobs=bench.snapshot.jobs[:1])
        bench.decide_once()
    bench.settle()
    assert bench.count_awake_workers("a") == 4
    residents = [r for _, r in bench.list_instances("a")]
    assert len(residents) == 4 and len(bench.snapshot.gangs) == 4


def test_instance_ids_are_never_reused() -> None:
    bench = PlannerBench(pool([3], job("a")))
    used_ids: list[str] = []
    for number in range(6):
        jobs = bench.snapshot.jobs[:1]
        more = (job(f"b{number}", submitted_ms=5),) if number % 2 else ()
        bench.update(jobs=(*jobs, *more))
        decisions = bench.settle()
        used_ids += [
            d.instance.id
            for d in decisions
            if isinstance(d, PlaceInstance) and d.instance.epoch == 1
        ]
    assert len(used_ids) == len(set(used_ids))


SNAPSHOT = {
    "now_ms": 60_000,
    "workers": [{"id": f"w{n}", "host": "a", "accelerator": "cpu:0", "token": n} for n in range(2)],
    "jobs": [{"id": "first", "phase": "queued"}, {"id": "second", "phase": "queued"}],
}


DECISIONS = [
    *("form", "dissolve", "place", "remove", "lose", "hostgone", "admit", "seed", "failjob"),
    *("serve", "finish", "decline", "judge"),
]


def run_explain(document: dict[str, Any]) -> str:
    """Return what the command prints about a snapshot."""
    return subprocess.run(
        [sys.executable, "-m", "meshrl.services.planner.explain"],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    ).stdout


@given(pools)
@settings(max_examples=15, deadline=None)
def test_snapshot_survives_json(drawn: tuple[Any, ...]) -> None:
    bench = create_bench(drawn)
    bench.settle()
    document = json.loads(json.dumps(encode_snapshot(bench.snapshot)))
    assert decode_snapshot(document) == bench.snapshot


def test_missing_field_of_a_snapshot_is_named() -> None:
    document = encode_snapshot(pool([1], job()))
    document["workers"][0]["colour"] = "red"
    with pytest.raises(Refused, match=r"workers\[0\] has no colour"):
        decode_snapshot(document)
    with pytest.raises(Refused, match="now_ms"):
        decode_snapshot({"workers": []})


def test_decision_names_in_json_are_stable() -> None:
    kinds = get_args(Decision)
    assert [get_decision_kind(kind.__new__(kind)) for kind in kinds] == DECISIONS


def test_explain_prints_each_decision_with_its_rule_and_inputs() -> None:
    output = run_explain(SNAPSHOT)
    assert "place g0.0: core of first on g0 in accelerator  [default entitled=1]" in output
    assert "place g1.1: rollout of second on g1 in accelerator in time slices" in output
    assert output.count("form g") == 2


def test_explain_prints_why_a_service_has_no_host() -> None:
    document = SNAPSHOT | {
        "hosts": [
            {"name": "a", "accepted_services": ["shards"]},
            {"name": "b", "accepted_services": [], "alive": False},
        ],
        "jobs": [
            {"id": "first", "phase": "training", "requirements": {"sandboxes": 2}},
            {"id": "second", "phase": "training"},
        ],
    }
    output = run_explain(document)
    assert output.splitlines()[-1] == (
        "nowhere sandbox/first/0, sandbox/first/1: no host accepts its sandboxes now: a accepts "
        "shards; b accepts no services"
    )
    assert "block first: paused: no host accepts its sandboxes now" in output
    assert "rollout/second/0" not in output.splitlines()[-1]
