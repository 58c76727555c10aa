"""Profiles of kernels: measured, declared, and refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.profiles import declared
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.hardware.zebra.kinds import UTILISATION, declared_profile, speed
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, CostCurve, Profile, kind_of_table

LINE = CostCurve((1,), (1e-6,))
FAST = AcceleratorCosts("A40", 4e10, LINE, CostCurve((1024, 4096), (0.001, 0.007)), LINE)
SLOW = AcceleratorCosts("V100", 1e10, LINE)
PROFILE = Profile(
    fast=FAST,
    slow=SLOW,
    layers=4,
    experts=8,
    experts_per_token=2,
    row_bytes=4096,
    link_bytes_per_s=1e10,
    attention_bytes=1e9,
    expert_bytes=1e8,
    attention_gradient_bytes=1e8,
    expert_gradient_bytes=1e7,
    attention_token_bytes=1e4,
    expert_row_bytes=4096,
)
# As the source's W1 without its gate: 2,048 wide, 8 key-value heads of 128, 12 experts.
EXPERT = 3 * 2048 * 7168
PARAMETERS = 4 * (2 * 2048 * 3072 + 12 * 2048 + 12 * EXPERT) + 2 * 32000 * 2048
SHAPE = ModelShape(4, 2048, 16, 8, 128, PARAMETERS, PARAMETERS - 40 * EXPERT, 12, 2)


def test_a_curve_is_straight_between_what_was_measured() -> None:
    curve = CostCurve((1000, 2000, 4000), (1.0, 3.0, 11.0))
    assert [curve.of(x) for x in (0, 500, 1000, 1500, 3000, 5000)] == [0, 0.5, 1, 2, 7, 15]
    assert LINE.of(12345) == pytest.approx(0.012345)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_takes_no_less(a: int, b: int) -> None:
    curve = CostCurve((1000, 2000, 4000), (1.0, 3.0, 11.0))
    assert curve.of(min(a, b)) <= curve.of(max(a, b))


@pytest.mark.parametrize(
    ("at", "values"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((0, 1), (0.0, 1.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (float("nan"),)),
        ((1,), (-1.0,)),
    ],
)
def test_a_curve_of_nonsense_is_refused(at: tuple[int, ...], values: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        CostCurve(at, values)


def test_a_kind_survives_json() -> None:
    assert kind_of_table(json.loads(json.dumps(asdict(FAST))), "fast") == FAST


def test_a_profile_without_attention_or_memory_is_refused_and_named() -> None:
    for fast, said in ((SLOW, "has no attention"), (replace(FAST, memory_bytes=0.0), "0.0 bytes")):
        with pytest.raises(ConfigError, match=said) as refused:
            replace(PROFILE, fast=fast)
        assert refused.value.where and refused.value.fix


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (3, "AcceleratorCosts is no table"),
        ({"name": "V100"}, "memory_bytes is missing"),
        (asdict(SLOW) | {"speed": 3}, "speed is not known"),
        (asdict(SLOW) | {"memory_bytes": "many"}, "memory_bytes of slow is 'many'"),
        (asdict(SLOW) | {"memory_bytes": True}, "memory_bytes of slow is True"),
        ({"name": 1, "memory_bytes": 1.0, "experts": {}}, "slow is called 1"),
        (asdict(SLOW) | {"experts": {"at": 1, "seconds": [1]}}, "list"),
    ],
)
def test_a_kind_of_nonsense_is_refused_and_named(table: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        kind_of_table(table, "slow")
    assert refused.value.where and refused.value.fix


def attention(profile: Profile, length: int) -> float:
    """How many times as long the slow kind takes."""
    fast, slow = profile.fast.attention, profile.slow.attention
    assert isinstance(fast, CostCurve) and isinstance(slow, CostCurve)
    return slow.of(length) / fast.of(length)


def experts(profile: Profile) -> float:
    return profile.slow.experts.of(1000) / profile.fast.experts.of(1000)


def test_a_v100_is_four_fifths_of_an_a40_for_experts_and_far_less_for_attention() -> None:
    profile = declared_profile(SHAPE, "A40", "V100")
    assert experts(profile) == pytest.approx(1 / 0.8)
    assert attention(profile, 65536) == pytest.approx(3.7, rel=0.01)
    assert 1.25 < attention(profile, 1024) < attention(profile, 8192) < 3.7


def test_a_t4_has_both_measured_ratios_to_an_l40s() -> None:
    profile = declared_profile(SHAPE, "L40S", "T4")
    assert experts(profile) == pytest.approx(7.0)
    assert attention(profile, 4096) == pytest.approx(9.9, rel=0.01)
    assert attention(profile, 65536) == pytest.approx(13.6, rel=0.01)
    middle = declared_profile(SHAPE, "L40S", "T4", scores=0.5)
    assert attention(middle, 65536) == pytest.approx(13.6, rel=0.01)


def test_other_kinds_are_known_by_their_peaks() -> None:
    assert speed("A100").matrices == declared()["A100"].flops * UTILISATION
    assert speed("T4").scores_at(100) == speed("T4").scores_at(4096)
    low, middle, high = (1 / speed("T4").scores_at(k << 10) for k in (4, 16, 64))
    assert middle == pytest.approx((low + high) / 2)
    with pytest.raises(ConfigError, match="nothing is known of abacus"):
        speed("abacus")


def test_times_and_bytes_are_those_of_the_shape() -> None:
    profile = declared_profile(SHAPE, "A40", "V100")
    rate = declared()["A40"].flops * UTILISATION
    assert profile.fast.experts.of(1) == pytest.approx(2 * EXPERT / rate)
    assert profile.fast.head is not None and profile.fast.attention is not None
    assert profile.fast.head.of(1) == pytest.approx(2 * 32000 * 2048 / rate)
    flops = 4096 * 2 * (2 * 2048 * 3072 + 12 * 2048) + 2 * 4096**2 * 2048
    assert profile.fast.attention.of(4096) == pytest.approx(flops / rate)
    assert profile.expert_bytes == pytest.approx(16 * EXPERT)
    assert profile.attention_bytes + 48 * profile.expert_bytes == pytest.approx(16 * PARAMETERS)
    assert profile.row_bytes == 4096 and profile.link_bytes_per_s == 6.25e9


def test_a_dense_model_has_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match="0 of 0 experts"):
        declared_profile(ModelShape(4, 2048, 16, 8, 128, 1e9, 1e9), "A40", "V100")
