"""Initial plan of a job from predictions, and its assessment after the first measured steps."""

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
from tests.unit.planner.plant import TRAJECTORIES, Plant, count_split, run
from tests.unit.planner.pools import PlannerBench, job, pool, start_pool

SLOW = Plant(work_s=8.0, base_s=0.005, sequence_s=0.0005)  # rollout takes 1 s
TOKENS = TRAJECTORIES * (SLOW.tokens + 10)  # of a step, including prompts
SHAPE = ModelShape(28, 3584, 28, 4, 128, 7.6e9, 7.6e9)


def mesh(**about: Any) -> PlannerBench:
    bench = start_pool([4], job(steps_done=0, colocate="never", **about))
    return bench


def measure_before_training(plant: Plant, steps: float) -> Measurements:
    """Return the measurements after groups of `steps` steps arrived and before the first training
    step.
    """
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


def report_groups(bench: PlannerBench, plant: Plant, steps: float) -> None:
    bench.update_job("job", measurements=measure_before_training(plant, steps))
    bench.update(now_ms=bench.snapshot.now_ms + 2000)
    bench.decide_once()


def list_outcomes(decisions: list[Decision]) -> list[dict[str, object]]:
    return [one.details for one in decisions if isinstance(one, ReportMoveOutcome)]


def run_and_judge(bench: PlannerBench, plant: Plant, steps: int) -> list[dict[str, Any]]:
    """Return the verdicts of `steps` steps."""
    found = []
    for _ in range(steps):
        run(bench, plant, 1)
        found += list_outcomes(bench.decisions)
    return found


def test_declared_speed_is_used_after_most_first_groups_arrived() -> None:
    bench, plant = mesh(emulated_training=f"{TOKENS / SLOW.work_s:.0f}/100"), replace(SLOW)
    report_groups(bench, plant, 0.5)
    report_groups(bench, plant, 1.0)
    assert count_split(bench) == (3, 1), "the long ones have not come yet"
    report_groups(bench, plant, 2.5)
    assert count_split(bench)[1] > 1
    [verdict] = run_and_judge(bench, plant, 25)
    assert verdict["policy"] == "opening" and verdict["step"] == 0 and verdict["paid"]
    assert verdict["expected_s"] == pytest.approx(plant.step_s(3, 1), rel=0.15)
    assert verdict["observed_s"] == pytest.approx(plant.step_s(*count_split(bench)), rel=0.01)


def test_snapshots_between_steps_do_not_affect_the_assessment() -> None:
    bench, plant = mesh(emulated_training=f"{TOKENS / SLOW.work_s:.0f}/100"), replace(SLOW)
    report_groups(bench, plant, 2.5)
    found = []
    for _ in range(20):
        found += run_and_judge(bench, plant, 1)
        for _ in range(8):
            bench.update(now_ms=bench.snapshot.now_ms + 250)
            bench.decide_once()
            found += [one.details for one in bench.decisions if isinstance(one, ReportMoveOutcome)]
    assert [one["policy"] for one in found] == ["opening"]


def test_snapshot_with_a_model_shape_survives_json() -> None:
    bench = mesh(model_shape=SHAPE, emulated_training="100/100")
    assert decode_snapshot(encode_snapshot(bench.snapshot)) == bench.snapshot


def test_move_by_a_wrong_declared_speed_is_undone() -> None:
    """Start from a speed declared too low: training is fast, so rollout becomes the bottleneck."""
    bench, plant = mesh(emulated_training=f"{TOKENS / 8.0:.0f}/100"), replace(SLOW, work_s=0.2)
    plant.sequence_s = 0.001
    report_groups(bench, plant, 2.5)
    assert count_split(bench)[1] > 1
    [verdict, *_] = run_and_judge(bench, plant, 40)
    assert not verdict["paid"] and verdict["undone"]
    assert count_split(bench) == (3, 1)


def test_no_plan_without_measured_or_declared_speeds() -> None:
    bench, plant = mesh(), replace(SLOW)
    report_groups(bench, plant, 2.5)
    assert count_split(bench) == (3, 1)
    fixed_split_bench = mesh(emulated_training="not one")
    report_groups(fixed_split_bench, plant, 2.5)
    assert count_split(fixed_split_bench) == (3, 1), "a pace that this version does not know"


