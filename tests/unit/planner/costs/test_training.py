"""Cost model: times of training and decode steps compared with figures computed by hand, and
corrections.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.layouts import released
from loadtests.layouts.cases import DEGREES, QWEN_14B, QWEN_30B_A3B
from meshrl.common.base.encoding.json_values import from_json_value, to_json_value
from meshrl.common.hardware.accelerators import Accelerator, load_accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.emulation import ENGINE_PROFILES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.state.pool.demand.measurements import QUANTILES, DecodeCurve
from meshrl.services.planner.costs.correction import DECAY, MAX_KEYS, Correction, CorrectionKey
from meshrl.services.planner.costs.rollout_costs import EngineGang
from meshrl.services.planner.costs.training_costs import (
    TrainingLayout,
    TrainingWork,
    compute_bubble_share,
    predict_memory_bytes,
    predict_step_s,
)
from meshrl.services.planner.forecast.step_quantities import (
    StepDemand,
    StepRates,
    StepTerms,
    WorkerSplit,
)
from meshrl.services.planner.forecast.step_simulation import simulate_step_s

TINY = ModelShape(2, 8, 4, 2, 2, parameters=1000.0, active=1000.0)
FREE = Accelerator("free", 1e6, 1e9, 1e30, 1e30, 1e30, 0.5, 0.5, 1.0, collective_s=0.0)
WORK = TrainingWork(sequences=8, tokens=80.0, squared_tokens=800.0)
PASS_S = (2 * 1000 * 80 + 2 * 8 * 2 * 800) / 5e5  # forward, in total, on one accelerator
ATTENTION_S = 2 * 8 * 2 * 800 / 5e5
A800 = load_accelerators()["A800"]


def test_single_accelerator_time_covers_forward_backward_and_attention() -> None:
    assert predict_step_s(TINY, FREE, TrainingLayout("free"), WORK) == pytest.approx(
        3 * PASS_S + ATTENTION_S
    )


def test_recomputed_layers_run_forward_twice() -> None:
    layout = TrainingLayout("free", recompute=True)
    assert predict_step_s(TINY, FREE, layout, WORK) == pytest.approx(4 * PASS_S)


@pytest.mark.parametrize(
    "layout",
    [{"data_parallel": 4}, {"tensor_parallel": 4}, {"data_parallel": 2, "tensor_parallel": 2}],
)
def test_four_ranks_without_communication_take_a_quarter(layout: dict[str, Any]) -> None:
    alone_s = predict_step_s(TINY, FREE, TrainingLayout("free"), WORK)
    assert predict_step_s(TINY, FREE, TrainingLayout("free", **layout), WORK) == pytest.approx(
        alone_s / 4
    )


@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_time_includes_fill_and_drain(stages: int) -> None:
    alone_s = predict_step_s(TINY, FREE, TrainingLayout("free"), WORK)
    layout = TrainingLayout("free", pipeline_parallel=stages)
    expected = alone_s / stages * (8 + stages - 1) / 8
    assert predict_step_s(TINY, FREE, layout, WORK) == pytest.approx(expected)
    assert compute_bubble_share(layout, 8) == pytest.approx(1 - alone_s / stages / expected)


def test_replicas_beyond_the_sequences_give_no_speedup() -> None:
    eight = predict_step_s(TINY, FREE, TrainingLayout("free", 8), WORK)
    assert predict_step_s(TINY, FREE, TrainingLayout("free", 64), WORK) == pytest.approx(eight)


def test_gradient_exchange_overlaps_computation() -> None:
    slow = replace(FREE, link_bytes_per_s=1000.0)
    hidden_s = predict_step_s(TINY, FREE, TrainingLayout("slow", 2), WORK)
    replicas = TrainingLayout("slow", 2, sharded=False)
    assert predict_step_s(TINY, slow, replicas, WORK) - hidden_s == pytest.approx(0.7 * 2 * 0.5 * 2)
    sharded = TrainingLayout("slow", 2)
    assert predict_step_s(TINY, slow, sharded, WORK) - hidden_s == pytest.approx(0.7 * 3 * 0.5 * 2)


def test_network_bandwidth_limits_gangs_over_hosts() -> None:
    work = TrainingWork(4096, 4096 * 2000.0, 4096 * 2000.0**2)
    inside = predict_step_s(QWEN_14B, A800, TrainingLayout("A800", 8), work)
    outside = predict_step_s(
        QWEN_14B, A800, TrainingLayout("A800", 8), replace(work, accelerators_per_host=4)
    )
    exchanged = 0.7 * 3 * 7 / 8 * QWEN_14B.parameter_bytes
    assert outside - inside == pytest.approx(exchanged * (1 / 25e9 - 1 / 200e9))


def test_expert_parallelism_sends_tokens_to_experts() -> None:
    work = TrainingWork(64, 64 * 1000.0, 64 * 1000.0**2)
    dense = replace(QWEN_30B_A3B, experts=0, experts_per_token=0)
    layout = TrainingLayout("A800", 8)
    more = predict_step_s(QWEN_30B_A3B, A800, layout, work) - predict_step_s(
        dense, A800, layout, work
    )
    sent = 8 * 8 * 1000 * 2048 * 2  # of a replica, to 8 experts each, there and back, twice
    assert more == pytest.approx(4 * 48 * sent * 7 / 8 / 200e9)


def test_memory_shards_states_and_holds_activations_per_micro_batch() -> None:
    replicas = TrainingLayout("free", 2, tensor_parallel=2, sharded=False)
    activations = 34 * 10 * 8 * 2 / 2
    assert predict_memory_bytes(TINY, replicas, WORK) == pytest.approx(16 * 500 + activations)
    sharded = TrainingLayout("free", 4)
    assert predict_memory_bytes(TINY, sharded, WORK) == pytest.approx(16 * 250 + 2 * 2 * 500 + 5440)
    recomputed_bytes = predict_memory_bytes(TINY, replace(sharded, recompute=True), WORK)
    assert recomputed_bytes == pytest.approx(16 * 250 + 2 * 2 * 500 + (2 * 2 + 34) * 10 * 8)


# 2 layers of 8 features, 4 heads of 2 and 2 KV heads; one operation and one byte per second.
PLAIN = Accelerator("plain", 1e6, 1e4, 1e3, 1e2, 10.0, 0.5, 0.5, 0.5, collective_s=0.25)


def test_decode_step_reads_weights_and_contexts() -> None:
    # 2,000 bytes of weights; 3 x 5 tokens of 2 layers x 2 heads x 2 features x 2 x 2 bytes each.
    assert EngineGang(TINY, PLAIN).predict_decode_step_s(3, 5) == pytest.approx(
        (2000 + 15 * 32) / 500
    )


def test_large_batch_is_compute_bound() -> None:
    assert EngineGang(TINY, PLAIN).predict_decode_step_s(10_000, 0) == pytest.approx(
        2 * 1000 * 10_000 / 5e5
    )


def test_tensor_parallel_ranks_read_their_shards_and_reduce_twice_per_layer() -> None:
    # Half of the weights, one of two heads; four all-reduces of 3 x 8 features of 2 bytes.
    meets = 4 * (0.25 + 2 * 0.5 * 48 / 100)
    expected = (1000 + 15 * 16) / 500 + meets
    assert EngineGang(TINY, PLAIN, 2).predict_decode_step_s(3, 5) == pytest.approx(expected)


def test_ranks_beyond_kv_heads_hold_copies() -> None:
    assert (
        TINY.compute_kv_bytes_per_token(1)
        == 2 * TINY.compute_kv_bytes_per_token(2)
        == 2 * TINY.compute_kv_bytes_per_token(4)
    )


@pytest.mark.parametrize(("degree", "divides"), [(1, True), (2, True), (4, True), (8, False)])
def test_heads_are_divided_evenly(degree: int, divides: bool) -> None:
    assert TINY.can_split(degree) is divides


def test_three_kv_heads_are_not_split_over_two_ranks() -> None:
    assert not ModelShape(1, 12, 6, 3, 2, 100.0, 100.0).can_split(2)


def test_memory_beside_weights_is_for_contexts() -> None:
    gang = EngineGang(QWEN_14B, A800, 2)
    # 80 GB less half of 29.6 GB and the workspace; 40 layers x 4 heads x 128 features x 2 x 2 bytes
    assert gang.compute_kv_capacity() == pytest.approx(
        0.96 * (80e9 - 14.8e9 - 1e9) / (40 * 4 * 128 * 4)
    )
    assert gang.can_fit(700_000)
    assert not gang.can_fit(800_000)


def test_model_too_large_for_one_rank_needs_several() -> None:
    large = ModelShape(80, 8192, 64, 8, 128, 70e9, 70e9)
    assert [degree for degree in DEGREES if EngineGang(large, A800, degree).can_fit(4096)] == [
        2,
        4,
        8,
    ]


def test_mixture_reads_the_experts_of_its_batch() -> None:
    # 8 of 128 experts: (30.5 - 3.3) / (1 - 8/128) are the experts'.
    experts = 27.2e9 / (1 - 8 / 128)
    assert QWEN_30B_A3B.count_read_parameters(1) == pytest.approx(3.3e9)
    two = 30.5e9 - experts * (120 / 128) ** 2
    assert QWEN_30B_A3B.count_read_parameters(2) == pytest.approx(two)
    assert QWEN_30B_A3B.count_read_parameters(500) == pytest.approx(30.5e9)


def test_prefill_time_is_linear_in_tokens_and_attended_positions() -> None:
    gang = EngineGang(TINY, PLAIN)
    # 2 operations a parameter, 2 a pair, layer and feature of all heads
    assert gang.predict_prefill_s(10) == pytest.approx((2 * 1000 * 10 + 2 * 8 * 2 * 100) / 5e5)
    in_parts = gang.predict_prefill_s(6) + gang.predict_prefill_s(4, prefix_tokens=6)
    assert in_parts == pytest.approx(gang.predict_prefill_s(10))


def test_gang_of_one_matches_an_emulated_engine() -> None:
    seven = ModelShape(28, 3584, 28, 4, 128, 7.6e9, 7.6e9)
    gang, speed = EngineGang(seven, load_accelerators()["A100"]), ENGINE_PROFILES["a100-7b"]
    assert gang.predict_decode_step_s(1, 0) == pytest.approx(speed.decode_step_s)
    assert gang.predict_decode_step_s(2 * speed.plateau_batch, 0) == pytest.approx(
        2 * speed.decode_step_s, rel=0.02
    )


@given(st.sampled_from(DEGREES), st.integers(2, 512), st.integers(0, 40_000))
def test_curve_bounds_the_step_times_and_meets_them_at_both_ends(
    degree: int, batch: int, context: int
) -> None:
    gang = EngineGang(QWEN_14B, A800, degree)
    line = gang.predict_curve(batch)
    assert (line.accelerator_kind, line.tensor_parallel, line.fitted_steps) == ("A800", degree, 0)
    for at in (1, batch):
        assert line.predict_step_s(at, context) == pytest.approx(
            gang.predict_decode_step_s(at, context)
        )
    assert line.predict_step_s(batch / 2, context) >= gang.predict_decode_step_s(
        max(1, batch / 2), context
    ) * (1 - 1e-9)


def test_released_formula_underestimates_by_the_number_of_ranks() -> None:
    one, eight = EngineGang(QWEN_14B, A800), EngineGang(QWEN_14B, A800, 8)
    meets = 80 * A800.collective_s
    assert released.step_s(one, 8, 4096) == pytest.approx(one.predict_decode_step_s(8, 4096))
    reads = QWEN_14B.parameter_bytes / 8 + 8 * 4096 * QWEN_14B.compute_kv_bytes_per_token(8)
    assert released.step_s(eight, 8, 4096) - meets == pytest.approx(
        reads / A800.read_bytes_per_s / 8
    )
    assert eight.predict_decode_step_s(8, 4096) / released.step_s(eight, 8, 4096) > 2.5
    # All ranks' room by one rank's tokens, but for the workspace.
    assert released.capacity(eight) / eight.compute_kv_capacity() == pytest.approx(8, rel=0.02)


def test_shape_is_read_from_a_config() -> None:
    config = ModelConfig(
        "qwen3_moe", 1000, 64, 4, 8, 2, 8, 0,
        num_experts=16, num_experts_per_token=2, expert_ffn_size=32,
    )  # fmt: skip
    shape = ModelShape.from_config(config)
    assert shape.parameters == config.num_parameters
    assert shape.parameters - shape.active == 4 * 14 * 3 * 64 * 32
    assert (shape.experts, shape.experts_per_token, shape.attention_width) == (16, 2, 64)
    dense = ModelShape.from_config(ModelConfig("qwen3", 1000, 64, 4, 8, 2, 8, 128))
    assert dense.active == dense.parameters
    assert dense.count_read_parameters(64) == dense.parameters


KEY = CorrectionKey("qwen3-14b", "A800", "rollout")
OTHER = CorrectionKey("qwen3-14b", "A800", "training")
seconds = st.floats(1e-6, 1e6)


def make_correction(observed: list[tuple[float, float]]) -> Correction:
    found = Correction()
    for predicted, took in observed:
        found = found.observe(KEY, predicted, took)
    return found


def test_prediction_without_observations_is_uncorrected() -> None:
    assert Correction().correct(KEY, 3.0) == 3.0
    assert Correction().compute_error(KEY) == 0.0


def test_first_observation_sets_the_correction() -> None:
    found = make_correction([(2.0, 3.0)])
    assert found.correct(KEY, 4.0) == pytest.approx(6.0)
    assert found.correct(OTHER, 4.0) == 4.0
    assert found.compute_error(KEY) == pytest.approx(0.5)


def test_first_observations_have_equal_weight_as_ratios() -> None:
    found = make_correction([(1.0, 2.0), (1.0, 8.0)])
    assert found.get_factor(KEY).value == pytest.approx(4.0)


def test_correction_follows_a_changed_machine() -> None:
    found = make_correction([(1.0, 2.0)] * 100 + [(1.0, 4.0)] * 30)
    off = math.log(4.0 / found.get_factor(KEY).value)
    assert off == pytest.approx(math.log(2.0) * DECAY**30, rel=1e-6)
    assert found.compute_error(KEY) < 0.15


def test_error_of_correct_predictions_converges_to_zero() -> None:
    assert make_correction([(1.0, 5.0)] * 60).compute_error(KEY) < 0.01


@pytest.mark.parametrize("took", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_ignored(took: float) -> None:
    before = make_correction([(1.0, 2.0)])
    assert before.observe(KEY, 1.0, took) == before.observe(KEY, took, 1.0) == before


def test_factors_of_recent_observations_are_retained() -> None:
    found = make_correction([(1.0, 2.0)])
    for n in range(MAX_KEYS + 10):
        found = found.observe(CorrectionKey("model", str(n), "rollout"), 1.0, 2.0)
        found = found.observe(KEY, 1.0, 2.0)
    assert len(found.factors) == MAX_KEYS
    assert found.get_factor(KEY).count == MAX_KEYS + 11
    assert CorrectionKey("model", "0", "rollout") not in found.factors


@given(st.lists(st.tuples(seconds, seconds), max_size=20))
def test_correction_survives_json_and_stays_within_observed_ratios(
    observed: list[tuple[float, float]],
) -> None:
    found = make_correction(observed).observe(OTHER, 1.0, 2.0)
    assert from_json_value(Correction, json.loads(json.dumps(to_json_value(found)))) == found
    ratios = [min(max(took / told, 0.01), 100.0) for told, took in observed]
    if ratios:
        value = found.get_factor(KEY).value
        assert min(ratios) * (1 - 1e-9) <= value <= max(ratios) * (1 + 1e-9)


TERMS = StepTerms(groups_per_step=4, group_size=6, max_staleness=2, engine_slots=64, bin_tokens=0)
EQUAL_LENGTHS = StepDemand(trajectories=24, sampled_tokens=50.0, tool_s=0.0, trained_tokens=1250.0)
RATES = StepRates(
    DecodeCurve("cpu", 1, 0.02), friction=1.0, gradient_s=0.5, fixed_s=0.1, core_share=0.0
)


def draw_lengths(sigma: float) -> StepDemand:
    """Return lengths whose logarithm has this deviation."""
    drawn = np.random.default_rng(3).lognormal(0.0, sigma, 4000)
    return replace(EQUAL_LENGTHS, length_quantiles=tuple(map(float, np.quantile(drawn, QUANTILES))))


def test_slow_trainer_bounds_the_step_for_any_lengths() -> None:
    slow = replace(RATES, gradient_s=30.0)
    assert simulate_step_s(EQUAL_LENGTHS, slow, WorkerSplit(3, 1), TERMS) == pytest.approx(30.1)
    assert simulate_step_s(EQUAL_LENGTHS, slow, WorkerSplit(2, 2), TERMS) == pytest.approx(15.1)
    assert simulate_step_s(draw_lengths(0.8), slow, WorkerSplit(3, 1), TERMS) == pytest.approx(
        30.1, rel=0.1
    )


def test_stages_are_sequential_without_staleness() -> None:
    strict = replace(TERMS, max_staleness=0)
    assert simulate_step_s(EQUAL_LENGTHS, RATES, WorkerSplit(2, 1), strict) == pytest.approx(
        50 * 0.02 + 0.6
    )


def test_full_engines_share_generation() -> None:
    """Check that a token's time is the mean over an engine's load: two engines generate twice as
    much.
    """
    full = replace(RATES, curve=DecodeCurve("cpu", 1, 0.0, 0.002), gradient_s=0.0, fixed_s=0.0)
    one, two = (simulate_step_s(EQUAL_LENGTHS, full, WorkerSplit(n, 1), TERMS) for n in (1, 2))
    assert one == pytest.approx(24 * 50 * 0.002, rel=0.05) and two == pytest.approx(one / 2)


def test_slots_limit_concurrent_generation() -> None:
    few = replace(TERMS, engine_slots=2)
    idle = replace(RATES, gradient_s=0.0, fixed_s=0.0)
    assert simulate_step_s(EQUAL_LENGTHS, idle, WorkerSplit(1, 1), few) == pytest.approx(
        24 * 50 * 0.02 / 2, rel=0.05
    )


def test_long_tail_takes_longer_at_equal_mean() -> None:
    bound = replace(RATES, curve=DecodeCurve("cpu", 1, 0.05), gradient_s=0.2)
    takes = [
        simulate_step_s(draw_lengths(sigma), bound, WorkerSplit(3, 1), TERMS)
        for sigma in (0.1, 0.5, 1.0)
    ]
    assert takes[0] < takes[1] < takes[2] and takes[2] > 1.5 * takes[0]


def test_tool_time_bounds_steps_of_fast_engines() -> None:
    tools = replace(EQUAL_LENGTHS, tool_s=9.0)
    fast = replace(RATES, curve=DecodeCurve("cpu", 1, 1e-6), gradient_s=0.0, fixed_s=0.0)
    assert simulate_step_s(tools, fast, WorkerSplit(4, 1), TERMS) == pytest.approx(
        9.0 / 3, rel=0.01
    )


@settings(max_examples=20, deadline=None)
@given(
    sigma=st.floats(0.0, 1.2),
    base_s=st.floats(0.001, 0.1),
    work_s=st.floats(0.0, 10.0),
    tool_s=st.sampled_from([0.0, 1.0]),
    groups=st.sampled_from([1, 4, 40]),
)
def test_step_time_is_between_training_and_the_sum_of_stages(
    sigma: float, base_s: float, work_s: float, tool_s: float, groups: int
) -> None:
    terms = replace(TERMS, groups_per_step=groups)
    now = replace(draw_lengths(sigma), tool_s=tool_s)
    then = replace(RATES, curve=DecodeCurve("cpu", 1, base_s), gradient_s=work_s)
    found = simulate_step_s(now, then, WorkerSplit(2, 1), terms)
    assert found == simulate_step_s(now, then, WorkerSplit(2, 1), terms), "it is no chance"
    assert found >= 0.7 * (then.fixed_s + work_s)
    longest_s = (
        50 * max(now.length_quantiles) / float(np.mean(now.length_quantiles)) * base_s + tool_s
    )
    assert found <= 4 * (longest_s + then.fixed_s + work_s)


def test_fewer_engines_are_slower_only_when_full() -> None:
    narrow = WorkerSplit(3, 1, relative_speed=1.0, relative_width=1 / 3)
    idle = replace(RATES, gradient_s=0.0, fixed_s=0.0)
    assert simulate_step_s(EQUAL_LENGTHS, idle, narrow, TERMS) == simulate_step_s(
        EQUAL_LENGTHS, idle, WorkerSplit(1, 1), TERMS
    )
    full = replace(idle, curve=DecodeCurve("cpu", 1, 0.0, 0.002))
    wide_s = simulate_step_s(EQUAL_LENGTHS, full, WorkerSplit(3, 1), TERMS)
    assert simulate_step_s(EQUAL_LENGTHS, full, narrow, TERMS) == pytest.approx(3 * wide_s)
