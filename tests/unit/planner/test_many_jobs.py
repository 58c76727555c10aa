"""Several jobs on one pool: sharing, preemption, pauses, and properties of all of it."""

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
from meshrl.common.state.pool.scheduling.decisions import Decision, PlaceInstance
from meshrl.common.state.pool.scheduling.feasibility import count_min_workers, explain_infeasible
from meshrl.common.state.pool.store.snapshot_documents import decode_snapshot, encode_snapshot
from meshrl.common.state.pool.workers.rows import InstancePhase, Tier
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.admission.fair_shares import ShareBounds, fill_shares
from meshrl.services.planner.explain import get_decision_kind
from tests.load import scaled
from tests.unit.planner.pools import PlannerBench, job, pool, set_phase, start_pool


def test_a_second_job_takes_its_share_and_gives_it_back() -> None:
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


def test_a_higher_priority_pauses_a_lower_one_which_comes_back_bit_by_bit() -> None:
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


def test_a_worker_is_not_given_away_before_who_sleeps_there_is_asleep() -> None:
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


def test_a_core_that_still_starts_makes_room_unless_it_alone_has_what_was_trained() -> None:
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


def sleepers_do(bench: PlannerBench, doing: InstancePhase) -> None:
    """Set the phase that instances report whose desired tier is disk."""
    gangs = [
        replace(
            gang,
            instances=tuple(
                set_phase(r, doing) if r.tier == Tier.DISK else r for r in gang.instances
            ),
        )
        for gang in bench.snapshot.gangs
    ]
    bench.update(gangs=tuple(gangs))


def test_a_core_that_has_died_asleep_holds_nobody_up_and_wakes_where_it_was() -> None:
    bench = start_pool([2], job("a"))
    core = next(r for _, r in bench.list_instances("a") if r.core)
    bench.update(
        jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, priority=5, min_workers=2))
    )
    bench.decide_once(ready=False)
    sleepers_do(bench, InstancePhase.GONE)
    bench.settle()
    assert bench.count_awake_workers("b") == 2 and bench.roles("a") == {"w0": "core@disk"}
    bench.update(jobs=bench.snapshot.jobs[:1])
    bench.settle()
    after = next(r for _, r in bench.list_instances("a") if r.core)
    assert after.id == core.id and bench.count_awake_workers("a") == 2


def test_where_the_disk_is_full_a_core_sleeps_in_memory() -> None:
    bench = start_pool([2], job("a"))
    bench.update(
        jobs=(*bench.snapshot.jobs, job("b", phase=Phase.QUEUED, priority=5, min_workers=2))
    )
    bench.decide_once(ready=False)
    sleepers_do(bench, InstancePhase.FAILED)
    bench.settle()
    assert bench.roles("a") == {"w0": "core@memory"}
    assert bench.count_awake_workers("b") == 2


def test_a_gang_is_dissolved_under_a_sleeper_only_when_a_checkpoint_has_it() -> None:
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


def test_four_jobs_on_six_workers_by_turns() -> None:
    jobs = [job(id, phase=Phase.QUEUED, submitted_ms=at) for at, id in enumerate("abcd")]
    bench = start_pool([6], *jobs)
    roles = sorted(tuple(bench.roles(id).values()) for id in "abcd")
    assert roles == [("core", "rollout"), ("core", "rollout"), ("core+rollout",), ("core+rollout",)]


def test_an_engine_that_takes_no_turns_has_a_worker_of_its_own() -> None:
    """Two such jobs on three workers: one waits; one of another engine goes before it."""
    jobs = [job(id, phase=Phase.QUEUED, submitted_ms=at) for at, id in enumerate("abc")]
    jobs[:2] = [
        replace(one, requirements=replace(one.requirements, can_time_slice=False))
        for one in jobs[:2]
    ]
    bench = start_pool([3], *jobs)
    assert sorted(bench.roles("a").values()) == ["core", "rollout"]
    assert bench.roles("b") == {} and "it needs 2 workers" in bench.snapshot.jobs[1].block_reason
    assert list(bench.roles("c").values()) == ["core+rollout"]
    told = explain_infeasible(jobs[0].requirements, bench.snapshot.workers[:1], PoolSettings())
    assert "2 workers (1 for its core, 1 to roll out)" in told


