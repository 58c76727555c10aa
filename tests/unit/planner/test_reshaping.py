"""Engines get the degrees that the lengths of trajectories ask for, and keep them where it pays."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.pool.placing.decisions import Judge
from meshrl.services.planner.balance.standing import split_of
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.explain import predictions
from meshrl.services.planner.forecast import degrees
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.pool.draft import Draft
from tests.unit.planner.pools import Looks, begun, job
from tests.unit.planner.tall import SHORT, SLOTS, Tall, degrees_of, helpers_of, run

ONES = [1] * 7
LONG = Tall()
JOB = job(model="m")


def mesh(workers: int = 8, allowed: tuple[int, ...] = (1, 2, 4), **config: object) -> Looks:
    about: dict[str, Any] = {"steps_done": 0, "slots": SLOTS, "config": PlannerConfig(**config)}  # type: ignore[arg-type]
    looks = begun([workers], job(degrees=allowed, model="m", max_staleness=0, **about))
    return looks


def told(looks: Looks, plant: Tall, steps: int) -> list[dict[str, Any]]:
    """The verdicts of so many steps."""
    found = []
    for _ in range(steps):
        run(looks, plant, 1)
        found += [one.details for one in looks.decisions if isinstance(one, Judge)]
    return found


def takes_s(looks: Looks, plant: Tall) -> float:
    return sum(plant.stages(degrees_of(looks), helpers_of(looks)))


@pytest.mark.deep
def test_a_long_tail_leads_to_a_mixture_that_pays_and_stays() -> None:
    looks, plant = mesh(), replace(LONG)
    assert degrees_of(looks) == ONES
    [verdict] = told(looks, plant, 60)
    assert len(set(degrees_of(looks))) > 1, "some of several workers, some of one"
    assert verdict["paid"] and verdict["policy"] == "lengths"
    # What is foretold knows that nobody knows which are long; the plant has each where it belongs.
    assert verdict["predicted_s"] == pytest.approx(verdict["observed_s"], rel=0.12)
    assert verdict["from"] == "rollout of 1,1,1,1,1,1,1"
    assert takes_s(looks, plant) < 0.5 * plant.rollout_s(ONES)


@pytest.mark.deep
def test_gangs_that_are_slower_than_predicted_are_split_again_and_stay_so() -> None:
    looks, plant = mesh(), replace(LONG, drag=4.0)
    [verdict] = told(looks, plant, 80)
    assert verdict["undone"] and verdict["predicted_s"] < verdict["observed_s"]
    assert degrees_of(looks) == ONES and helpers_of(looks) == 0
    assert looks.memory.watches["job"].failures == {"degrees": 1}


@pytest.mark.deep
def test_short_trajectories_are_left_to_engines_of_one_worker() -> None:
    looks, plant = mesh(), Tall(SHORT, sequence_s=0.01, waits=0.5)
    assert told(looks, plant, 60) == [] and degrees_of(looks) == ONES
    assert "degrees" in looks.memory.watches["job"].explained["verdict"] or (
        "rollout of" in looks.memory.watches["job"].explained["verdict"]
    )


@pytest.mark.deep
def test_helpers_come_with_degrees_where_training_takes_longer() -> None:
    looks, plant = mesh(), replace(LONG, work_s=60.0)
    verdicts = told(looks, plant, 60)
    assert verdicts and all(one["paid"] for one in verdicts)
    assert helpers_of(looks) >= 2 and max(degrees_of(looks)) > 1
    assert takes_s(looks, plant) < 0.4 * sum(plant.stages(ONES, 0))


def test_nothing_is_reshaped_without_lengths_or_where_the_split_is_held() -> None:
    looks, plant = mesh(moves=False), replace(LONG)
    run(looks, plant, 20)
    assert degrees_of(looks) == ONES
    assert degrees_of(mesh(allowed=(1, 2))) == ONES


@pytest.mark.rotating(2)
def test_one_degree_alone_leaves_engines_as_they_are() -> None:
    looks = mesh(9, allowed=(2,))
    run(looks, replace(LONG), 40)
    assert set(degrees_of(looks)) == {2}


@pytest.mark.rotating(2)
def test_a_wish_is_remembered_and_pursued_over_looks_until_all_is_there() -> None:
    looks, plant = mesh(), replace(LONG)
    for _ in range(40):
        run(looks, plant, 1, ready=False)
        document = json.loads(json.dumps(looks.memory.document()))
        assert PlannerMemory.of(document).document() == document
        looks.look()
    assert looks.memory.watches["job"].wish is None and looks.snapshot.moves == ()
    assert max(degrees_of(looks)) > 1


@pytest.mark.rotating(3)
@pytest.mark.parametrize("lost", ["w1", "w3", "w7"])
def test_a_worker_that_is_lost_meanwhile_ends_in_engines_of_the_others(lost: str) -> None:
    looks, plant = mesh(), replace(LONG)
    run(looks, plant, 3)
    looks.worker(lost, alive=False, token=0)
    run(looks, plant, 25)
    assert sum(degrees_of(looks)) + helpers_of(looks) >= 4 and degrees_of(looks)
    looks.worker(lost, alive=True, token=99)
    run(looks, plant, 40)
    assert takes_s(looks, plant) < 0.6 * plant.rollout_s(ONES)
    assert looks.memory.watches["job"].wish is None


def test_what_was_predicted_of_a_degree_is_shown_beside_what_was_measured() -> None:
    looks, plant = mesh(), replace(LONG, drag=1.3)
    run(looks, plant, 12)
    lines = [one for one in predictions(looks.memory) if "rollout:4 on cpu" in one]
    assert len(lines) == 1 and "observed" in lines[0]
    factor = looks.memory.correction.factor(degrees.key("m", ("cpu", 4)))
    assert factor.value == pytest.approx(1.3, rel=0.01)


def test_curves_of_degrees_that_nobody_has_are_those_of_one_worker_corrected() -> None:
    one = LONG.curve(1)
    known = degrees.noted({}, [one])
    none = Correction()
    four = degrees.curve(("cpu", 4), known, JOB, none)
    assert four is not None and four.base_s == pytest.approx(LONG.curve(4).base_s)
    off = none.seen(degrees.key("m", ("cpu", 4)), 1.0, 2.0)
    slower = degrees.curve(("cpu", 4), known, JOB, off)
    assert slower is not None and slower.step_s(8) == pytest.approx(2 * four.step_s(8))
    paced = degrees.curve(("cpu", 4), known, replace(JOB, pace="a100-7b"), none)
    assert paced is not None and paced.base_s != four.base_s
    assert degrees.curve(("gpu", 4), known, JOB, none) is None
    measured = degrees.noted(known, [LONG.curve(4)])
    assert degrees.curve(("cpu", 4), measured, JOB, off) == LONG.curve(4)


def test_each_rank_of_a_core_counts_as_one_that_trains() -> None:
    looks = begun([8], job(degrees=(1, 2), ranks=3, model="m"))
    (one,) = looks.snapshot.jobs
    draft = Draft(looks.snapshot, looks.snapshot.workers)
    split = split_of(one, draft.team(one.id))
    assert (split.engines, split.trainers) == (len(degrees_of(looks)), 3 + helpers_of(looks))
