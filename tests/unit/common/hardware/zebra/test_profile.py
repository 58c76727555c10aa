"""A profile says what lengths between measured ones take, survives JSON, and refuses nonsense."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
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
