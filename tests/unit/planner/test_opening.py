"""First plan of a job with predicted training, and the verdicts after its first measured steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.common.base.encoding.json_values import from_json_value, to_json_value
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.config import PlannerConfig
from meshrl.common.state.pool.demand.measurements import (
    QUANTILES,
    DecodeCurve,
    LengthQuantiles,
    MeasuredWork,
    Measurements,
)
from meshrl.common.state.pool.scheduling.decisions import Decision, ReportMoveOutcome
from meshrl.common.state.pool.scheduling.snapshot import PoolHost
from meshrl.common.state.pool.store.snapshot_documents import decode_snapshot, encode_snapshot
from meshrl.services.planner.balance.rebalancing import MAX_SIMULATED_JOBS, SimulationBudget
from meshrl.services.planner.balance.split_state import SplitState
from meshrl.services.planner.balance.trials import Verdict
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.training_prediction import (
    TrainingQuery,
    predict_corrected_training,
    predict_training,
)
from meshrl.services.planner.explain import format_predictions
from meshrl.services.planner.forecast.engine_curves import update_curves
from meshrl.services.planner.forecast.work_account import WorkAccount
from meshrl.services.planner.memory import PlannerMemory
from tests.unit.planner.plant import TRAJECTORIES, Plant, run, split
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool

SLOW = Plant(work_s=8.0, base_s=0.005, sequence_s=0.0005)  # rollout takes 1 s beside it
TOKENS = TRAJECTORIES * (SLOW.tokens + 10)  # of a step, prompts among them
SHAPE = ModelShape(28, 3584, 28, 4, 128, 7.6e9, 7.6e9)


def mesh(**about: Any) -> PlannerBench:
    bench = start_pool([4], job(steps_done=0, **about))
    return bench


def gathered(plant: Plant, steps: float) -> Measurements:
    """Return the measurements when groups of so many steps have arrived and no step was made."""
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
    lengths = LengthQuantiles(256, (plant.tokens,) * len(QUANTILES), 10.0)
    return replace(plant.measured, lengths=lengths)


def look(bench: PlannerBench, plant: Plant, steps: float) -> None:
    bench.update_job("job", measurements=gathered(plant, steps))
    bench.update(now_ms=bench.snapshot.now_ms + 2000)
    bench.decide_once()


def judgements(decisions: list[Decision]) -> list[dict[str, object]]:
    return [one.details for one in decisions if isinstance(one, ReportMoveOutcome)]


def judged(bench: PlannerBench, plant: Plant, steps: int) -> list[dict[str, Any]]:
    """Return the verdicts of so many steps."""
    found = []
    for _ in range(steps):
        run(bench, plant, 1)
        found += judgements(bench.decisions)
    return found


def test_a_declared_pace_is_planned_by_when_most_of_the_first_groups_have_come() -> None:
    bench, plant = mesh(emulated_training=f"{TOKENS / SLOW.work_s:.0f}/100"), replace(SLOW)
    look(bench, plant, 0.5)
    look(bench, plant, 1.0)
    assert split(bench) == (3, 1), "the long ones have not come yet"
    look(bench, plant, 2.5)
    assert split(bench)[1] > 1
    [verdict] = judged(bench, plant, 25)
    assert verdict["policy"] == "opening" and verdict["step"] == 0 and verdict["paid"]
    assert verdict["expected_s"] == pytest.approx(plant.step_s(3, 1), rel=0.15)
    assert verdict["observed_s"] == pytest.approx(plant.step_s(*split(bench)), rel=0.01)


def test_looks_between_steps_take_no_play_from_what_is_to_be_judged() -> None:
    bench, plant = mesh(emulated_training=f"{TOKENS / SLOW.work_s:.0f}/100"), replace(SLOW)
    look(bench, plant, 2.5)
    found = []
    for _ in range(20):
        found += judged(bench, plant, 1)
        for _ in range(8):
            bench.update(now_ms=bench.snapshot.now_ms + 250)
            bench.decide_once()
            found += [one.details for one in bench.decisions if isinstance(one, ReportMoveOutcome)]
    assert [one["policy"] for one in found] == ["opening"]


def test_a_look_with_a_model_s_shape_is_read_back_as_it_was() -> None:
    bench = mesh(model_shape=SHAPE, emulated_training="100/100")
    assert decode_snapshot(encode_snapshot(bench.snapshot)) == bench.snapshot


def test_a_pace_that_is_not_kept_is_found_out_and_the_move_undone() -> None:
    """Declared as slow, it trains fast: engines are what lacks then."""
    bench, plant = mesh(emulated_training=f"{TOKENS / 8.0:.0f}/100"), replace(SLOW, work_s=0.2)
    plant.sequence_s = 0.001
    look(bench, plant, 2.5)
    assert split(bench)[1] > 1
    [verdict, *_] = judged(bench, plant, 40)
    assert not verdict["paid"] and verdict["undone"]
    assert split(bench) == (3, 1)


def test_nothing_is_planned_of_what_nobody_has_measured_or_declared() -> None:
    bench, plant = mesh(), replace(SLOW)
    look(bench, plant, 2.5)
    assert split(bench) == (3, 1)
    held = mesh(emulated_training="not one")
    look(held, plant, 2.5)
    assert split(held) == (3, 1), "a pace that this version does not know"


def test_training_is_foretold_by_pace_or_by_the_shape_on_a_profile() -> None:
    paced = predict_training(TrainingQuery("m", "cpu", None, "4000/100"), 128, 8000)
    assert paced is not None and (paced.gradient_s, paced.fixed_s) == (2.0, 0.1)
    asked = TrainingQuery("m", "NVIDIA H100 80GB HBM3", SHAPE, "")
    found = predict_training(asked, 128, 128 * 1024)
    assert found is not None
    arithmetic_s = 6 * SHAPE.parameters * 128 * 1024 / (0.4 * 989e12)
    assert found.gradient_s == pytest.approx(arithmetic_s, rel=0.3) and 0 < found.fixed_s < 1
    assert predict_training(replace(asked, kind="a toaster"), 128, 8000) is None
    assert predict_training(replace(asked, shape=None), 128, 8000) is None


def test_a_profile_is_believed_once_it_was_held_against_a_measurement() -> None:
    asked = TrainingQuery("m", "NVIDIA H100 80GB HBM3", SHAPE, "")
    none = Correction()
    assert predict_corrected_training(asked, 128, 8000, none) is None
    foretold = predict_training(asked, 128, 8000)
    assert foretold is not None
    checked = none.observe(asked.key, foretold.gradient_s, 2 * foretold.gradient_s)
    found = predict_corrected_training(asked, 128, 8000, checked)
    assert found is not None and found.gradient_s == pytest.approx(2 * foretold.gradient_s)
    shared = replace(asked, kind="cpu")
    assert predict_corrected_training(shared, 128, 8000, none.observe(shared.key, 1.0, 1.0)) is None


def test_what_a_job_has_measured_lets_the_next_one_of_the_same_model_be_planned_at_once() -> None:
    bench, plant = PlannerBench(pool([4], job(steps_done=0))), replace(SLOW)
    about = {"model_key": "m", "model_shape": SHAPE, "emulated_training": ""}
    bench.update(
        workers=tuple(replace(w, accelerator="cuda:0 NVIDIA H100") for w in bench.snapshot.workers)
    )
    bench.settle()
    bench.update_job("job", **about)
    run(bench, plant, 14)
    factor = next(iter(bench.memory.correction.factors.items()))
    assert factor[0].role == "training" and factor[1].count > 0
    [line] = [one for one in format_predictions(bench.memory) if "gradients on one" in one]
    assert "NVIDIA H100" in line and "observed 8 s" in line
    again = mesh(**about)
    again.update(workers=bench.snapshot.workers)
    again.memory = replace(again.memory, correction=bench.memory.correction)
    fresh = replace(SLOW)
    look(again, fresh, 2.5)
    assert split(again)[1] > 1, "before it has made a step"


def test_curves_without_steps_say_nothing() -> None:
    bench = mesh(emulated_training="100/100")
    measured = gathered(replace(SLOW), 2.5)
    bench.update_job("job", measurements=replace(measured, curves=(DecodeCurve("cpu", 1, 0.0),)))
    bench.decide_once()
    assert split(bench) == (3, 1)


def test_of_many_jobs_a_few_are_played_at_a_look_and_each_gets_its_turn() -> None:
    watches, now_ms, seen = {f"j{n}": SplitState() for n in range(10)}, 100_000, []
    for _ in range(10):
        plays = SimulationBudget(now_ms)
        for name in sorted(watches, key=lambda name: watches[name].simulated_ms):
            if taken := plays.take(watches[name]):
                watches[name] = taken
                seen.append(name)
        assert len(seen) <= MAX_SIMULATED_JOBS * (1 + (now_ms - 100_000) // 1000)
        now_ms += 1000
    assert min(seen.count(name) for name in watches) >= 2


SLOW_TRAINER = Plant(work_s=4.0, base_s=0.005, sequence_s=0.0005)


def configured(workers: int = 4, **config: object) -> PlannerBench:
    about: dict[str, Any] = {"steps_done": 0, "config": PlannerConfig(**config)}  # type: ignore[arg-type]
    bench = start_pool([workers], job(**about))
    return bench


def test_a_move_that_pays_is_judged_by_what_it_was_to_bring() -> None:
    bench, plant = configured(), replace(SLOW_TRAINER)
    [verdict] = judged(bench, plant, 25)
    assert split(bench) == (2, 2)
    assert verdict["paid"] and not verdict["undone"]
    assert verdict["before_s"] == pytest.approx(plant.step_s(3, 1), rel=0.01)
    assert verdict["observed_s"] == pytest.approx(plant.step_s(2, 2), rel=0.01)
    assert verdict["expected_s"] == pytest.approx(verdict["before_s"], rel=0.01)
    assert verdict["predicted_s"] == pytest.approx(verdict["observed_s"], rel=0.15)


def test_a_move_that_slows_everybody_down_is_undone_and_asked_more_of_next_time() -> None:
    bench, plant = configured(), replace(SLOW_TRAINER, work_s=3.0, drag=2.5)
    verdicts = judged(bench, plant, 60)
    assert split(bench) == (3, 1)
    assert [one["paid"] for one in verdicts] == [False] and verdicts[0]["undone"]
    assert verdicts[0]["regret_s"] > 0
    watch = bench.memory.split_states["job"]
    assert watch.failed_moves == {"training": 1} and watch.bias["training"] > 1


def test_demand_that_grows_meanwhile_is_not_held_against_a_move() -> None:
    bench, plant = configured(), replace(SLOW_TRAINER)
    while (
        bench.memory.split_states.get("job") is None
        or bench.memory.split_states["job"].trial is None
    ):
        run(bench, plant, 1)
    before_s = plant.step_s(3, 1)
    plant.tokens, plant.work_s = 2.2 * plant.tokens, 2.2 * plant.work_s
    [verdict] = judged(bench, plant, 15)
    assert plant.step_s(2, 2) > before_s, "a step takes longer than before the move"
    assert verdict["paid"] and verdict["expected_s"] > 1.5 * before_s


def test_an_engine_more_brings_nothing_where_latency_binds() -> None:
    """Few trajectories, slow tools: engines are nearly empty, and rollout is late all the same."""
    bench, plant = configured(5), Plant(flight=24.0, sequence_s=1e-5, tool_s=4.0, work_s=3.0)
    before = plant.stages(4, 1)
    assert before[0] > 1.15 * before[1], "the stage times are out of balance"
    helped = configured(5, training=2)
    assert judged(helped, plant, 40) == [] or split(helped)[0] <= 4
    assert judged(bench, plant, 40) == [], "nothing moves that brings nothing"


def test_several_workers_move_at_once() -> None:
    bench, plant = configured(8), Plant(work_s=16.0, base_s=0.005, sequence_s=1e-4)
    run(bench, plant, 8)
    assert split(bench)[1] >= 4, "not one after the other"


def test_nothing_moves_where_the_host_has_no_core_left() -> None:
    bench, plant = configured(), replace(SLOW_TRAINER)
    bench.update(hosts=(PoolHost("host0", cores=2.0, busy_cores=1.9),))
    assert judged(bench, plant, 30) == [] and split(bench) == (3, 1)
    assert bench.memory.split_states["job"].explanation["bottleneck"] == "cores"
    bench.update(hosts=(PoolHost("host0", cores=2.0, busy_cores=0.5),))
    run(bench, plant, 20)
    assert split(bench) == (2, 2)


def test_a_split_that_is_to_be_held_is_held() -> None:
    bench = configured(moves=False)
    run(bench, replace(SLOW_TRAINER), 30)
    assert split(bench) == (3, 1)


def test_an_account_goes_on_when_a_process_starts_again() -> None:
    account = WorkAccount().credit(
        Measurements({"shard a": MeasuredWork(groups=5.0), "core": MeasuredWork(tokens=7.0)})
    )
    account = account.credit(Measurements({"core": MeasuredWork(tokens=9.0)}))
    account = account.credit(
        Measurements({"shard b": MeasuredWork(groups=2.0), "core": MeasuredWork(tokens=9.0)})
    )
    assert (account.total.groups, account.total.tokens) == (7.0, 9.0)
    back = account.credit(Measurements({"shard a": MeasuredWork(groups=6.0)}))
    assert back.total.groups == 8.0, "who was away for a moment is not counted twice"
    assert from_json_value(WorkAccount, json.loads(json.dumps(to_json_value(back)))) == back


def test_what_is_remembered_of_a_trial_survives_its_record() -> None:
    bench, plant = configured(), replace(SLOW_TRAINER)
    for _ in range(20):
        run(bench, plant, 1)
        document = json.loads(json.dumps(bench.memory.encode()))
        assert PlannerMemory.decode(document).encode() == document
    assert bench.memory.split_states["job"].verdicts


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
    bench = configured(workers)
    began_s = plant.step_s(*split(bench))
    verdicts = judged(bench, plant, 120)
    ends_s = plant.step_s(*split(bench))
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
    assert verdict.regret_s == 0.5 and verdict.relative_error == pytest.approx(0.4)
    assert verdict.to_event() == {
        **{"policy": "stage_time", "from": "rollout", "to": "training", "resident": "g1.0"},
        **{"moved": 1, "step": 3, "judged_after": 12, "before_s": 2.0, "expected_s": 2.0},
        **{"predicted_s": 1.5, "observed_s": 2.5, "regret_s": 0.5, "paid": False, "undone": True},
    }


def test_engines_that_begin_anew_take_nothing_of_what_was_learnt_of_them() -> None:
    known = update_curves(
        {}, [DecodeCurve("cpu", 1, 0.02, 0.001, fitted_steps=1000, max_tokens_per_s=900.0)]
    )
    assert update_curves(known, [DecodeCurve("cpu", 1, 1.0, fitted_steps=8)]) == known
    again = update_curves(known, [DecodeCurve("cpu", 1, 0.03, 0.001, fitted_steps=300)])
    assert again["cpu", 1].base_s == 0.03