def test_training_is_predicted_from_declared_speed_or_profile() -> None:
    emulated = predict_training(TrainingQuery("m", "cpu", None, "4000/100"), 128, 8000)
    assert emulated is not None and (emulated.gradient_s, emulated.fixed_s) == (2.0, 0.1)
    query = TrainingQuery("m", "NVIDIA H100 80GB HBM3", SHAPE, "")
    found = predict_training(query, 128, 128 * 1024)
    assert found is not None
    arithmetic_s = 6 * SHAPE.parameters * 128 * 1024 / (0.4 * 989e12)
    assert found.gradient_s == pytest.approx(arithmetic_s, rel=0.3) and 0 < found.fixed_s < 1
    assert predict_training(replace(query, kind="a toaster"), 128, 8000) is None
    assert predict_training(replace(query, shape=None), 128, 8000) is None


def test_profile_is_used_after_comparison_with_a_measurement() -> None:
    query = TrainingQuery("m", "NVIDIA H100 80GB HBM3", SHAPE, "")
    none = Correction()
    assert predict_corrected_training(query, 128, 8000, none) is None
    predicted = predict_training(query, 128, 8000)
    assert predicted is not None
    checked = none.observe(query.key, predicted.gradient_s, 2 * predicted.gradient_s)
    found = predict_corrected_training(query, 128, 8000, checked)
    assert found is not None and found.gradient_s == pytest.approx(2 * predicted.gradient_s)
    shared = replace(query, kind="cpu")
    assert predict_corrected_training(shared, 128, 8000, none.observe(shared.key, 1.0, 1.0)) is None


def test_measurements_are_reused_for_the_next_job_of_the_model() -> None:
    bench, plant = PlannerBench(pool([4], job(steps_done=0, colocate="never"))), replace(SLOW)
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
    report_groups(again, fresh, 2.5)
    assert count_split(again)[1] > 1, "before it has made a step"


def test_curves_without_steps_are_ignored() -> None:
    bench = mesh(emulated_training="100/100")
    measurements = measure_before_training(replace(SLOW), 2.5)
    bench.update_job(
        "job", measurements=replace(measurements, curves=(DecodeCurve("cpu", 1, 0.0),))
    )
    bench.decide_once()
    assert count_split(bench) == (3, 1)


