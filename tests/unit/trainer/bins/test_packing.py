"""Bins: what lies where, and what of it is trained."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshrl.common.base.errors import BadMessage
from meshrl.services.trainer.bins.packing import Bin, Sequence, fresh, make_bins


def sequence(length: int, seed: int = 0, version: int = 0) -> Sequence:
    random = np.random.default_rng(seed)
    return Sequence(
        tokens=random.integers(0, 64, length).astype(np.int32),
        logprobs=random.normal(size=length).astype(np.float32),
        mask=random.random(length) < 0.5,
        versions=np.full(length, version, np.int32),
        advantages=random.normal(size=length).astype(np.float32),
        extras={"reference": random.normal(size=length).astype(np.float32)},
    )


def unpacked(bins: Iterable[Bin]) -> Iterator[dict[str, NDArray[Any]]]:
    """Every sequence's places, in no particular order, as tuples of arrays."""
    for bin in bins:
        for start, end in itertools.pairwise(bin.starts):
            arrays = bin.to_arrays()
            del arrays["starts"]
            yield {name: array[start:end] for name, array in arrays.items()}


@given(st.lists(st.integers(2, 320), min_size=1, max_size=40), st.integers(320, 2560))
def test_every_sequence_is_in_the_bins_once_and_whole(lengths: list[int], budget: int) -> None:
    given_ = [sequence(length, seed) for seed, length in enumerate(lengths)]
    bins = make_bins(given_, budget)
    assert all(bin.tokens.size <= budget for bin in bins)
    found = {(*part["tokens"], part["targets"][-1]): part for part in unpacked(bins)}
    assert sum(1 for _ in unpacked(bins)) == len(given_)
    for one in given_:
        part = found[tuple(one.tokens)]
        assert (part["targets"] == one.tokens[1:]).all()
        assert (part["positions"] == np.arange(len(one.tokens) - 1)).all()
        assert (part["mask"] == one.mask[1:]).all()
        assert (part["behaviour"] == one.logprobs[1:]).all()
        assert (part["advantage"] == one.advantages[1:]).all()
        assert (part["extra.reference"] == one.extras["reference"][1:]).all()


def test_tokens_are_fresh_while_all_before_them_is_of_the_trained_version() -> None:
    one = sequence(6)
    one.mask = np.array([False, True, True, False, True, True])
    one.versions = np.array([-1, 3, 3, -1, 2, 3], np.int32)
    assert fresh(one, 3).tolist() == [False, True, True, False, False, False]
    assert not fresh(one, 2).any() and not fresh(one, -1).any()


def test_a_prompt_of_another_version_leaves_nothing_fresh() -> None:
    one = sequence(4)
    one.mask = np.array([False, False, True, True])
    one.versions = np.array([1, 1, 2, 2], np.int32)
    assert not fresh(one, 2).any()


def test_a_number_that_an_abandoned_lineage_gave_to_other_weights_is_not_fresh() -> None:
    one = sequence(4)
    one.mask = np.array([False, True, True, True])
    one.versions = np.array([-1, 9, 9, 9], np.int32)
    assert fresh(one, 9).sum() == 3
    one.foreign_above = 8
    assert not fresh(one, 9).any()
    one.versions = np.array([-1, 8, 8, 9], np.int32)
    assert fresh(one, 8).tolist() == [False, True, True, False]


def test_a_bin_survives_the_wire() -> None:
    (bin,) = make_bins([sequence(50), sequence(70)], 2560, version=0)
    arrays = {name: array.copy() for name, array in bin.to_arrays().items()}
    for array in arrays.values():
        array.flags.writeable = False  # as buffers of a frame are
    again = Bin.from_arrays(arrays)
    assert all((array == arrays[name]).all() for name, array in again.to_arrays().items())
    assert again.trained == bin.trained and again.tokens.flags.writeable


def test_arrays_that_are_no_bin_are_refused() -> None:
    (bin,) = make_bins([sequence(50)], 2560)
    arrays = bin.to_arrays()
    for wrong in (
        {k: v for k, v in arrays.items() if k != "mask"},
        arrays | {"more": arrays["mask"]},
        arrays | {"tokens": arrays["tokens"].astype(np.int64)},
        arrays | {"behaviour": arrays["behaviour"][:-1]},
        arrays | {"starts": arrays["starts"][::-1]},
        {name: array[None] for name, array in arrays.items()},
    ):
        with pytest.raises(BadMessage, match="bin"):
            Bin.from_arrays(wrong)


def test_a_sequence_without_anything_to_predict_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than two tokens"):
        make_bins([sequence(1)], 2560)
