"""Packing of sequences into bins and of bins into rounds."""

from collections.abc import Iterator, Sequence
from itertools import product, repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.kernels.bin_cost import BinCost, CostCalibration, estimate_from_flops
from meshrl.kernels.packing import (
    SIZES_PER_DOUBLING,
    Round,
    RoundPacker,
    compute_makespan,
    get_padded_size,
    pack_rounds,
)

lengths_of_a_step = st.lists(st.integers(1, 320), max_size=80)
costs = st.builds(
    BinCost,
    per_token=st.sampled_from([0.0, 1.0, 0.01]),
    per_square=st.sampled_from([0.0, 1 / 64, 2.0]),
    per_bin=st.sampled_from([0.0, 50.0, 5000.0]),
).filter(lambda cost: cost.per_token + cost.per_square > 0)
some_ranks = st.sampled_from([1, 2, 3, 8])


def check_plan(rounds: list[Round], lengths: list[int], budget: int, ranks: int) -> None:
    assert all(len(one) == ranks and any(one) for one in rounds)
    assert sorted(i for one in rounds for bin in one for i in bin) == list(range(len(lengths)))
    for bin in (bin for one in rounds for bin in one):
        assert sum(lengths[i] for i in bin) <= budget or len(bin) == 1


@settings(max_examples=150)
@given(lengths_of_a_step, st.integers(1, 4096), some_ranks, costs)
def test_each_sequence_is_in_one_bin_within_the_budget_or_alone(
    lengths: list[int], budget: int, ranks: int, cost: BinCost
) -> None:
    check_plan(pack_rounds(lengths, budget, ranks, cost), lengths, budget, ranks)


@settings(max_examples=100)
@given(lengths_of_a_step, st.integers(1, 2048), some_ranks, costs, st.data())
def test_incrementally_added_sequences_are_all_packed(
    lengths: list[int], budget: int, ranks: int, cost: BinCost, data: st.DataObject
) -> None:
    packer, rounds, left = RoundPacker(budget, ranks, cost), [], list(lengths)
    while left:
        count = data.draw(st.integers(1, 20))
        rounds += packer.add_sequences(left[:count])
        left = left[count:]
    rounds += packer.flush()
    check_plan(rounds, lengths, budget, ranks)
    assert packer.flush() == [] and packer.add_sequences([]) == []


@given(lengths_of_a_step, some_ranks, costs)
def test_equal_lengths_are_packed_equally(lengths: list[int], ranks: int, cost: BinCost) -> None:
    assert pack_rounds(lengths, 640, ranks, cost) == pack_rounds(tuple(lengths), 640, ranks, cost)


@pytest.mark.rotating(2)
@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.sampled_from([BinCost(), BinCost(1, 0.1, 5), BinCost(0, 1, 3)]),
)
def test_small_plans_are_within_a_third_of_the_optimum(lengths: list[int], cost: BinCost) -> None:
    """Check against all assignments of six sequences to at most three rounds of two bins. Graham's
    bound for longest processing time first is a third, without budgets.
    """
    ours = compute_makespan(pack_rounds(lengths, 40, 2, cost), lengths, cost)
    best = min(
        compute_makespan(rounds, lengths, cost)
        # Bins of a round and rounds are interchangeable: the first sequence is in bin 0, and the
        # second beside it, in the other bin of the round, or in another round.
        for places in product(*([0], range(3), *repeat(range(6), 4))[: len(lengths)])
        if (rounds := make_rounds(places, lengths, 40))
    )
    assert best * (1 - 1e-9) <= ours <= 4 / 3 * best


def make_rounds(places: Sequence[int], lengths: list[int], budget: int) -> list[Round] | None:
    bins = [[i for i, place in enumerate(places) if place == b] for b in range(6)]
    if any(sum(lengths[i] for i in bin) > budget for bin in bins):
        return None
    return [bins[r : r + 2] for r in (0, 2, 4) if any(bins[r : r + 2])]