def test_engine_and_core_do_not_share_an_accelerator_that_has_not_the_bytes() -> None:
    jobs = [job("a", parameter_bytes=100)]
    bench = PlannerBench(pool([1], *jobs))
    small = replace(bench.snapshot.workers[0].budget, accelerator=450)
    bench.update_worker("w0", budget=small)
    bench.settle()
    assert bench.roles("a") == {"w0": "core"}
    bench.update_worker("w0", budget=replace(small, accelerator=500))
    bench.settle()
    assert bench.roles("a") == {"w0": "core+rollout"}


def test_two_cores_do_not_sleep_on_a_disk_that_has_room_for_one() -> None:
    """Check that of two cores that would sleep on the same worker, the second finds the disk
    full.
    """
    bench = PlannerBench(pool([1], job("a", parameter_bytes=100)))
    budget = replace(bench.snapshot.workers[0].budget, disk=400)
    bench.update_worker("w0", budget=budget)
    bench.settle()
    for number, id in enumerate("bc", 1):
        jobs = (
            *bench.snapshot.jobs,
            job(id, parameter_bytes=100, priority=number, submitted_ms=number),
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


def looks_at(drawn: tuple[Any, ...]) -> PlannerBench:
    hosts, asked, turns, gangs = drawn
    jobs = [
        job(f"j{n}", phase=Phase.QUEUED, submitted_ms=n, has_checkpoint=True, **need)
        for n, need in enumerate(asked)
    ]
    about = PoolSettings(time_slicing=turns, gang_scope=gangs, shortage_grace_s=1e6)
    return PlannerBench(pool(hosts, *jobs, settings=about))


def possible(bench: PlannerBench, planned: PlannedJob) -> bool:
    return not explain_infeasible(
        planned.requirements, bench.snapshot.workers, bench.snapshot.settings
    )


@given(pools)
@settings(max_examples=60, deadline=None)
def test_a_constant_snapshot_settles_and_every_job_that_runs_has_its_floor(
    drawn: tuple[Any, ...],
) -> None:
    bench = looks_at(drawn)
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
def test_every_job_that_fits_alone_runs_in_the_end(drawn: tuple[Any, ...]) -> None:
    """Check that jobs run and end in turn until none is left."""
    bench = looks_at(drawn)
    fits = {planned.id for planned in bench.snapshot.jobs if possible(bench, planned)}
    ran: set[str] = set()
    for _ in range(len(bench.snapshot.jobs) + 1):
        bench.settle()
        runs = [j.id for j in bench.snapshot.jobs if bench.count_awake_workers(j.id)]
        ran.update(runs)
        kept = tuple(j for j in bench.snapshot.jobs if j.id not in runs[:1])
        bench.update(jobs=kept)
    assert ran == fits


@given(pools, st.integers(0, 7), st.data())
@settings(max_examples=40, deadline=None)
def test_the_loss_and_the_return_of_any_worker_settle(
    drawn: tuple[Any, ...], lost: int, data: st.DataObject
) -> None:
    bench = looks_at(drawn)
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
def test_a_priority_gets_its_least_and_paused_jobs_come_back(drawn: tuple[Any, ...]) -> None:
    bench = looks_at(drawn)
    bench.settle()
    ran = {j.id for j in bench.snapshot.jobs if bench.count_awake_workers(j.id)}
    total = len(bench.snapshot.workers)
    urgent = job("urgent", phase=Phase.QUEUED, priority=9, min_workers=total, submitted_ms=99)
    before = bench.snapshot.jobs
    bench.update(jobs=(*before, urgent))
    bench.settle()
    if possible(bench, urgent):
        assert bench.count_awake_workers("urgent") == total
        assert all(j.block_reason for j in bench.snapshot.jobs if j.id != "urgent")
    bench.update(jobs=tuple(j for j in bench.snapshot.jobs if j.id != "urgent"))
    bench.settle()
    assert ran <= {j.id for j in bench.snapshot.jobs if bench.count_awake_workers(j.id)}


@given(st.integers(4, 12), st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=3))
@settings(max_examples=25, deadline=None)
def test_jobs_have_the_workers_that_max_min_gives_them(workers: int, weights: list[float]) -> None:
    jobs = [job(f"j{n}", submitted_ms=n, share=weight) for n, weight in enumerate(weights)]
    if workers < 2 * len(jobs):
        return
    bench = start_pool([workers], *jobs)
    wanted = fill_shares(
        {j.id: ShareBounds(2, float("inf"), j.requirements.share) for j in jobs}, workers
    )
    assert {j.id: bench.count_awake_workers(j.id) for j in jobs} == wanted


