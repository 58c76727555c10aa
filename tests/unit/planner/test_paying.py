"""What a move is predicted to bring is measured, and a move that brings nothing is undone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.encoding.plain import plain, restored
from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.pool.demand.measured import Curve, Measured, MeasuredWork
from meshrl.common.state.pool.placing.decisions import Decision, Judge
from meshrl.common.state.pool.placing.snapshot import PoolHost
from meshrl.services.planner.balance.trials import Verdict
from meshrl.services.planner.forecast.accounts import Account
from meshrl.services.planner.forecast.degrees import noted
from meshrl.services.planner.memory import PlannerMemory
from tests.unit.planner.plant import Plant, run, split
from tests.unit.planner.pools import Looks, begun, job

SLOW_TRAINER = Plant(work_s=4.0, base_s=0.005, sequence_s=0.0005)


def mesh(workers: int = 4, **config: object) -> Looks:
    about: dict[str, Any] = {"steps_done": 0, "config": PlannerConfig(**config)}  # type: ignore[arg-type]
    looks = begun([workers], job(**about))
    return looks


def judged(decisions: list[Decision]) -> list[dict[str, object]]:
    return [one.details for one in decisions if isinstance(one, Judge)]


def told(looks: Looks, plant: Plant, steps: int) -> list[dict[str, Any]]:
    """The verdicts of so many steps."""
    found = []
    for _ in range(steps):
        run(looks, plant, 1)
        found += judged(looks.decisions)
    return found


def test_a_move_that_pays_is_judged_by_what_it_was_to_bring() -> None:
    looks, plant = mesh(), replace(SLOW_TRAINER)
    [verdict] = told(looks, plant, 25)
    assert split(looks) == (2, 2)
    assert verdict["paid"] and not verdict["undone"]
    assert verdict["before_s"] == pytest.approx(plant.step_s(3, 1), rel=0.01)
    assert verdict["observed_s"] == pytest.approx(plant.step_s(2, 2), rel=0.01)
    assert verdict["expected_s"] == pytest.approx(verdict["before_s"], rel=0.01)
    assert verdict["predicted_s"] == pytest.approx(verdict["observed_s"], rel=0.15)


def test_a_move_that_slows_everybody_down_is_undone_and_asked_more_of_next_time() -> None:
    looks, plant = mesh(), replace(SLOW_TRAINER, work_s=3.0, drag=2.5)
    verdicts = told(looks, plant, 60)
    assert split(looks) == (3, 1)
    assert [one["paid"] for one in verdicts] == [False] and verdicts[0]["undone"]
    assert verdicts[0]["regret_s"] > 0
    watch = looks.memory.watches["job"]
    assert watch.failures == {"training": 1} and watch.bias["training"] > 1


def test_demand_that_grows_meanwhile_is_not_held_against_a_move() -> None:
    looks, plant = mesh(), replace(SLOW_TRAINER)
    while looks.memory.watches.get("job") is None or looks.memory.watches["job"].trial is None:
        run(looks, plant, 1)
    before_s = plant.step_s(3, 1)
    plant.tokens, plant.work_s = 2.2 * plant.tokens, 2.2 * plant.work_s
    [verdict] = told(looks, plant, 15)
    assert plant.step_s(2, 2) > before_s, "a step takes longer than before the move"
    assert verdict["paid"] and verdict["expected_s"] > 1.5 * before_s


def test_an_engine_more_brings_nothing_where_latency_binds() -> None:
    """Few trajectories, slow tools: engines are nearly empty, and rollout is late all the same."""
    looks, plant = mesh(5), Plant(flight=24.0, sequence_s=1e-5, tool_s=4.0, work_s=3.0)
    before = plant.stages(4, 1)
    assert before[0] > 1.15 * before[1], "the stage times are out of balance"
    helped = mesh(5, training=2)
    assert told(helped, plant, 40) == [] or split(helped)[0] <= 4
    assert told(looks, plant, 40) == [], "nothing moves that brings nothing"


def test_several_workers_move_at_once() -> None:
    looks, plant = mesh(8), Plant(work_s=16.0, base_s=0.005, sequence_s=1e-4)
    run(looks, plant, 8)
    assert split(looks)[1] >= 4, "not one after the other"


def test_nothing_moves_where_the_host_has_no_core_left() -> None:
    looks, plant = mesh(), replace(SLOW_TRAINER)
    looks.change(hosts=(PoolHost("host0", cores=2.0, busy_cores=1.9),))
    assert told(looks, plant, 30) == [] and split(looks) == (3, 1)
    assert looks.memory.watches["job"].explained["binds"] == "cores"
    looks.change(hosts=(PoolHost("host0", cores=2.0, busy_cores=0.5),))
    run(looks, plant, 20)
    assert split(looks) == (2, 2)


def test_a_split_that_is_to_be_held_is_held() -> None:
    looks = mesh(moves=False)
    run(looks, replace(SLOW_TRAINER), 30)
    assert split(looks) == (3, 1)


def test_an_account_goes_on_when_a_process_starts_again() -> None:
    account = Account().credited(
        Measured({"shard a": MeasuredWork(groups=5.0), "core": MeasuredWork(tokens=7.0)})
    )
    account = account.credited(Measured({"core": MeasuredWork(tokens=9.0)}))
    account = account.credited(
        Measured({"shard b": MeasuredWork(groups=2.0), "core": MeasuredWork(tokens=9.0)})
    )
    assert (account.total.groups, account.total.tokens) == (7.0, 9.0)
    back = account.credited(Measured({"shard a": MeasuredWork(groups=6.0)}))
    assert back.total.groups == 8.0, "who was away for a moment is not counted twice"
    assert restored(Account, json.loads(json.dumps(plain(back)))) == back


def test_what_is_remembered_of_a_trial_survives_its_record() -> None:
    looks, plant = mesh(), replace(SLOW_TRAINER)
    for _ in range(20):
        run(looks, plant, 1)
        document = json.loads(json.dumps(looks.memory.document()))
        assert PlannerMemory.of(document).document() == document
    assert looks.memory.watches["job"].verdicts


jobs = given(
    workers=st.integers(3, 8),
    plant=st.builds(
        Plant,
        base_s=st.floats(0.002, 0.05),
        sequence_s=st.floats(0.0, 0.003),
        tokens=st.floats(20, 200),
        tool_s=st.sampled_from([0.0, 1.0, 5.0]),
        flight=st.floats(48, 250),
        work_s=st.floats(0.2, 20),
        fixed_s=st.floats(0.02, 0.5),
        drag=st.sampled_from([1.0, 1.0, 1.3]),
    ),
)


def assert_ends_up_no_slower(workers: int, plant: Plant) -> None:
    looks = mesh(workers)
    began_s = plant.step_s(*split(looks))
    verdicts = told(looks, plant, 120)
    ends_s = plant.step_s(*split(looks))
    assert ends_s <= began_s * 1.001
    best_s = min(plant.step_s(workers - n, n) for n in range(1, workers))
    assert plant.drag > 1 or ends_s <= 1.3 * best_s, (ends_s, best_s, verdicts)


@pytest.mark.rotating(2)
@settings(max_examples=4, deadline=None)
@jobs
def test_no_job_ends_up_slower_than_where_it_began(workers: int, plant: Plant) -> None:
    assert_ends_up_no_slower(workers, plant)


@pytest.mark.deep
@settings(max_examples=12, deadline=None)
@jobs
def test_no_job_of_many_ends_up_slower_than_where_it_began(workers: int, plant: Plant) -> None:
    assert_ends_up_no_slower(workers, plant)


def test_a_verdict_tells_its_regret_and_its_error() -> None:
    verdict = Verdict("stage_time", "g1.0", "training", 1, 3, 12, 2.0, 2.0, 1.5, 2.5, False)
    assert verdict.regret_s == 0.5 and verdict.error == pytest.approx(0.4)
    assert verdict.told() == {
        **{"policy": "stage_time", "from": "rollout", "to": "training", "resident": "g1.0"},
        **{"moved": 1, "step": 3, "judged_after": 12, "before_s": 2.0, "expected_s": 2.0},
        **{"predicted_s": 1.5, "observed_s": 2.5, "regret_s": 0.5, "paid": False, "undone": True},
    }


def test_engines_that_begin_anew_take_nothing_of_what_was_learnt_of_them() -> None:
    known = noted({}, [Curve("cpu", 1, 0.02, 0.001, steps=1000, most_tokens_per_s=900.0)])
    assert noted(known, [Curve("cpu", 1, 1.0, steps=8)]) == known
    again = noted(known, [Curve("cpu", 1, 0.03, 0.001, steps=300)])
    assert again["cpu", 1].base_s == 0.03
