"""What generating takes by the cost model, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.layouts import released
from loadtests.layouts.cases import DEGREES, QWEN_14B, QWEN_30B_A3B
from meshrl.common.hardware.profiles import Accelerator, declared
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.pace import PROFILES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.planner.costs.rollout import EngineGang

# 2 layers of 8 features, 4 heads of 2 and 2 of keys and values; one operation, byte a second.
TINY = ModelShape(2, 8, 4, 2, 2, parameters=1000.0, active=1000.0)
PLAIN = Accelerator("plain", 1e6, 1e4, 1e3, 1e2, 10.0, 0.5, 0.5, 0.5, collective_s=0.25)
A800 = declared()["A800"]


def test_a_decode_step_reads_the_weights_and_the_contexts() -> None:
    # 2,000 bytes of weights; 3 x 5 tokens of 2 layers x 2 heads x 2 features x 2 x 2 bytes each.
    assert EngineGang(TINY, PLAIN).step_s(3, 5) == pytest.approx((2000 + 15 * 32) / 500)


def test_a_large_batch_takes_its_arithmetic() -> None:
    assert EngineGang(TINY, PLAIN).step_s(10_000, 0) == pytest.approx(2 * 1000 * 10_000 / 5e5)


def test_ranks_read_their_parts_and_meet_twice_a_layer() -> None:
    # Half of the weights, one of two heads; four all-reduces of 3 x 8 features of 2 bytes.
    meets = 4 * (0.25 + 2 * 0.5 * 48 / 100)
    expected = (1000 + 15 * 16) / 500 + meets
    assert EngineGang(TINY, PLAIN, 2).step_s(3, 5) == pytest.approx(expected)


def test_more_ranks_than_heads_of_keys_hold_copies() -> None:
    assert TINY.kv_bytes(1) == 2 * TINY.kv_bytes(2) == 2 * TINY.kv_bytes(4)


@pytest.mark.parametrize(("degree", "divides"), [(1, True), (2, True), (4, True), (8, False)])
def test_heads_are_divided_evenly(degree: int, divides: bool) -> None:
    assert TINY.splits(degree) is divides


def test_three_heads_of_keys_are_not_split_over_two_ranks() -> None:
    assert not ModelShape(1, 12, 6, 3, 2, 100.0, 100.0).splits(2)


def test_what_weights_leave_is_room_for_contexts() -> None:
    gang = EngineGang(QWEN_14B, A800, 2)
    # 80 GB less half of 29.6 GB and the workspace; 40 layers x 4 heads x 128 features x 2 x 2 bytes
    assert gang.capacity() == pytest.approx(0.96 * (80e9 - 14.8e9 - 1e9) / (40 * 4 * 128 * 4))
    assert gang.fits(700_000)
    assert not gang.fits(800_000)


def test_a_model_that_is_too_large_for_one_needs_several() -> None:
    large = ModelShape(80, 8192, 64, 8, 128, 70e9, 70e9)
    assert [degree for degree in DEGREES if EngineGang(large, A800, degree).fits(4096)] == [2, 4, 8]


def test_a_mixture_reads_the_experts_that_its_batch_is_sent_to() -> None:
    # 8 of 128 experts: (30.5 - 3.3) / (1 - 8/128) are the experts'.
    experts = 27.2e9 / (1 - 8 / 128)
    assert QWEN_30B_A3B.read_parameters(1) == pytest.approx(3.3e9)
    two = 30.5e9 - experts * (120 / 128) ** 2
    assert QWEN_30B_A3B.read_parameters(2) == pytest.approx(two)
    assert QWEN_30B_A3B.read_parameters(500) == pytest.approx(30.5e9)


def test_prefill_is_linear_in_tokens_and_in_what_they_look_at() -> None:
    gang = EngineGang(TINY, PLAIN)
    # 2 operations a parameter, 2 a pair, layer and feature of all heads
    assert gang.prefill_s(10) == pytest.approx((2 * 1000 * 10 + 2 * 8 * 2 * 100) / 5e5)
    in_parts = gang.prefill_s(6) + gang.prefill_s(4, before=6)
    assert in_parts == pytest.approx(gang.prefill_s(10))


def test_a_gang_of_one_is_as_fast_as_a_paced_engine() -> None:
    seven = ModelShape(28, 3584, 28, 4, 128, 7.6e9, 7.6e9)
    gang, pace = EngineGang(seven, declared()["A100"]), PROFILES["a100-7b"]
    assert gang.step_s(1, 0) == pytest.approx(pace.decode_s)
    assert gang.step_s(2 * pace.plateau, 0) == pytest.approx(2 * pace.decode_s, rel=0.02)


@given(st.sampled_from(DEGREES), st.integers(2, 512), st.integers(0, 40_000))
def test_a_curve_meets_the_steps_at_its_ends_and_is_never_below_them(
    degree: int, batch: int, context: int
) -> None:
    gang = EngineGang(QWEN_14B, A800, degree)
    line = gang.curve(batch)
    assert (line.kind, line.degree, line.steps) == ("A800", degree, 0)
    for at in (1, batch):
        assert line.step_s(at, context) == pytest.approx(gang.step_s(at, context))
    assert line.step_s(batch / 2, context) >= gang.step_s(max(1, batch / 2), context) * (1 - 1e-9)


def test_the_released_formula_is_as_many_times_too_fast_as_there_are_ranks() -> None:
    one, eight = EngineGang(QWEN_14B, A800), EngineGang(QWEN_14B, A800, 8)
    meets = 80 * A800.collective_s
    assert released.step_s(one, 8, 4096) == pytest.approx(one.step_s(8, 4096))
    reads = QWEN_14B.bytes / 8 + 8 * 4096 * QWEN_14B.kv_bytes(8)
    assert released.step_s(eight, 8, 4096) - meets == pytest.approx(
        reads / A800.read_bytes_per_s / 8
    )
    assert eight.step_s(8, 4096) / released.step_s(eight, 8, 4096) > 2.5
    # All ranks' room by one rank's tokens, but for the workspace.
    assert released.capacity(eight) / eight.capacity() == pytest.approx(8, rel=0.02)


def test_the_shape_of_a_config() -> None:
    config = ModelConfig(
        "qwen3_moe", 1000, 64, 4, 8, 2, 8, 0,
        experts=16, experts_per_token=2, expert_ffn_size=32,
    )  # fmt: skip
    shape = ModelShape.of(config)
    assert shape.parameters == config.parameters
    assert shape.parameters - shape.active == 4 * 14 * 3 * 64 * 32
    assert (shape.experts, shape.experts_per_token, shape.attention_width) == (16, 2, 64)
    dense = ModelShape.of(ModelConfig("qwen3", 1000, 64, 4, 8, 2, 8, 128))
    assert dense.active == dense.parameters
    assert dense.read_parameters(64) == dense.parameters
