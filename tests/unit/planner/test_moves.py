"""Moves by stage times and by hand: complete, late, failed; and what is remembered of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from common.job.config import PlannerConfig
from common.pool.decisions import Finish, Place
from common.pool.rows import Doing
from services.planner.memory import Memory
from tests.unit.planner.pools import LOOK_MS, Looks, counters, does, job, pool, seen

SLOW_TRAINER = {"rollout_s": 1.0, "train_s": 3.0}


def balanced(workers: int = 4) -> Looks:
    """A job whose trainer is slow, at the look before that is known."""
    looks = Looks(pool([workers], job()))
    looks.settle()
    for steps in (10, 11):
        seen(looks, steps, **SLOW_TRAINER)
        assert looks.look() == []
    return looks


def moved(looks: Looks) -> Place:
    seen(looks, 12, **SLOW_TRAINER)
    decisions = looks.look(ready=False)
    place = next(d for d in decisions if isinstance(d, Place))
    assert place.move is not None and place.why.rule == "stage_time"
    return place


def test_the_last_engine_helps_a_slow_trainer_and_the_rest_is_left_alone() -> None:
    looks = balanced()
    before = {r.id for _, r in looks.residents()}
    place = moved(looks)
    after = {r.id for _, r in looks.residents()}
    assert looks.roles() == {"w0": "core", "w1": "rollout", "w2": "rollout", "w3": "training"}
    assert after - before == {place.resident.id} and len(before - after) == 1
    assert place.gang == "g3", "its workers stay in their gang"


def test_a_move_tells_what_the_others_did_meanwhile() -> None:
    looks = balanced()
    looks.job("job", progress={"g0.0": 11, "g1.0": 100})
    place = moved(looks)
    looks.job("job", progress={"g0.0": 12, "g1.0": 180, place.resident.id: 3})
    looks.look()
    finish = next(d for d in looks.look() if isinstance(d, Finish))
    assert not finish.undone and not looks.snapshot.moves
    assert finish.details["others"] == {
        "g0.0": {"before": 11, "after": 12},
        "g1.0": {"before": 100, "after": 180},
    }
    assert finish.details["from"] == "rollout" and finish.details["to"] == "training"


@pytest.mark.parametrize("how", ["late", "failed"])
def test_a_move_that_does_not_arrive_is_undone_and_not_tried_again_at_once(how: str) -> None:
    looks = balanced()
    place = moved(looks)
    if how == "late":
        move_ms = round(1000 * looks.snapshot.settings.move_s)
        looks.change(now_ms=looks.snapshot.now_ms + move_ms + 1)
    else:
        looks.change(
            gangs=tuple(
                replace(
                    gang,
                    residents=tuple(
                        does(r, Doing.FAILED) if r.id == place.resident.id else r
                        for r in gang.residents
                    ),
                )
                for gang in looks.snapshot.gangs
            )
        )
    decisions = looks.look()
    assert next(d for d in decisions if isinstance(d, Finish)).undone
    assert list(looks.roles().values()) == ["core", "rollout", "rollout", "rollout"]
    seen(looks, 13, **SLOW_TRAINER)
    looks.settle()
    assert list(looks.roles().values()) == ["core", "rollout", "rollout", "rollout"]


def test_a_move_whose_worker_is_lost_ends() -> None:
    looks = balanced()
    moved(looks)
    looks.worker("w3", alive=False)
    looks.look(ready=False)
    looks.change(now_ms=looks.snapshot.now_ms + 11_000)
    decisions = looks.settle()
    finish = next(d for d in decisions if isinstance(d, Finish))
    assert finish.undone and not looks.snapshot.moves


def test_two_jobs_move_at_once() -> None:
    looks = Looks(pool([8], job("a"), job("b", submitted_ms=1)))
    looks.settle()
    for steps in (10, 11, 12):
        looks.job("a", counters=counters(steps, **SLOW_TRAINER, engines=3), steps_done=steps)
        seen(looks, steps, "b", **SLOW_TRAINER, engines=3)
        looks.look(ready=False)
    assert len(looks.snapshot.moves) == 2
    assert len({move.gang for move in looks.snapshot.moves}) == 2


def test_stage_times_of_processes_that_changed_are_not_believed() -> None:
    looks = balanced()
    looks.job("job", counters=replace(counters(12, **SLOW_TRAINER), sources=frozenset({"other"})))
    looks.change(now_ms=looks.snapshot.now_ms + 1000)
    assert looks.look() == []


def test_a_job_that_has_not_warmed_up_is_left_alone() -> None:
    config = PlannerConfig(warmup_steps=100)
    looks = Looks(pool([4], job(config=config)))
    looks.settle()
    for steps in (10, 12, 14):
        seen(looks, steps, **SLOW_TRAINER)
        assert looks.look() == []


def test_what_is_remembered_survives_its_record() -> None:
    looks = balanced()
    looks.worker("w1", alive=False)
    looks.look()
    text = json.dumps(looks.memory.document())
    assert Memory.of(json.loads(text)) == looks.memory
    assert looks.memory.missing == {"w1": looks.snapshot.now_ms - LOOK_MS}
    assert looks.memory.after_outage().missing == {}


def test_helpers_that_a_core_takes_nothing_of_roll_out() -> None:
    looks = Looks(pool([4], job(config=PlannerConfig(training=2))))
    looks.settle()
    assert "training" in looks.roles().values()
    need = looks.snapshot.jobs[0].need
    looks.job("job", need=replace(need, helped=False))
    decisions = looks.settle()
    assert sorted(looks.roles().values()) == ["core", "rollout", "rollout", "rollout"]
    assert next(d for d in decisions if isinstance(d, Place)).why.rule == "unhelped"
    looks.job("job", need=need)
    looks.settle()
    for steps in (10, 11, 12):
        seen(looks, steps, **SLOW_TRAINER)
        looks.look()
    assert "training" in looks.roles().values(), "it is helped again when that pays"
