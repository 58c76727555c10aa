"""Moves by stage times and by hand: complete, late, failed; and what is remembered of them."""

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
from tests.unit.planner.plant import Plant, run, split, stepped
from tests.unit.planner.pools import LOOK_MS, Looks, begun, does, job, pool, settled

SLOW_TRAINER: dict[str, Any] = {"work_s": 4.0, "base_s": 0.005, "sequence_s": 0.0005}


def moved(looks: Looks, plant: Plant) -> PlaceInstance:
    """Return the move that helps a slow trainer, before it is carried out."""
    for _ in range(12):
        run(looks, plant, 1, ready=False)
        places = [d for d in looks.decisions if isinstance(d, PlaceInstance)]
        if places:
            [place] = places
            assert place.move is not None and place.rationale.rule == "stage_time"
            return place
    raise AssertionError("nothing moves")


def slow(workers: int = 4) -> tuple[Looks, Plant]:
    """Return a settled job whose trainer is slow, at its default split."""
    looks = begun([workers], job(steps_done=0))
    return looks, Plant(**SLOW_TRAINER)


def test_the_last_engine_helps_a_slow_trainer_and_the_rest_is_left_alone() -> None:
    looks, plant = slow()
    before = {r.id for _, r in looks.residents()}
    place = moved(looks, plant)
    after = {r.id for _, r in looks.residents()}
    assert looks.roles() == {"w0": "core", "w1": "rollout", "w2": "rollout", "w3": "training"}
    assert after - before == {place.instance.id} and len(before - after) == 1
    assert place.gang == "g3", "its workers stay in their gang"


def test_a_move_tells_what_the_others_did_meanwhile() -> None:
    looks, plant = slow()
    looks.job("job", instance_progress={"g0.0": 11, "g1.0": 100})
    place = moved(looks, plant)
    looks.job("job", instance_progress={"g0.0": 12, "g1.0": 180, place.instance.id: 3})
    looks.look()
    finish = next(d for d in looks.look() if isinstance(d, FinishMove))
    assert not finish.undone and not looks.snapshot.moves
    assert finish.details["others"] == {
        "g0.0": {"before": 11, "after": 12},
        "g1.0": {"before": 100, "after": 180},
    }
    assert finish.details["from"] == "rollout" and finish.details["to"] == "training"


@pytest.mark.parametrize("how", ["late", "failed"])
def test_a_move_that_does_not_arrive_is_undone_and_not_tried_again_at_once(how: str) -> None:
    looks, plant = slow()
    place = moved(looks, plant)
    if how == "late":
        move_ms = round(1000 * looks.snapshot.settings.move_timeout_s)
        looks.change(now_ms=looks.snapshot.now_ms + move_ms + 1)
    else:
        looks.change(
            gangs=tuple(
                replace(
                    gang,
                    instances=tuple(
                        does(r, InstancePhase.FAILED) if r.id == place.instance.id else r
                        for r in gang.instances
                    ),
                )
                for gang in looks.snapshot.gangs
            )
        )
    decisions = looks.look()
    assert next(d for d in decisions if isinstance(d, FinishMove)).undone
    assert list(looks.roles().values()) == ["core", "rollout", "rollout", "rollout"]
    run(looks, plant, 2)
    assert list(looks.roles().values()) == ["core", "rollout", "rollout", "rollout"]


def test_a_move_whose_worker_is_lost_ends() -> None:
    looks, plant = slow()
    moved(looks, plant)
    looks.worker("w3", alive=False)
    looks.look(ready=False)
    looks.change(now_ms=looks.snapshot.now_ms + 11_000)
    decisions = looks.settle()
    finish = next(d for d in decisions if isinstance(d, FinishMove))
    assert finish.undone and not looks.snapshot.moves


def test_two_jobs_move_at_once() -> None:
    looks = begun([8], job("a", steps_done=0), job("b", submitted_ms=1, steps_done=0))
    plants = {"a": Plant(**SLOW_TRAINER), "b": Plant(**SLOW_TRAINER)}
    at_once = 0
    for _ in range(12):
        took_s = max(stepped(looks, plant, name) for name, plant in plants.items())
        looks.change(now_ms=looks.snapshot.now_ms + round(1000 * took_s))
        looks.look(ready=False)
        at_once = max(at_once, len({move.rollback["job"] for move in looks.snapshot.moves}))
    assert at_once == 2


def test_a_job_that_has_not_warmed_up_is_left_alone() -> None:
    looks = begun([4], job(config=PlannerConfig(warmup_steps=100), steps_done=0))
    run(looks, Plant(**SLOW_TRAINER), 20)
    assert split(looks) == (3, 1)


def test_what_is_remembered_survives_its_record() -> None:
    looks, plant = slow()
    run(looks, plant, 20)
    looks.worker("w1", alive=False)
    looks.look()
    document = json.loads(json.dumps(looks.memory.encode()))
    assert PlannerMemory.decode(document).encode() == document
    assert looks.memory.missing_since == {"w1": looks.snapshot.now_ms - LOOK_MS}
    assert looks.memory.reset_after_outage().missing_since == {}