def test_simulations_per_snapshot_are_limited_and_rotate_over_jobs() -> None:
    observers, now_ms, simulated = {f"j{n}": SplitState() for n in range(10)}, 100_000, []
    for _ in range(10):
        simulations = SimulationBudget(now_ms)
        for name in sorted(observers, key=lambda name: observers[name].simulated_ms):
            if taken := simulations.take(observers[name]):
                observers[name] = taken
                simulated.append(name)
        assert len(simulated) <= MAX_SIMULATED_JOBS * (1 + (now_ms - 100_000) // 1000)
        now_ms += 1000
    assert min(simulated.count(name) for name in observers) >= 2


SLOW_TRAINER = Plant(work_s=4.0, base_s=0.005, sequence_s=0.0005)


def start_configured(workers: int = 4, **config: object) -> PlannerBench:
    about: dict[str, Any] = {"steps_done": 0, "config": PlannerConfig(**config)}  # type: ignore[arg-type]
    bench = start_pool([workers], job(colocate="never", **about))
    return bench


def test_successful_move_is_assessed_against_its_prediction() -> None:
    bench, plant = start_configured(), replace(SLOW_TRAINER)
    [verdict] = run_and_judge(bench, plant, 25)
    assert count_split(bench) == (2, 2)
    assert verdict["paid"] and not verdict["undone"]
    assert verdict["before_s"] == pytest.approx(plant.step_s(3, 1), rel=0.01)
    assert verdict["observed_s"] == pytest.approx(plant.step_s(2, 2), rel=0.01)
    assert verdict["expected_s"] == pytest.approx(verdict["before_s"], rel=0.01)
    assert verdict["predicted_s"] == pytest.approx(verdict["observed_s"], rel=0.15)


def test_harmful_move_is_undone_and_raises_the_threshold() -> None:
    bench, plant = start_configured(), replace(SLOW_TRAINER, work_s=3.0, drag=2.5)
    verdicts = run_and_judge(bench, plant, 60)
    assert count_split(bench) == (3, 1)
    assert [one["paid"] for one in verdicts] == [False] and verdicts[0]["undone"]
    assert verdicts[0]["regret_s"] > 0
    observer = bench.memory.split_states["job"]
    assert observer.failed_moves == {"training": 1} and observer.bias["training"] > 1


def test_growing_demand_does_not_count_against_a_move() -> None:
    bench, plant = start_configured(), replace(SLOW_TRAINER)
    while (
        bench.memory.split_states.get("job") is None
        or bench.memory.split_states["job"].trial is None
    ):
        run(bench, plant, 1)
    before_s = plant.step_s(3, 1)
    plant.tokens, plant.work_s = 2.2 * plant.tokens, 2.2 * plant.work_s
    [verdict] = run_and_judge(bench, plant, 15)
    assert plant.step_s(2, 2) > before_s, "a step takes longer than before the move"
    assert verdict["paid"] and verdict["expected_s"] > 1.5 * before_s


def test_latency_bound_rollout_gets_no_additional_engine() -> None:
    """Use few trajectories and slow tools: engines are nearly empty, and rollout is late anyway."""
    bench, plant = start_configured(5), Plant(flight=24.0, sequence_s=1e-5, tool_s=4.0, work_s=3.0)
    before = plant.stages(4, 1)
    assert before[0] > 1.15 * before[1], "the stage times are out of balance"
    helped = start_configured(5, training=2)
    assert run_and_judge(helped, plant, 40) == [] or count_split(helped)[0] <= 4
    assert run_and_judge(bench, plant, 40) == [], "nothing moves that brings nothing"


def test_several_workers_move_at_once() -> None:
    bench, plant = start_configured(8), Plant(work_s=16.0, base_s=0.005, sequence_s=1e-4)
    run(bench, plant, 8)
    assert count_split(bench)[1] >= 4, "not one after the other"


def test_host_without_free_cpu_cores_makes_no_move() -> None:
    bench, plant = start_configured(), replace(SLOW_TRAINER)
    bench.update(hosts=(PoolHost("host0", cores=2.0, busy_cores=1.9),))
    assert run_and_judge(bench, plant, 30) == [] and count_split(bench) == (3, 1)
    assert bench.memory.split_states["job"].explanation["bottleneck"] == "cores"
    bench.update(hosts=(PoolHost("host0", cores=2.0, busy_cores=0.5),))
    run(bench, plant, 20)
    assert count_split(bench) == (2, 2)


def test_fixed_split_is_not_changed() -> None:
    bench = start_configured(moves=False)
    run(bench, replace(SLOW_TRAINER), 30)
    assert count_split(bench) == (3, 1)


def test_work_account_continues_after_a_restart() -> None:
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


def test_trial_memory_survives_its_record() -> None:
    bench, plant = start_configured(), replace(SLOW_TRAINER)
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
    bench = start_configured(workers)
    began_s = plant.step_s(*count_split(bench))
    verdicts = run_and_judge(bench, plant, 120)
    ends_s = plant.step_s(*count_split(bench))
    assert ends_s <= began_s * 1.001
    best_s = min(plant.step_s(workers - n, n) for n in range(1, workers))
    assert plant.drag > 1 or ends_s <= 1.3 * best_s, (ends_s, best_s, verdicts)


@pytest.mark.rotating(2)
@settings(max_examples=4, deadline=None)
@jobs
def test_single_job_never_ends_slower_than_it_started(workers: int, plant: Plant) -> None:
    assert_ends_up_no_slower(workers, plant)


@pytest.mark.deep
@settings(max_examples=12, deadline=None)
@jobs
def test_several_jobs_never_end_slower_than_they_started(workers: int, plant: Plant) -> None:
    assert_ends_up_no_slower(workers, plant)


def test_verdict_contains_regret_and_error() -> None:
    verdict = Verdict("stage_time", "g1.0", "training", 1, 3, 12, 2.0, 2.0, 1.5, 2.5, False)
    assert verdict.regret_s == 0.5 and verdict.relative_error == pytest.approx(0.4)
    assert verdict.to_event() == {
        **{"policy": "stage_time", "from": "rollout", "to": "training", "resident": "g1.0"},
        **{"moved": 1, "step": 3, "judged_after": 12, "before_s": 2.0, "expected_s": 2.0},
        **{"predicted_s": 1.5, "observed_s": 2.5, "regret_s": 0.5, "paid": False, "undone": True},
    }


def test_curve_of_a_restarted_engine_is_ignored_until_it_has_enough_steps() -> None:
    known = update_curves(
        {}, [DecodeCurve("cpu", 1, 0.02, 0.001, fitted_steps=1000, max_tokens_per_s=900.0)]
    )
    assert update_curves(known, [DecodeCurve("cpu", 1, 1.0, fitted_steps=8)]) == known
    again = update_curves(known, [DecodeCurve("cpu", 1, 0.03, 0.001, fitted_steps=300)])
    assert again["cpu", 1].base_s == 0.03
