"""Moves by stage times and by request: completed, late and failed ones, and their record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.scheduling.decisions import FinishMove, PlaceInstance, RemoveInstance
from meshrl.common.state.pool.scheduling.snapshot import PoolRequest
from meshrl.common.state.pool.workers.rows import Gang, Instance, InstancePhase, Role, Tier
from meshrl.services.planner.memory import PlannerMemory
from tests.unit.planner.plant import Plant, count_split, run, run_step
from tests.unit.planner.pools import (
    LOOK_MS,
    PlannerBench,
    job,
    pool,
    set_phase,
    set_reconciled,
    start_pool,
)

SLOW_TRAINER: dict[str, Any] = {"work_s": 4.0, "base_s": 0.005, "sequence_s": 0.0005}


def start_move(bench: PlannerBench, plant: Plant) -> PlaceInstance:
    """Return the move that helps a slow trainer, before it is carried out."""
    for _ in range(12):
        run(bench, plant, 1, ready=False)
        places = [d for d in bench.decisions if isinstance(d, PlaceInstance)]
        if places:
            [place] = places
            assert place.move is not None and place.rationale.rule == "stage_time"
            return place
    raise AssertionError("nothing moves")


def create_slow_job(workers: int = 4) -> tuple[PlannerBench, Plant]:
    """Return a settled job whose trainer is slow, at its default split."""
    bench = start_pool([workers], job(steps_done=0, colocate="never"))
    return bench, Plant(**SLOW_TRAINER)


def test_last_engine_becomes_a_hybrid_of_a_slow_trainer() -> None:
    bench, plant = create_slow_job()
    before = {r.id for _, r in bench.list_instances()}
    place = start_move(bench, plant)
    after = {r.id for _, r in bench.list_instances()}
    assert bench.roles() == {"w0": "core", "w1": "rollout", "w2": "rollout", "w3": "training"}
    assert after - before == {place.instance.id} and len(before - after) == 1
    assert place.gang == "g3", "its workers stay in their gang"


def test_finished_move_reports_work_of_other_instances() -> None:
    bench, plant = create_slow_job()
    bench.update_job("job", instance_progress={"g0.0": 11, "g1.0": 100})
    place = start_move(bench, plant)
    bench.update_job("job", instance_progress={"g0.0": 12, "g1.0": 180, place.instance.id: 3})
    bench.decide_once()
    finish = next(d for d in bench.decide_once() if isinstance(d, FinishMove))
    assert not finish.undone and not bench.snapshot.moves
    assert finish.details["others"] == {
        "g0.0": {"before": 11, "after": 12},
        "g1.0": {"before": 100, "after": 180},
    }
    assert finish.details["from"] == "rollout" and finish.details["to"] == "training"


@pytest.mark.parametrize("how", ["late", "failed"])
def test_late_or_failed_move_is_undone_and_not_retried_at_once(how: str) -> None:
    bench, plant = create_slow_job()
    place = start_move(bench, plant)
    if how == "late":
        move_ms = round(1000 * bench.snapshot.settings.move_timeout_s)
        bench.update(now_ms=bench.snapshot.now_ms + move_ms + 1)
    else:
        bench.update(
            gangs=tuple(
                replace(
                    gang,
                    instances=tuple(
                        set_phase(r, InstancePhase.FAILED) if r.id == place.instance.id else r
                        for r in gang.instances
                    ),
                )
                for gang in bench.snapshot.gangs
            )
        )
    decisions = bench.decide_once()
    assert next(d for d in decisions if isinstance(d, FinishMove)).undone
    assert list(bench.roles().values()) == ["core", "rollout", "rollout", "rollout"]
    run(bench, plant, 2)
    assert list(bench.roles().values()) == ["core", "rollout", "rollout", "rollout"]


def test_move_with_a_lost_worker_ends() -> None:
    bench, plant = create_slow_job()
    start_move(bench, plant)
    bench.update_worker("w3", alive=False)
    bench.decide_once(ready=False)
    bench.update(now_ms=bench.snapshot.now_ms + 11_000)
    decisions = bench.settle()
    finish = next(d for d in decisions if isinstance(d, FinishMove))
    assert finish.undone and not bench.snapshot.moves


def test_two_jobs_move_at_once() -> None:
    bench = start_pool([8], job("a", steps_done=0), job("b", submitted_ms=1, steps_done=0))
    plants = {"a": Plant(**SLOW_TRAINER), "b": Plant(**SLOW_TRAINER)}
    at_once = 0
    for _ in range(12):
        took_s = max(run_step(bench, plant, name) for name, plant in plants.items())
        bench.update(now_ms=bench.snapshot.now_ms + round(1000 * took_s))
        bench.decide_once(ready=False)
        at_once = max(at_once, len({move.rollback["job"] for move in bench.snapshot.moves}))
    assert at_once == 2


def test_job_makes_no_move_before_its_warmup_steps() -> None:
    bench = start_pool([4], job(config=PlannerConfig(warmup_steps=100), steps_done=0))
    run(bench, Plant(**SLOW_TRAINER), 20)
    assert count_split(bench) == (3, 1)


def test_planner_memory_survives_its_record() -> None:
    bench, plant = create_slow_job()
    run(bench, plant, 20)
    bench.update_worker("w1", alive=False)
    bench.decide_once()
    document = json.loads(json.dumps(bench.memory.encode()))
    assert PlannerMemory.decode(document).encode() == document
    assert bench.memory.missing_since == {"w1": bench.snapshot.now_ms - LOOK_MS}
    assert bench.memory.reset_after_outage().missing_since == {}


def test_hybrids_return_to_rollout_once_disallowed() -> None:
    bench = start_pool([4], job(config=PlannerConfig(training=2)))
    assert "training" in bench.roles().values()
    need = bench.snapshot.jobs[0].requirements
    bench.update_job("job", requirements=replace(need, allows_hybrids=False))
    decisions = bench.settle()
    assert sorted(bench.roles().values()) == ["core", "rollout", "rollout", "rollout"]
    assert next(d for d in decisions if isinstance(d, PlaceInstance)).rationale.rule == "unhelped"
    bench.update_job("job", requirements=need)
    bench.settle()
    run(bench, Plant(**SLOW_TRAINER), 12)
    assert "training" in bench.roles().values(), "it is helped again when that pays"


def pause_core(*hosts: int, **about: Any) -> PlannerBench:
    """Return a job whose core has just been ordered to sleep, for a job that needs all workers."""
    bench = start_pool(hosts, job("a", **about))
    urgent = job(
        "b",
        phase=Phase.QUEUED,
        priority=5,
        min_workers=sum(hosts),
        submitted_ms=9,
        has_checkpoint=True,
    )
    bench.update(jobs=(*bench.snapshot.jobs, urgent))
    bench.decide_once(ready=False)
    return bench


def fail_sleep(bench: PlannerBench, tier: Tier) -> None:
    """Report that the instances that were to sleep at that tier have failed to."""
    gangs = [
        replace(
            gang,
            instances=tuple(
                set_phase(r, InstancePhase.FAILED) if r.tier == tier else r for r in gang.instances
            ),
        )
        for gang in bench.snapshot.gangs
    ]
    bench.update(gangs=tuple(gangs))


def test_report_of_an_earlier_epoch_is_ignored() -> None:
    bench = pause_core(1, has_checkpoint=True)
    fail_sleep(bench, Tier.DISK)
    for _ in range(3):
        bench.decide_once(ready=False)
        assert bench.roles("a") == {"w0": "core@memory"}, "nobody has said yet how that goes"
    fail_sleep(bench, Tier.MEMORY)
    bench.decide_once(ready=False)
    assert bench.roles("a") == {}, "its checkpoint is left"


def test_core_that_sleeps_too_late_counts_as_failed_and_blocks_with_a_reason() -> None:
    bench = pause_core(1, has_checkpoint=True)
    block_reasons = [j.block_reason for j in bench.snapshot.jobs if j.id == "b"]
    assert block_reasons == ["waiting: its core needs a worker; not yet asleep: g0.0 of a"]
    late_ms = round(1000 * bench.snapshot.settings.move_timeout_s) + 1
    for roles in ({"w0": "core@memory"}, {}):
        bench.update(now_ms=bench.snapshot.now_ms + late_ms)
        bench.decide_once(ready=False)
        assert bench.roles("a") == roles
    bench.settle()
    assert bench.count_awake_workers("b") == 1 and bench.snapshot.jobs[1].block_reason == ""


def test_paused_core_leaves_a_draining_host_after_a_checkpoint() -> None:
    bench = pause_core(2, 2)
    bench.settle()
    bench.drain("host0")
    bench.update(requests=(PoolRequest("op", "drain", host="host0"),))
    bench.settle()
    bench.update_job("b", requirements=replace(bench.snapshot.jobs[1].requirements, min_workers=2))
    bench.settle()
    assert bench.roles("a") == {"w0": "core@disk"} and bench.snapshot.requests
    bench.update_job("a", has_checkpoint=True)
    bench.update(
        evictable_services=frozenset(n for host in bench.snapshot.hosts for n in host.services)
    )
    bench.settle()
    assert bench.roles("a") == {} and not bench.snapshot.requests


def test_core_without_a_checkpoint_stays_until_its_hosts_end_is_near() -> None:
    bench = start_pool([2, 2], job())
    [(worker, _)] = [(w, r) for w, r in bench.roles("job").items() if r == "core"]
    host = next(w.host for w in bench.snapshot.workers if w.id == worker)
    bench.drain(host)
    for left_s, stays in ((None, True), (0.0, True), (60.0, True), (8.0, False)):
        end_s = left_s and bench.snapshot.now_ms / 1000 + left_s
        bench.update(
            workers=tuple(
                replace(w, preempt_at_s=end_s if w.host == host else None)
                for w in bench.snapshot.workers
            )
        )
        bench.settle()
        assert (bench.roles("job").get(worker) == "core") == stays, left_s
    assert "core" in bench.roles("job").values(), "on the other host"


def test_job_returns_the_worker_of_a_waking_core_and_keeps_its_engine() -> None:
    asleep = Instance("g1.0", "a", Role.TRAINING, core=True, tier=Tier.DISK)
    there = (
        Gang("g0", ("w0",), 1, (Instance("g0.0", "d", Role.TRAINING, core=True),), next_instance=1),
        Gang("g1", ("w1",), 1, (asleep, Instance("g1.1", "d", Role.ROLLOUT)), next_instance=2),
        Gang("g2", ("w2",), 1, (Instance("g2.0", "d", Role.ROLLOUT),), next_instance=1),
    )
    jobs = (job("d"), job("a", needs_rollout=False, max_workers=1, submitted_ms=1))
    before = replace(pool([3], *jobs, gangs_formed=3), gangs=tuple(map(set_reconciled, there)))
    bench = PlannerBench(before)
    decisions = bench.decide_once()
    assert [d.instance for d in decisions if isinstance(d, RemoveInstance)] == ["g1.1"]
    assert bench.roles("a") == {"w1": "core"}
    assert {r.id for _, r in bench.list_instances("d")} == {"g0.0", "g2.0"}
