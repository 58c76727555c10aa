"""Order of training prompts over the rows, by seed, epoch and index."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.job.config import DatasetConfig, JobConfig
from meshrl.common.job.prompt_order import PromptOrder

EPOCHS_OF_SEED_0 = [*[3, 2, 1, 6, 0, 7, 4, 5], *[7, 4, 5, 1, 6, 2, 0, 3]]


@given(st.integers(-(2**63), 2**63), st.integers(1, 40), st.integers(0, 10**9))
def test_each_epoch_has_every_row_once(seed: int, count: int, epoch: int) -> None:
    order = PromptOrder(seed, count, shuffles=True)
    rows = [order.find_row(epoch * count + place) for place in range(count)]
    assert sorted(rows) == list(range(count))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first, second = (PromptOrder(7, 100, shuffles=True) for _ in range(2))
    backwards = [second.find_row(prompt) for prompt in reversed(range(500))][::-1]
    rows = [first.find_row(prompt) for prompt in range(500)]
    assert rows == backwards
    assert rows[:100] != rows[100:200]
    assert rows[:100] != [PromptOrder(8, 100, shuffles=True).find_row(n) for n in range(100)]


def test_order_of_a_seed_never_changes_so_that_old_runs_continue() -> None:
    order = PromptOrder(0, 8, shuffles=True)
    assert [order.find_row(prompt) for prompt in range(16)] == EPOCHS_OF_SEED_0


def test_rows_keep_their_order_without_shuffling() -> None:
    order = PromptOrder(0, 3, shuffles=False)
    assert [order.find_row(prompt) for prompt in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("stored", "shuffles"), [({}, False), ({"shuffle": True}, True)])
def test_stored_documents_without_the_key_keep_the_order_of_the_file(
    stored: dict[str, bool], shuffles: bool
) -> None:
    assert JobConfig.from_document({"dataset": stored}).dataset.shuffle is shuffles
    assert JobConfig.from_document({}).dataset.shuffle is False
    assert DatasetConfig().shuffle is True
