"""A job whose training is foretold gets its first plan before its first step, and is judged by what
is measured then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.state.pool.demand.measured import LEVELS, Curve, Lengths, Measured, MeasuredWork
from meshrl.common.state.pool.placing.decisions import Judge
from meshrl.common.state.pool.store.reading import snapshot_document, snapshot_of
from meshrl.services.planner.balance.balancing import PLAYED, Plays
from meshrl.services.planner.balance.watch import SplitWatch
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.foretold import TrainingQuery, believed, training
from meshrl.services.planner.explain import predictions
from tests.unit.planner.plant import TRAJECTORIES, Plant, run, split
from tests.unit.planner.pools import Looks, begun, job, pool

SLOW = Plant(work_s=8.0, base_s=0.005, sequence_s=0.0005)  # rollout takes 1 s beside it
TOKENS = TRAJECTORIES * (SLOW.tokens + 10)  # of a step, prompts among them
SHAPE = ModelShape(28, 3584, 28, 4, 128, 7.6e9, 7.6e9)


def mesh(**about: Any) -> Looks:
    looks = begun([4], job(steps_done=0, **about))
    return looks


def gathered(plant: Plant, steps: float) -> Measured:
    """What has been published when the groups of so many steps have come, and no step was made."""
    each = TRAJECTORIES * steps
    token_s = plant.base_s + 20 * plant.sequence_s
    plant.total = MeasuredWork(
        groups=16.0 * steps,
        trajectories=each,
        sampled=each * plant.tokens,
        flight_s=each * plant.tokens * token_s,
        engine_s=each * plant.tokens * token_s,
        prompted=each * 10,
    )
    lengths = Lengths(256, (plant.tokens,) * len(LEVELS), 10.0)
    return replace(plant.measured, lengths=lengths)


def look(looks: Looks, plant: Plant, steps: float) -> None:
    looks.job("job", measured=gathered(plant, steps))
    looks.change(now_ms=looks.snapshot.now_ms + 2000)
    looks.look()


def judged(looks: Looks, plant: Plant, steps: int) -> list[dict[str, object]]:
    found = []
    for _ in range(steps):
        run(looks, plant, 1)
        found += [one.details for one in looks.decisions if isinstance(one, Judge)]
    return found


def test_a_declared_pace_is_planned_by_when_most_of_the_first_groups_have_come() -> None:
    looks, plant = mesh(training_pace=f"{TOKENS / SLOW.work_s:.0f}/100"), replace(SLOW)
    look(looks, plant, 0.5)
    look(looks, plant, 1.0)
    assert split(looks) == (3, 1), "the long ones have not come yet"
    look(looks, plant, 2.5)
    assert split(looks)[1] > 1
    [verdict] = judged(looks, plant, 25)
    assert verdict["policy"] == "opening" and verdict["step"] == 0 and verdict["paid"]
    assert verdict["expected_s"] == pytest.approx(plant.step_s(3, 1), rel=0.15)
    assert verdict["observed_s"] == pytest.approx(plant.step_s(*split(looks)), rel=0.01)


def test_looks_between_steps_take_no_play_from_what_is_to_be_judged() -> None:
    looks, plant = mesh(training_pace=f"{TOKENS / SLOW.work_s:.0f}/100"), replace(SLOW)
    look(looks, plant, 2.5)
    found = []
    for _ in range(20):
        found += judged(looks, plant, 1)
        for _ in range(8):
            looks.change(now_ms=looks.snapshot.now_ms + 250)
            looks.look()
            found += [one.details for one in looks.decisions if isinstance(one, Judge)]
    assert [one["policy"] for one in found] == ["opening"]


def test_a_look_with_a_model_s_shape_is_read_back_as_it_was() -> None:
    looks = mesh(shape=SHAPE, training_pace="100/100")
    assert snapshot_of(snapshot_document(looks.snapshot)) == looks.snapshot


def test_a_pace_that_is_not_kept_is_found_out_and_the_move_undone() -> None:
    """Declared as slow, it trains fast: engines are what lacks then."""
    looks, plant = mesh(training_pace=f"{TOKENS / 8.0:.0f}/100"), replace(SLOW, work_s=0.2)
    plant.sequence_s = 0.001
    look(looks, plant, 2.5)
    assert split(looks)[1] > 1
    [verdict, *_] = judged(looks, plant, 40)
    assert not verdict["paid"] and verdict["undone"]
    assert split(looks) == (3, 1)


def test_nothing_is_planned_of_what_nobody_has_measured_or_declared() -> None:
    looks, plant = mesh(), replace(SLOW)
    look(looks, plant, 2.5)
    assert split(looks) == (3, 1)
    held = mesh(training_pace="not one")
    look(held, plant, 2.5)
    assert split(held) == (3, 1), "a pace that this version does not know"


def test_training_is_foretold_by_pace_or_by_the_shape_on_a_profile() -> None:
    paced = training(TrainingQuery("m", "cpu", None, "4000/100"), 128, 8000)
    assert paced is not None and (paced.work_s, paced.fixed_s) == (2.0, 0.1)
    asked = TrainingQuery("m", "NVIDIA H100 80GB HBM3", SHAPE, "")
    found = training(asked, 128, 128 * 1024)
    assert found is not None
    arithmetic_s = 6 * SHAPE.parameters * 128 * 1024 / (0.4 * 989e12)
    assert found.work_s == pytest.approx(arithmetic_s, rel=0.3) and 0 < found.fixed_s < 1
    assert training(replace(asked, kind="a toaster"), 128, 8000) is None
    assert training(replace(asked, shape=None), 128, 8000) is None


def test_a_profile_is_believed_once_it_was_held_against_a_measurement() -> None:
    asked = TrainingQuery("m", "NVIDIA H100 80GB HBM3", SHAPE, "")
    none = Correction()
    assert believed(asked, 128, 8000, none) is None
    foretold = training(asked, 128, 8000)
    assert foretold is not None
    checked = none.seen(asked.key, foretold.work_s, 2 * foretold.work_s)
    found = believed(asked, 128, 8000, checked)
    assert found is not None and found.work_s == pytest.approx(2 * foretold.work_s)
    shared = replace(asked, kind="cpu")
    assert believed(shared, 128, 8000, none.seen(shared.key, 1.0, 1.0)) is None


def test_what_a_job_has_measured_lets_the_next_one_of_the_same_model_be_planned_at_once() -> None:
    looks, plant = Looks(pool([4], job(steps_done=0))), replace(SLOW)
    about = {"model": "m", "shape": SHAPE, "training_pace": ""}
    looks.change(
        workers=tuple(replace(w, accelerator="cuda:0 NVIDIA H100") for w in looks.snapshot.workers)
    )
    looks.settle()
    looks.job("job", **about)
    run(looks, plant, 14)
    factor = next(iter(looks.memory.correction.factors.items()))
    assert factor[0].role == "training" and factor[1].count > 0
    [line] = [one for one in predictions(looks.memory) if "gradients on one" in one]
    assert "NVIDIA H100" in line and "observed 8 s" in line
    again = mesh(**about)
    again.change(workers=looks.snapshot.workers)
    again.memory = replace(again.memory, correction=looks.memory.correction)
    fresh = replace(SLOW)
    look(again, fresh, 2.5)
    assert split(again)[1] > 1, "before it has made a step"


def test_curves_without_steps_say_nothing() -> None:
    looks = mesh(training_pace="100/100")
    measured = gathered(replace(SLOW), 2.5)
    looks.job("job", measured=replace(measured, curves=(Curve("cpu", 1, 0.0),)))
    looks.look()
    assert split(looks) == (3, 1)


def test_of_many_jobs_a_few_are_played_at_a_look_and_each_gets_its_turn() -> None:
    watches, now_ms, seen = {f"j{n}": SplitWatch() for n in range(10)}, 100_000, []
    for _ in range(10):
        plays = Plays(now_ms)
        for name in sorted(watches, key=lambda name: watches[name].played_ms):
            if taken := plays.take(watches[name]):
                watches[name] = taken
                seen.append(name)
        assert len(seen) <= PLAYED * (1 + (now_ms - 100_000) // 1000)
        now_ms += 1000
    assert min(seen.count(name) for name in watches) >= 2