def draw_long_tail(count: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    lengths: list[int] = (
        np.clip(random.lognormal(np.log(500), 1.0, count), 8, 8192).astype(int).tolist()
    )
    return lengths


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_long_tail_is_balanced_and_fills_the_bins(ranks: int) -> None:
    lengths, cost = draw_long_tail(2048), BinCost(1.0, 1 / 4096, 300.0)
    rounds = pack_rounds(lengths, 16384, ranks, cost)
    total = sum(map(cost.estimate_sequence, lengths))
    assert compute_makespan(rounds, lengths, cost) <= 1.005 * (
        total / ranks + len(rounds) * cost.per_bin
    )
    assert sum(lengths) >= 0.9 * 16384 * ranks * len(rounds)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_streaming_adds_little_time(ranks: int) -> None:
    lengths, cost = draw_long_tail(2048, seed=1), BinCost(1.0, 1 / 4096, 300.0)
    packer = RoundPacker(16384, ranks, cost)
    rounds = [one for i in range(0, 2048, 16) for one in packer.add_sequences(lengths[i : i + 16])]
    assert len(rounds) * ranks * 16384 > 0.7 * sum(lengths)  # most rounds were complete early
    rounds += packer.flush()
    batch = compute_makespan(pack_rounds(lengths, 16384, ranks, cost), lengths, cost)
    assert compute_makespan(rounds, lengths, cost) <= 1.06 * batch


def test_oversized_sequences_share_rounds_with_similar_ones() -> None:
    rounds = pack_rounds([900, 10, 950, 10, 10, 800, 870], 100, 2, BinCost(1, 0.01))
    beside = [sorted(bin) for bin in rounds[0]] + [sorted(bin) for bin in rounds[1]]
    assert sorted(beside) == [[0], [2], [5], [6]]
    assert sorted(i for bin in rounds[2] for i in bin) == [1, 3, 4]


def test_empty_input_has_no_rounds_and_an_empty_sequence_is_rejected() -> None:
    assert pack_rounds([], 2560) == []
    with pytest.raises(ValueError, match="no tokens"):
        pack_rounds([3, 0], 2560)


@given(st.integers(1, 1 << 20))
def test_padded_size_is_slightly_larger_than_the_bin(tokens: int) -> None:
    size = get_padded_size(tokens)
    assert tokens <= size < tokens + max(16, tokens / SIZES_PER_DOUBLING)
    assert get_padded_size(size) == size


def test_padded_sizes_are_few() -> None:
    sizes = {get_padded_size(tokens) for tokens in range(4096, 8192)}
    assert len(sizes) <= SIZES_PER_DOUBLING + 1


TRUTH = BinCost(per_token=2e-5, per_square=3e-9, per_bin=1e-3)  # seconds


def draw_bins(count: int, seed: int = 0) -> Iterator[list[int]]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        lengths = np.clip(random.lognormal(6, 1, int(random.integers(1, 12))), 8, 8192)
        yield [int(length) for length in lengths]


def calibrate(
    truth: BinCost, count: int = 300, noise: float = 0.0, seed: int = 0
) -> CostCalibration:
    calibration = CostCalibration(estimate_from_flops(300_000, 96, 3), 8192)
    random = np.random.default_rng(seed)
    for lengths in draw_bins(count, seed):
        calibration.add_measurement(
            lengths, truth.estimate_bin(lengths) * np.exp(noise * random.normal())
        )
    return calibration


def compute_worst_error(cost: BinCost, truth: BinCost) -> float:
    return max(
        abs(cost.estimate_bin(lengths) / truth.estimate_bin(lengths) - 1)
        for lengths in draw_bins(100, seed=9)
    )


def test_cost_has_a_linear_a_quadratic_and_a_constant_term() -> None:
    cost = BinCost(per_token=2.0, per_square=0.5, per_bin=7.0)
    assert cost.estimate_bin([4, 2]) == 7 + 2 * 6 + 0.5 * (16 + 4)
    assert cost.estimate_bin([]) == 0


def test_cost_before_the_first_bin_is_the_prior() -> None:
    prior = BinCost(3, 2, 1)
    assert CostCalibration(prior, 100).get_cost() == prior


def test_exact_times_are_learned_exactly() -> None:
    assert compute_worst_error(calibrate(TRUTH).get_cost(), TRUTH) < 0.01


@pytest.mark.parametrize("truth", [BinCost(1e-5), BinCost(1e-7, 1e-8, 1e-4), BinCost(2e-5, 0, 0.1)])
def test_calibration_fits_any_machine(truth: BinCost) -> None:
    assert compute_worst_error(calibrate(truth).get_cost(), truth) < 0.05


def test_noise_averages_out() -> None:
    assert compute_worst_error(calibrate(TRUTH, noise=0.1).get_cost(), TRUTH) < 0.1


def test_cost_terms_are_never_negative() -> None:
    for seed in range(5):
        cost = calibrate(BinCost(1e-5), count=20, noise=0.5, seed=seed).get_cost()
        assert (
            min(cost.per_token, cost.per_square, cost.per_bin) >= 0 and cost.estimate_bin([100]) > 0
        )


@pytest.mark.parametrize("times", [0.1, 2, 10])
def test_calibration_follows_a_change_of_the_machine(times: float) -> None:
    calibration = calibrate(TRUTH)
    slower = BinCost(times * TRUTH.per_token, times * TRUTH.per_square, times * TRUTH.per_bin)
    for lengths in draw_bins(600, seed=3):
        calibration.add_measurement(lengths, slower.estimate_bin(lengths))
    assert compute_worst_error(calibration.get_cost(), slower) < 0.05


def test_outlier_does_not_change_the_estimate() -> None:
    calibration = calibrate(TRUTH)
    before = calibration.get_cost()
    calibration.add_measurement([500, 40], 50 * TRUTH.estimate_bin([500, 40]))
    assert calibration.get_cost() == before


def test_equal_bins_keep_the_estimate_finite_and_accurate() -> None:
    calibration = CostCalibration(estimate_from_flops(300_000, 96, 3), 2560)
    for _ in range(5000):
        calibration.add_measurement([100] * 20, 0.05)
    assert calibration.get_cost().estimate_bin([100] * 20) == pytest.approx(0.05, rel=1e-3)
    calibration.add_measurement([100] * 10, 0.03)
    assert calibration.get_cost().estimate_bin([100] * 10) == pytest.approx(0.03, rel=0.2)


def test_slow_first_bin_is_forgotten() -> None:
    calibration = CostCalibration(estimate_from_flops(300_000, 96, 3), 8192)
    calibration.add_measurement([100, 200], 10.0)
    for lengths in draw_bins(40, seed=4):
        calibration.add_measurement(lengths, TRUTH.estimate_bin(lengths))
    assert compute_worst_error(calibration.get_cost(), TRUTH) < 0.1
