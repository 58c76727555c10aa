"""Operators against their definition in float64, in PyTorch and in C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from meshrl.kernels import ops
from meshrl.kernels.backends import native, reference
from tests.load import scaled
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
    paged,
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
def test_lanes_are_packed_and_scattered_back(implementation: Any, index: list[int]) -> None:
    check_buckets(implementation, index)


@implementations
def test_bucket_may_have_no_lanes_or_only_empty_ones(implementation: Any) -> None:
    check_buckets(implementation, [])
    check_buckets(implementation, [-1, -1])
    none = torch.zeros(0, 3)
    assert torch.equal(implementation.bucket_pack(none, torch.tensor([-1])), torch.zeros(1, 3))


@implementations
@given(case=attended)
@some
def test_query_attends_to_its_sequence(implementation: Any, case: Attended) -> None:
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
def test_long_context_spans_many_chunks(implementation: Any, dtype: torch.dtype) -> None:
    check_paged_decode(implementation, Attended([2049, 1023], 2, 1, 32, dtype))


@implementations
@given(case=attended)
@some
def test_tokens_are_written_where_attention_reads_them(implementation: Any, case: Attended) -> None:
    check_paged_write(implementation, case)


@implementations
@given(case=attended, padding=st.sampled_from((0, 3)))
@some
def test_prompts_attend_to_their_past(implementation: Any, case: Attended, padding: int) -> None:
    check_varlen_prefill(implementation, case, padding)


@implementations
@pytest.mark.parametrize("at", [0, 15, 37, 129])
def test_nan_in_a_key_reaches_the_output(implementation: Any, at: int) -> None:
    ((queries, keys, values),) = Attended([130], 2, 2, 32, torch.float32).sequences()
    keys[at, 0] = torch.nan  # in the first two heads
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
def test_token_logprob_matches_the_softmax(
    implementation: Any, vocab: int, dtype: torch.dtype, seed: int
) -> None:
    check_token_logprob(implementation, vocab, dtype, seed)


@implementations
@pytest.mark.parametrize("at", [0, 1029])
def test_nan_in_a_logit_reaches_the_output(implementation: Any, at: int) -> None:
    logits = torch.zeros(2, 1030)
    logits[0, at] = torch.nan
    found = implementation.token_logprob(logits, torch.tensor([3, 3]), torch.ones(2))
    assert found[0].isnan() and found[1].isfinite()


@pytest.mark.parametrize("width", [2, 48, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_accepts_heads_of_any_width(width: int, dtype: torch.dtype) -> None:
    case = Attended([33, 4], 2, 2, width, dtype)
    check_paged_decode(reference, case)
    check_paged_write(reference, case)
    check_varlen_prefill(reference, case)


ROOT = Path(__file__).parents[3]


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    case = Attended([17, 0, 5], 2, 2, 32, dtype)
    cache = paged(case)
    queries, keys, values = (torch.cat(part) for part in zip(*case.sequences(), strict=True))
    index = torch.tensor([2, -1, 0])
    rows, lanes = torch.randn(4, 3).to(dtype), torch.randn(3, 3).to(dtype)
    positions, starts = torch.tensor([3, -1, 0]), torch.tensor([0, 17, 17, 22], dtype=torch.int32)
    held = (cache.keys.nan_to_num(), cache.values.nan_to_num())
    return {
        "bucket_pack": (rows, index),
        "bucket_scatter": (lanes, index, rows),
        "paged_write": (*held, keys[:3], values[:3], cache.table, positions),
        "paged_decode": (queries[:3], *held, cache.table, cache.lengths, case.scale),
        "varlen_prefill": (queries, keys, values, starts, case.scale),
        "token_logprob": (rows, torch.tensor([2, -1, 0, 1]), torch.ones(4)),
    }


@pytest.mark.rotating(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", samples(torch.float32))
def test_operator_passes_torch_opcheck(name: str, dtype: torch.dtype) -> None:
    opcheck(getattr(ops, name), samples(dtype)[name])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bucket_pack", {1: torch.tensor([4])}),
        ("bucket_scatter", {1: torch.tensor([0, 4, 1])}),
        ("paged_write", {5: torch.tensor([0, 0, 100_000])}),
        ("paged_write", {4: torch.full((3, 4), 9999, dtype=torch.int32)}),
        ("paged_decode", {4: torch.tensor([1000, 0, 0], dtype=torch.int32)}),
        ("paged_decode", {3: torch.full((3, 4), 9999, dtype=torch.int32)}),
        ("varlen_prefill", {3: torch.tensor([0, 30], dtype=torch.int32)}),
        ("varlen_prefill", {3: torch.tensor([0, 9, 3], dtype=torch.int32)}),
        ("token_logprob", {1: torch.tensor([0, 0, 0, 3])}),
    ],
)
@pytest.mark.needs("compiler")
def test_index_out_of_range_is_rejected(name: str, changes: dict[int, torch.Tensor]) -> None:
    arguments = list(samples(torch.float32)[name])
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(IndexError):
        getattr(ops, name)(*arguments)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("bucket_pack", 1, torch.tensor([1], dtype=torch.int32)),
        ("bucket_scatter", 0, torch.zeros(3, 2)),
        ("paged_write", 2, torch.zeros(3, 2, 16)),
        ("paged_write", 5, torch.zeros(3, dtype=torch.int32)),
        ("paged_decode", 0, torch.zeros(3, 5, 32)),
        ("paged_decode", 0, torch.zeros(3, 4, 32, dtype=torch.float64)),
        ("paged_decode", 1, torch.zeros(4, 2, 16, 32)),
        ("paged_decode", 4, torch.zeros(3)),
        ("varlen_prefill", 1, torch.zeros(22, 3, 32)),
        ("varlen_prefill", 3, torch.zeros(3)),
        ("token_logprob", 0, torch.zeros(4, 3, dtype=torch.float64)),
        ("token_logprob", 2, torch.ones(3)),
    ],
)
def test_tensors_with_mismatched_shapes_are_rejected(
    name: str, place: int, value: torch.Tensor
) -> None:
    arguments = list(samples(torch.float32)[name])
    arguments[place] = value
    with pytest.raises(ValueError):
        getattr(ops, name)(*arguments)


def test_cache_types_are_float32_and_bfloat16() -> None:
    with pytest.raises(TypeError):
        ops.get_cache_shapes(4, 2, 32, torch.float16)


def test_strided_tensors_are_accepted() -> None:
    rows = torch.arange(24.0).view(4, 6)
    index = torch.tensor([9, 1, 9, -1])[1::2]
    assert ops.bucket_pack(rows[:, ::2], index).tolist() == [[6, 8, 10], [0, 0, 0]]
    ops.bucket_scatter(torch.zeros(2, 3), index, rows[:, ::2])
    assert rows[1].tolist() == [0, 7, 0, 9, 0, 11]
    queries, keys, values, starts, scale = samples(torch.float32)["varlen_prefill"]
    spread = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (queries, keys, values)]
    straight = ops.varlen_prefill(queries, keys, values, starts, scale)
    assert torch.equal(ops.varlen_prefill(*spread, starts, scale), straight)


WITHOUT_A_COMPILER = """
import sys
import torch
from meshrl.kernels import ops
from meshrl.kernels.backends import reference

logits, tokens, warmth = torch.randn(3, 9), torch.tensor([1, 2, 3]), torch.ones(3)
for _ in range(2):
    found = ops.token_logprob(logits, tokens, warmth)
    assert torch.equal(found, reference.token_logprob(logits, tokens, warmth))
    assert torch.equal(ops.bucket_pack(logits, torch.tensor([2])), logits[2:])
absent = {f"meshrl.kernels.backends.{name}" for name in ("cuda", "triton_kernels")}
assert not absent & sys.modules.keys()
"""


@pytest.mark.deep
def test_missing_compiler_falls_back_to_the_reference_with_one_warning(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in (run.stdout + run.stderr).splitlines() if "plain PyTorch" in line]
    assert len(lines) == 1 and "no C++ compiler" in lines[0]
