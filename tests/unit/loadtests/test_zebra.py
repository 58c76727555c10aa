"""Comparison on emulated ranks, and figures of their steps."""

from __future__ import annotations

import numpy as np
import pytest

from loadtests.zebra.__main__ import beside_the_simulator
from loadtests.zebra.gang import COUNT, MICROS, Setting, arms, bin_of


def test_all_arms_compute_the_same_number_of_sequences() -> None:
    setting = Setting("D1", 4096)
    chosen = {arm.name: arm for arm in arms(setting)}
    assert chosen.keys() == {"zebra", "free", "distep", "ep", "asymmetric"}
    for arm in chosen.values():
        assert arm.division.bins_per_round * arm.rounds == COUNT * MICROS, arm
    assert chosen["ep"].division.hosted_experts == (6,) * 8
    kept = [24 - COUNT * hosted for hosted in chosen["asymmetric"].division.hosted_experts]
    assert all(0 <= some < 24 and some % COUNT == 0 for some in kept)


@pytest.mark.parametrize("model", ["D1", "W1", "W2"])
def test_rows_are_spread_evenly_over_experts(model: str) -> None:
    setting = Setting(model, 4096)
    chosen = bin_of(setting, 1).expert_ids
    assert chosen is not None and chosen.shape[1:] == (setting.profile.layers, 2)
    for layer in range(setting.profile.layers):
        counts = np.bincount(chosen[:, layer].ravel(), minlength=setting.profile.experts)
        assert len(set(counts.tolist())) == 1
        assert (chosen[:, layer, 0] != chosen[:, layer, 1]).all()


def test_unhidden_transfers_lengthen_the_step() -> None:
    setting = Setting("D1", 4096)
    one = {"step_s": 5.0, "spans": [(0.0, 4.0)], "transfers": [(0.0, 1.0)]}
    steps = {"zebra": [[one] for _ in range(2 * COUNT)]}
    told = {"zebra_s": 5.0, "free_s": 4.8, "ratio_distep": 1.5}
    found = beside_the_simulator(setting, steps, told)
    assert found["overlap_share"] == pytest.approx(0.9)
    simulated = setting.simulated(asymmetric=False)
    wanted = (simulated.attention_utilisation, simulated.experts_utilisation)
    error = max(abs(0.8 - utilisation) for utilisation in wanted)
    assert found["utilisation_error"] == pytest.approx(error, abs=1e-3)
