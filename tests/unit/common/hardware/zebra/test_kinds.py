"""Declared profiles have the ratios of kernels that HeterMoE has measured."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.profiles import declared
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.hardware.zebra.kinds import UTILISATION, declared_profile, speed
from meshrl.common.hardware.zebra.profile import CostCurve, Profile

# As the source's W1 without its gate: 2,048 wide, 8 key-value heads of 128, 12 experts.
EXPERT = 3 * 2048 * 7168
PARAMETERS = 4 * (2 * 2048 * 3072 + 12 * 2048 + 12 * EXPERT) + 2 * 32000 * 2048
SHAPE = ModelShape(4, 2048, 16, 8, 128, PARAMETERS, PARAMETERS - 40 * EXPERT, 12, 2)


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
