"""The model of a prefix that is computed while it is loaded keeps to its closed form, and to what
its source has measured."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.generation.builtin.schedule import PREFILL_TOKENS
from meshrl.common.generation.loading import CHUNK
from meshrl.sim.prefixes.__main__ import A100, GBPS_32, H100, TABLE, TOKEN_BYTES, main
from meshrl.sim.prefixes.meeting import PrefixCurve, closed_form, events


def test_even_costs_meet_where_both_take_as_long() -> None:
    curve = PrefixCurve(0.1, 0.0)
    met = closed_form(curve, 0.1 / PREFILL_TOKENS, 8192)
    assert met.tokens == pytest.approx(4096) and met.seconds == pytest.approx(0.8)
    slow = closed_form(curve, 0.3 / PREFILL_TOKENS, 8192)
    compute_s, load_s = 1.6, 4.8
    assert slow.seconds == pytest.approx(compute_s * load_s / (compute_s + load_s))


@given(
    first_s=st.floats(0.005, 0.5),
    growth=st.floats(0, 0.1),
    ratio=st.floats(0.05, 20),
    chunks=st.integers(16, 256),
)
def test_the_engines_rules_are_never_far_from_it_nor_worse_than_either_alone(
    first_s: float, growth: float, ratio: float, chunks: int
) -> None:
    tokens = chunks * CHUNK
    curve = PrefixCurve(first_s, first_s * growth)
    compute_s = curve.compute_s(0, tokens)
    load_s = ratio * compute_s / tokens
    met, best = events(curve, load_s, tokens), closed_form(curve, load_s, tokens)
    step_s = curve.compute_s(tokens - PREFILL_TOKENS, tokens)
    assert met.seconds >= best.seconds - 1e-6 - max(step_s, CHUNK * load_s) / 4
    assert met.seconds <= min(compute_s, load_s * tokens) + step_s
    assert met.seconds <= best.seconds + step_s + CHUNK * load_s


def test_it_is_within_ten_percent_of_the_sources_table() -> None:
    load_s = TOKEN_BYTES / GBPS_32
    met = events(A100, load_s, 16384)
    assert load_s * 16384 / met.seconds == pytest.approx(TABLE["x_load"], rel=0.1)
    assert A100.compute_s(0, 16384) / met.seconds == pytest.approx(TABLE["x_compute"], rel=0.1)
    assert H100.compute_s(0, 512) == pytest.approx(0.0274)
    assert H100.compute_s(63 * 512, 64 * 512) == pytest.approx(0.0935)


def test_others_in_the_same_steps_move_the_meeting_point() -> None:
    load_s = TOKEN_BYTES / GBPS_32
    alone, beside = (events(A100, load_s, 16384, others) for others in (0.0, 0.5))
    assert beside.tokens < alone.tokens and beside.seconds > alone.seconds
    assert beside.seconds < load_s * 16384


def test_it_tells_what_the_source_has(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["reduction_load_2gbps"] == pytest.approx(0.946, rel=0.1)
    assert abs(figures["x_load_off"]) < 0.1 and abs(figures["x_compute_off"]) < 0.1
