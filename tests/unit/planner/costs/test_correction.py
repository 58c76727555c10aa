"""Predictions that observations correct."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.encoding.plain import plain, restored
from meshrl.services.planner.costs.correction import FORGETTING, KEYS, Correction, CorrectionKey

KEY = CorrectionKey("qwen3-14b", "A800", "rollout")
OTHER = CorrectionKey("qwen3-14b", "A800", "training")
seconds = st.floats(1e-6, 1e6)


def seen(observed: list[tuple[float, float]]) -> Correction:
    found = Correction()
    for predicted, took in observed:
        found = found.seen(KEY, predicted, took)
    return found


def test_what_nobody_has_observed_is_predicted_as_it_is() -> None:
    assert Correction().predicted(KEY, 3.0) == 3.0
    assert Correction().error(KEY) == 0.0


def test_one_observation_is_believed() -> None:
    found = seen([(2.0, 3.0)])
    assert found.predicted(KEY, 4.0) == pytest.approx(6.0)
    assert found.predicted(OTHER, 4.0) == 4.0
    assert found.error(KEY) == pytest.approx(0.5)


def test_first_observations_weigh_alike_as_ratios() -> None:
    found = seen([(1.0, 2.0), (1.0, 8.0)])
    assert found.factor(KEY).value == pytest.approx(4.0)


def test_a_machine_that_has_changed_is_known_after_a_while() -> None:
    found = seen([(1.0, 2.0)] * 100 + [(1.0, 4.0)] * 30)
    off = math.log(4.0 / found.factor(KEY).value)
    assert off == pytest.approx(math.log(2.0) * FORGETTING**30, rel=1e-6)
    assert found.error(KEY) < 0.15


def test_a_prediction_that_comes_true_has_no_error_in_the_end() -> None:
    assert seen([(1.0, 5.0)] * 60).error(KEY) < 0.01


@pytest.mark.parametrize("took", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_not_learned_from(took: float) -> None:
    before = seen([(1.0, 2.0)])
    assert before.seen(KEY, 1.0, took) == before.seen(KEY, took, 1.0) == before


def test_the_factors_of_who_was_observed_last_are_kept() -> None:
    found = seen([(1.0, 2.0)])
    for n in range(KEYS + 10):
        found = found.seen(CorrectionKey("model", str(n), "rollout"), 1.0, 2.0)
        found = found.seen(KEY, 1.0, 2.0)
    assert len(found.factors) == KEYS
    assert found.factor(KEY).count == KEYS + 11
    assert CorrectionKey("model", "0", "rollout") not in found.factors


@given(st.lists(st.tuples(seconds, seconds), max_size=20))
def test_it_goes_through_json_and_stays_within_what_was_seen(
    observed: list[tuple[float, float]],
) -> None:
    found = seen(observed).seen(OTHER, 1.0, 2.0)
    assert restored(Correction, json.loads(json.dumps(plain(found)))) == found
    ratios = [min(max(took / told, 0.01), 100.0) for told, took in observed]
    if ratios:
        value = found.factor(KEY).value
        assert min(ratios) * (1 - 1e-9) <= value <= max(ratios) * (1 + 1e-9)
