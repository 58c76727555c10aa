"""Each operator against its definition in float64: in PyTorch and in C++."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.kernels.backends import native, reference
from tests.unit.kernels.operators_under_test import (
    DTYPES,
    GROUPS,
    Attended,
    attended,
    check_buckets,
    check_paged_decode,
    check_paged_write,
    check_token_logprob,
    check_varlen_prefill,
    dtypes,
)

some = settings(max_examples=12, derandomize=True)
implementations = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(reference, id="reference"),
        pytest.param(native, id="native", marks=pytest.mark.needs("compiler")),
    ],
)


@implementations
@given(index=st.permutations(range(7)).map(lambda rows: [*rows[:3], -1, *rows[3:5], -1]))
@some
def test_lanes_are_gathered_and_written_back(implementation: Any, index: list[int]) -> None:
    check_buckets(implementation, index)


@implementations
def test_a_bucket_may_be_empty_or_all_its_lanes(implementation: Any) -> None:
    check_buckets(implementation, [])
    check_buckets(implementation, [-1, -1])
    none = torch.zeros(0, 3)
    assert torch.equal(implementation.bucket_pack(none, torch.tensor([-1])), torch.zeros(1, 3))


@implementations
@given(case=attended)
@some
def test_a_query_attends_to_its_sequence(implementation: Any, case: Attended) -> None:
    check_paged_decode(implementation, case)


@implementations
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_share_keys_in_groups_of_any_size(
    implementation: Any, group: int, dtype: torch.dtype
) -> None:
    check_paged_decode(implementation, Attended([130, 0, 5], group, 2, 64, dtype))
    check_varlen_prefill(implementation, Attended([20, 0, 5], group, 2, 64, dtype))


@implementations
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_passes_many_chunks(implementation: Any, dtype: torch.dtype) -> None:
    check_paged_decode(implementation, Attended([2049, 1023], 2, 1, 32, dtype))


@implementations
@given(case=attended)
@some
def test_tokens_are_written_where_attention_reads_them(implementation: Any, case: Attended) -> None:
    check_paged_write(implementation, case)


@implementations
@given(case=attended, padding=st.sampled_from((0, 3)))
@some
def test_prompts_attend_to_their_own_past(
    implementation: Any, case: Attended, padding: int
) -> None:
    check_varlen_prefill(implementation, case, padding)


@implementations
@pytest.mark.parametrize("at", [0, 15, 37, 129])
def test_a_key_that_is_no_number_is_not_passed_over(implementation: Any, at: int) -> None:
    ((queries, keys, values),) = Attended([130], 2, 2, 32, torch.float32).sequences()
    keys[at, 0] = torch.nan  # of the first two heads
    found = implementation.varlen_prefill(queries, keys, values, torch.tensor([0, 130]).int(), 0.2)
    expected = torch.zeros(130, 4, 32, dtype=torch.bool)
    expected[at:, :2] = True
    assert torch.equal(found.isnan(), expected)


@implementations
@given(
    vocab=st.one_of(st.integers(1, 70), st.sampled_from((1023, 1024, 1025, 5000))),
    dtype=dtypes,
    seed=st.integers(0, 9),
)
@some
def test_a_token_has_its_share_of_the_softmax(
    implementation: Any, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    check_token_logprob(implementation, vocab, dtype, seed)


@implementations
@pytest.mark.parametrize("at", [0, 1029])
def test_a_logit_that_is_no_number_is_not_passed_over(implementation: Any, at: int) -> None:
    logits = torch.zeros(2, 1030)
    logits[0, at] = torch.nan
    found = implementation.token_logprob(logits, torch.tensor([3, 3]), torch.ones(2))
    assert found[0].isnan() and found[1].isfinite()


@pytest.mark.parametrize("width", [2, 48, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_takes_heads_of_any_width(width: int, dtype: torch.dtype) -> None:
    case = Attended([33, 4], 2, 2, width, dtype)
    check_paged_decode(reference, case)
    check_paged_write(reference, case)
    check_varlen_prefill(reference, case)
