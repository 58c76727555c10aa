"""Draws by counter are uniform, unrelated, and the same whatever is drawn beside them."""

from __future__ import annotations

import numpy as np
import pytest

from meshrl.common.generation.counter import draws, key_of, uniforms


def keys(seeds: range) -> np.ndarray:
    return np.array([key_of(seed) for seed in seeds], np.uint64)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    together = uniforms(keys(range(50))[:, None], np.arange(40))
    alone = uniforms(keys(range(17, 18)), np.array([23]))
    assert together[17, 23] == alone[0]


def test_the_generator_is_splitmix64() -> None:
    """The reference implementation's first outputs for state 1234567."""
    state = np.array([1234567], np.uint64)
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert draws(state, np.arange(3)).tolist() == first


@pytest.mark.parametrize("axis", [0, 1], ids=["over seeds", "over positions"])
def test_draws_are_uniform_and_neighbours_are_not_correlated(axis: int) -> None:
    drawn = uniforms(keys(range(300))[:, None], np.arange(300))
    assert ((drawn > 0) & (drawn < 1)).all()
    counts, _ = np.histogram(drawn, bins=50, range=(0, 1))
    assert ((counts - 1800) ** 2 / 1800).sum() < 90  # chi-square with 49 degrees of freedom
    a, b = np.take(drawn, range(299), axis), np.take(drawn, range(1, 300), axis)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_negative_and_huge_seeds_are_seeds() -> None:
    assert len({key_of(seed) for seed in (-1, 0, 1, 2**63, 2**64 - 2)}) == 5
