"""Order of training prompts over the rows, by seed, epoch and index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.job.config import DatasetConfig, JobConfig
from meshrl.common.job.prompt_order import BLOCK_PROMPTS, PromptMix, PromptOrder

EPOCHS_OF_SEED_0 = [*[3, 2, 1, 6, 0, 7, 4, 5], *[7, 4, 5, 1, 6, 2, 0, 3]]


def make_order(seed: int, *counts: int, shuffles: bool = True) -> PromptOrder:
    """Return the order of rows of sources with equal weights."""
    return PromptOrder(PromptMix(seed, [1.0] * len(counts)), counts, shuffles=shuffles)


@given(st.integers(-(2**63), 2**63), st.integers(1, 40), st.integers(0, 10**9))
def test_each_epoch_has_every_row_once(seed: int, count: int, epoch: int) -> None:
    order = make_order(seed, count)
    rows = [order.find_row(epoch * count + place) for place in range(count)]
    assert sorted(rows) == list(range(count))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first, second = (make_order(7, 100) for _ in range(2))
    backwards = [second.find_row(prompt) for prompt in reversed(range(500))][::-1]
    rows = [first.find_row(prompt) for prompt in range(500)]
    assert rows == backwards
    assert rows[:100] != rows[100:200]
    assert rows[:100] != [make_order(8, 100).find_row(n) for n in range(100)]


def test_order_of_a_seed_never_changes_so_that_old_runs_continue() -> None:
    order = make_order(0, 8)
    assert [order.find_row(prompt) for prompt in range(16)] == EPOCHS_OF_SEED_0


def test_rows_keep_their_order_without_shuffling() -> None:
    order = make_order(0, 3, shuffles=False)
    assert [order.find_row(prompt) for prompt in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("stored", "shuffles"), [({}, False), ({"shuffle": True}, True)])
def test_stored_documents_without_the_key_keep_the_order_of_the_file(
    stored: dict[str, bool], shuffles: bool
) -> None:
    assert JobConfig.from_document({"dataset": stored}).dataset.shuffle is shuffles
    assert JobConfig.from_document({}).dataset.shuffle is False
    assert DatasetConfig().shuffle is True


def test_mixed_prompts_have_the_shares_of_their_weights() -> None:
    mix = PromptMix(3, [3.0, 1.0])
    sources = [mix.find_source(prompt) for prompt in range(20_000)]
    assert 0.73 < sources.count(0) / len(sources) < 0.77


def test_each_source_has_every_row_once_before_it_repeats() -> None:
    order = make_order(1, 5, 3)
    rows = [order.find_row(prompt) for prompt in range(60)]
    first, second = [n for n in rows if n < 5], [n for n in rows if n >= 5]
    for own, of in ((first, range(5)), (second, range(5, 8))):
        for start in range(0, len(own) - len(of), len(of)):
            assert sorted(own[start : start + len(of)]) == list(of)


def test_mixed_order_is_the_same_from_any_start() -> None:
    prompts = [0, 7, BLOCK_PROMPTS - 1, BLOCK_PROMPTS, 3 * BLOCK_PROMPTS + 5]
    straight = make_order(9, 50, 20)
    expected = [straight.find_row(prompt) for prompt in prompts]
    assert [make_order(9, 50, 20).find_row(prompt) for prompt in prompts] == expected
    assert [straight.find_row(prompt) for prompt in prompts[::-1]] == expected[::-1]
    mix = PromptMix(9, [1.0, 1.0])
    source, index = mix.locate(BLOCK_PROMPTS)
    assert index == sum(mix.find_source(prompt) == source for prompt in range(BLOCK_PROMPTS))