def test_a_thousand_jobs_that_fail_at_once_leave_nothing() -> None:
    bench = start_pool([4], job("a"))
    for number in range(200):
        doomed = job(f"b{number}", phase=Phase.QUEUED, submitted_ms=number + 1)
        bench.update(jobs=(bench.snapshot.jobs[0], doomed))
        bench.decide_once()
        bench.update(jobs=bench.snapshot.jobs[:1])
        bench.decide_once()
    bench.settle()
    assert bench.count_awake_workers("a") == 4
    residents = [r for _, r in bench.list_instances("a")]
    assert len(residents) == 4 and len(bench.snapshot.gangs) == 4


def test_ids_of_residents_are_never_used_again() -> None:
    bench = PlannerBench(pool([3], job("a")))
    seen: list[str] = []
    for number in range(6):
        jobs = bench.snapshot.jobs[:1]
        more = (job(f"b{number}", submitted_ms=5),) if number % 2 else ()
        bench.update(jobs=(*jobs, *more))
        decisions = bench.settle()
        seen += [
            d.instance.id
            for d in decisions
            if isinstance(d, PlaceInstance) and d.instance.epoch == 1
        ]
    assert len(seen) == len(set(seen))


LOOK = {
    "now_ms": 60_000,
    "workers": [{"id": f"w{n}", "host": "a", "accelerator": "cpu:0", "token": n} for n in range(2)],
    "jobs": [{"id": "first", "phase": "queued"}, {"id": "second", "phase": "queued"}],
}


DECISIONS = [
    *("form", "dissolve", "place", "remove", "lose", "hostgone", "admit", "failjob", "serve"),
    *("finish", "decline", "judge"),
]


def explained(look: dict[str, Any]) -> str:
    """Return what the command prints about a snapshot."""
    return subprocess.run(
        [sys.executable, "-m", "meshrl.services.planner.explain"],
        input=json.dumps(look),
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=True,
    ).stdout


@given(pools)
@settings(max_examples=15, deadline=None)
def test_a_look_is_read_back_as_it_was_written(drawn: tuple[Any, ...]) -> None:
    bench = looks_at(drawn)
    bench.settle()
    document = json.loads(json.dumps(encode_snapshot(bench.snapshot)))
    assert decode_snapshot(document) == bench.snapshot


def test_what_a_look_lacks_is_named() -> None:
    document = encode_snapshot(pool([1], job()))
    document["workers"][0]["colour"] = "red"
    with pytest.raises(Refused, match=r"workers\[0\] has no colour"):
        decode_snapshot(document)
    with pytest.raises(Refused, match="now_ms"):
        decode_snapshot({"workers": []})


def test_the_names_of_decisions_in_json_do_not_change() -> None:
    kinds = get_args(Decision)
    assert [get_decision_kind(kind.__new__(kind)) for kind in kinds] == DECISIONS


def test_each_decision_is_told_with_its_rule_and_figures() -> None:
    told = explained(LOOK)
    assert "place g0.0: core of first on g0 in accelerator  [default entitled=1]" in told
    assert "place g1.1: rollout of second on g1 in accelerator by turns" in told
    assert told.count("form g") == 2


def test_why_a_service_is_nowhere_is_told_whether_or_not_something_is_decided() -> None:
    look = LOOK | {
        "hosts": [
            {"name": "a", "accepted_services": ["shards"]},
            {"name": "b", "accepted_services": [], "alive": False},
        ],
        "jobs": [
            {"id": "first", "phase": "training", "requirements": {"sandboxes": 2}},
            {"id": "second", "phase": "training"},
        ],
    }
    told = explained(look)
    assert told.splitlines()[-1] == (
        "nowhere sandbox/first/0, sandbox/first/1: no host takes its sandboxes now: "
        "a takes shards; b takes no services"
    )
    assert "hold first: paused: no host takes its sandboxes now" in told
    assert "rollout/second/0" not in told.splitlines()[-1]
