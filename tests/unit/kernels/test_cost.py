"""What bins cost is learned from bins."""

from collections.abc import Iterator

import numpy as np
import pytest

from meshrl.kernels.cost import BinCost, Calibration, expected

TRUTH = BinCost(token=2e-5, square=3e-9, bin=1e-3)  # seconds


def bins(count: int, seed: int = 0) -> Iterator[list[int]]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        lengths = np.clip(random.lognormal(6, 1, int(random.integers(1, 12))), 8, 8192)
        yield [int(length) for length in lengths]


def learned(truth: BinCost, count: int = 300, noise: float = 0.0, seed: int = 0) -> Calibration:
    calibration = Calibration(expected(300_000, 96, 3), 8192)
    random = np.random.default_rng(seed)
    for lengths in bins(count, seed):
        calibration.learn(lengths, truth.of(lengths) * np.exp(noise * random.normal()))
    return calibration


def worst_error(cost: BinCost, truth: BinCost) -> float:
    return max(abs(cost.of(lengths) / truth.of(lengths) - 1) for lengths in bins(100, seed=9))


def test_a_cost_is_linear_and_quadratic_in_lengths_and_nothing_costs_nothing() -> None:
    cost = BinCost(token=2.0, square=0.5, bin=7.0)
    assert cost.of([4, 2]) == 7 + 2 * 6 + 0.5 * (16 + 4)
    assert cost.of([]) == 0


def test_before_the_first_bin_the_prior_holds() -> None:
    prior = BinCost(3, 2, 1)
    assert Calibration(prior, 100).cost() == prior


def test_exact_times_are_learned_exactly() -> None:
    assert worst_error(learned(TRUTH).cost(), TRUTH) < 0.01


@pytest.mark.parametrize("truth", [BinCost(1e-5), BinCost(1e-7, 1e-8, 1e-4), BinCost(2e-5, 0, 0.1)])
def test_whatever_machine_it_is(truth: BinCost) -> None:
    assert worst_error(learned(truth).cost(), truth) < 0.05


def test_noise_averages_out() -> None:
    assert worst_error(learned(TRUTH, noise=0.1).cost(), TRUTH) < 0.1


def test_no_term_is_ever_negative() -> None:
    for seed in range(5):
        cost = learned(BinCost(1e-5), count=20, noise=0.5, seed=seed).cost()
        assert min(cost.token, cost.square, cost.bin) >= 0 and cost.of([100]) > 0


@pytest.mark.parametrize("times", [0.1, 2, 10])
def test_a_machine_that_changes_is_learned_again(times: float) -> None:
    calibration = learned(TRUTH)
    slower = BinCost(times * TRUTH.token, times * TRUTH.square, times * TRUTH.bin)
    for lengths in bins(600, seed=3):
        calibration.learn(lengths, slower.of(lengths))
    assert worst_error(calibration.cost(), slower) < 0.05


def test_a_bin_that_was_held_up_teaches_nothing() -> None:
    calibration = learned(TRUTH)
    before = calibration.cost()
    calibration.learn([500, 40], 50 * TRUTH.of([500, 40]))
    assert calibration.cost() == before


def test_bins_that_are_all_alike_keep_the_estimate_finite_and_right_for_them() -> None:
    calibration = Calibration(expected(300_000, 96, 3), 2560)
    for _ in range(5000):
        calibration.learn([100] * 20, 0.05)
    assert calibration.cost().of([100] * 20) == pytest.approx(0.05, rel=1e-3)
    calibration.learn([100] * 10, 0.03)
    assert calibration.cost().of([100] * 10) == pytest.approx(0.03, rel=0.2)


def test_a_first_bin_that_compiled_something_is_forgotten() -> None:
    calibration = Calibration(expected(300_000, 96, 3), 8192)
    calibration.learn([100, 200], 10.0)
    for lengths in bins(40, seed=4):
        calibration.learn(lengths, TRUTH.of(lengths))
    assert worst_error(calibration.cost(), TRUTH) < 0.1