def test_helpers_that_a_core_takes_nothing_of_roll_out() -> None:
    looks = begun([4], job(config=PlannerConfig(training=2)))
    assert "training" in looks.roles().values()
    need = looks.snapshot.jobs[0].requirements
    looks.job("job", requirements=replace(need, allows_hybrids=False))
    decisions = looks.settle()
    assert sorted(looks.roles().values()) == ["core", "rollout", "rollout", "rollout"]
    assert next(d for d in decisions if isinstance(d, PlaceInstance)).rationale.rule == "unhelped"
    looks.job("job", requirements=need)
    looks.settle()
    run(looks, Plant(**SLOW_TRAINER), 12)
    assert "training" in looks.roles().values(), "it is helped again when that pays"


def paused(*hosts: int, **about: Any) -> Looks:
    """Return a job whose core has just been ordered to sleep, for a job that needs all workers."""
    looks = begun(hosts, job("a", **about))
    urgent = job(
        "b",
        phase=Phase.QUEUED,
        priority=5,
        min_workers=sum(hosts),
        submitted_ms=9,
        has_checkpoint=True,
    )
    looks.change(jobs=(*looks.snapshot.jobs, urgent))
    looks.look(ready=False)
    return looks


def failed(looks: Looks, tier: Tier) -> None:
    """Report that the instances that were to sleep at that tier have failed to."""
    gangs = [
        replace(
            gang,
            instances=tuple(
                does(r, InstancePhase.FAILED) if r.tier == tier else r for r in gang.instances
            ),
        )
        for gang in looks.snapshot.gangs
    ]
    looks.change(gangs=tuple(gangs))


def test_what_a_core_said_of_an_earlier_wish_does_not_count_for_the_next() -> None:
    looks = paused(1, has_checkpoint=True)
    failed(looks, Tier.DISK)
    for _ in range(3):
        looks.look(ready=False)
        assert looks.roles("a") == {"w0": "core@memory"}, "nobody has said yet how that goes"
    failed(looks, Tier.MEMORY)
    looks.look(ready=False)
    assert looks.roles("a") == {}, "its checkpoint is left"


def test_a_core_that_does_not_sleep_in_time_counts_as_failed_and_who_waits_is_told() -> None:
    looks = paused(1, has_checkpoint=True)
    told = [j.block_reason for j in looks.snapshot.jobs if j.id == "b"]
    assert told == ["waiting: its core needs a worker; not yet asleep: g0.0 of a"]
    late_ms = round(1000 * looks.snapshot.settings.move_timeout_s) + 1
    for roles in ({"w0": "core@memory"}, {}):
        looks.change(now_ms=looks.snapshot.now_ms + late_ms)
        looks.look(ready=False)
        assert looks.roles("a") == roles
    looks.settle()
    assert looks.workers_of("b") == 1 and looks.snapshot.jobs[1].block_reason == ""


def test_a_paused_core_leaves_a_host_that_drains_once_a_checkpoint_has_it() -> None:
    looks = paused(2, 2)
    looks.settle()
    looks.drain("host0")
    looks.change(requests=(PoolRequest("op", "drain", host="host0"),))
    looks.settle()
    looks.job("b", requirements=replace(looks.snapshot.jobs[1].requirements, min_workers=2))
    looks.settle()
    assert looks.roles("a") == {"w0": "core@disk"} and looks.snapshot.requests
    looks.job("a", has_checkpoint=True)
    looks.change(
        evictable_services=frozenset(n for host in looks.snapshot.hosts for n in host.services)
    )
    looks.settle()
    assert looks.roles("a") == {} and not looks.snapshot.requests


def test_a_job_gives_back_where_a_core_is_to_wake_and_keeps_its_engine() -> None:
    asleep = Instance("g1.0", "a", Role.TRAINING, core=True, tier=Tier.DISK)
    there = (
        Gang("g0", ("w0",), 1, (Instance("g0.0", "d", Role.TRAINING, core=True),), next_instance=1),
        Gang("g1", ("w1",), 1, (asleep, Instance("g1.1", "d", Role.ROLLOUT)), next_instance=2),
        Gang("g2", ("w2",), 1, (Instance("g2.0", "d", Role.ROLLOUT),), next_instance=1),
    )
    jobs = (job("d"), job("a", needs_rollout=False, max_workers=1, submitted_ms=1))
    before = replace(pool([3], *jobs, gangs_formed=3), gangs=tuple(map(settled, there)))
    looks = Looks(before)
    decisions = looks.look()
    assert [d.instance for d in decisions if isinstance(d, RemoveInstance)] == ["g1.1"]
    assert looks.roles("a") == {"w1": "core"}
    assert {r.id for _, r in looks.residents("d")} == {"g0.0", "g2.0"}
