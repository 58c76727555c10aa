"""Attention of concatenated sequences against that of each sequence alone, with gradients."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from meshrl.kernels.ops.varlen import VarlenAttention, group_by_length

CPU = torch.device("cpu")
# Lengths around the borders of blocks (16 queries) and of chunks (128 keys), and zero.
LENGTHS = [1, 16, 17, 300, 128, 129, 5, 0, 40]


def make_starts(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def rows(
    lengths: Sequence[int], heads: int, kv_heads: int, width: int, padding: int = 0, seed: int = 0
) -> Tensor:
    n = sum(lengths) + padding
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, heads + 2 * kv_heads, width, dtype=torch.float64, generator=generator)


def attend_separately(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int = 0
) -> Tensor:
    """Compute the definition, one sequence after the other, in the tensors' own dtype."""
    shared = q.shape[1] // k.shape[1]
    found = []
    for first, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        part = slice(first, first + length)
        keys = k[part].repeat_interleave(shared, 1)
        values = v[part].repeat_interleave(shared, 1)
        scores = torch.einsum("ihd,jhd->hij", q[part], keys) * q.shape[2] ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        if window:
            hidden |= torch.ones(length, length, dtype=torch.bool).tril(-window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.cat(found)


def compute_results(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    packed: Tensor,
    heads: int,
    kv_heads: int,
    real: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the result at the `real` positions and the gradient of a fixed sum of it."""
    leaf = packed.to(dtype).clone().requires_grad_()
    out = attend(*leaf.split((heads, kv_heads, kv_heads), 1))[:real]
    slope = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out.backward(slope.to(out))
    assert leaf.grad is not None
    return out.detach().double().cpu(), leaf.grad.double().cpu()


def check(
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    tolerance: float,
    padding: int = 0,
    device: torch.device = CPU,
    window: int = 0,
) -> None:
    packed, real = rows(lengths, heads, kv_heads, width, padding), sum(lengths)
    varlen = VarlenAttention(make_starts(lengths), real + padding, device)
    expected = compute_results(
        lambda q, k, v: attend_separately(q, k, v, lengths, window),
        packed,
        heads,
        kv_heads,
        real,
        torch.float64,
    )
    there = packed.to(device)
    found = compute_results(
        lambda q, k, v: varlen(0, q, k, v, window), there, heads, kv_heads, real, dtype
    )
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, atol=tolerance, rtol=tolerance)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("width", [16, 32, 64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2), (2, 2)])
def test_native_backend_matches_in_float32(width: int, heads: int, kv_heads: int) -> None:
    check(LENGTHS, heads, kv_heads, width, torch.float32, 2e-5, padding=3)


@pytest.mark.parametrize("width", [6, 48])
def test_widths_without_a_compiled_variant_match(width: int) -> None:
    check(LENGTHS, 4, 2, width, torch.float32, 2e-5, padding=3)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("window", [1, 5, 16, 17, 100, 200, 299, 4000])
def test_window_hides_earlier_tokens(window: int) -> None:
    check(LENGTHS, 4, 2, 32, torch.float32, 2e-5, padding=3, window=window)
    check(LENGTHS, 4, 2, 32, torch.float64, 1e-12, padding=3, window=window)


def test_buckets_match_in_float64() -> None:
    check(LENGTHS, 3, 1, 32, torch.float64, 1e-12, padding=3)


def test_bfloat16_on_a_cpu_is_rounded_only_at_input_and_output() -> None:
    check(LENGTHS, 3, 1, 32, torch.bfloat16, 0.03)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=12),
    st.sampled_from([(torch.float32, 2e-5), (torch.float64, 1e-12)]),
    st.integers(0, 20),
    st.integers(0, 160),
)
def test_packed_sequence_has_the_result_and_gradient_of_a_single_one(
    lengths: list[int], kind: tuple[torch.dtype, float], padding: int, window: int
) -> None:
    check(lengths, 3, 1, 16, *kind, padding=padding, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_is_bitwise_independent_of_neighbours(dtype: torch.dtype) -> None:
    """Check with neighbours of any values, even NaN."""
    lengths = [30, 70, 20]
    varlen = VarlenAttention(make_starts(lengths), sum(lengths), CPU)
    part = slice(30, 100)
    results = []
    for neighbour in (1.0, torch.nan):
        packed = rows(lengths, 3, 1, 32).to(dtype)
        packed[:30] = packed[100:] = neighbour
        leaf = packed.requires_grad_()
        out = varlen(0, *leaf.split((3, 1, 1), 1))
        out[part].square().sum().backward()
        assert leaf.grad is not None
        results += [(out[part].detach(), leaf.grad[part])]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_slices_of_one_tensor_need_no_copy() -> None:
    """Check the layout of a model: adjacent heads, tokens further apart."""
    packed = rows(LENGTHS, 3, 1, 32).float()
    varlen = VarlenAttention(make_starts(LENGTHS), len(packed), CPU)
    q, k, v = packed.split((3, 1, 1), 1)
    strided = varlen(0, q, k, v)
    assert torch.equal(strided, varlen(0, q.contiguous(), k.contiguous(), v.contiguous()))
    across = q.transpose(0, 1).contiguous().transpose(0, 1)  # adjacent tokens
    assert torch.equal(strided, varlen(0, across, k, v))


def test_large_scores_do_not_overflow() -> None:
    lengths = [200]
    packed = rows(lengths, 1, 1, 32).float() * 10
    varlen = VarlenAttention(make_starts(lengths), 200, CPU)
    found = varlen(0, *packed.split((1, 1, 1), 1))
    q, k, v = packed.double().split((1, 1, 1), 1)
    expected = attend_separately(q, k, v, lengths)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at", [0, 20, 129, 170])
def test_nan_in_a_key_reaches_later_tokens_of_its_sequence(at: int, dtype: torch.dtype) -> None:
    lengths = [30, 171, 17]
    packed = rows(lengths, 4, 2, 32, padding=3).to(dtype)
    packed[30 + at, 4] = torch.nan  # in the first two heads
    packed.requires_grad_()
    out = VarlenAttention(make_starts(lengths), len(packed), CPU)(0, *packed.split((4, 2, 2), 1))
    expected = torch.zeros(len(packed), 4, 32, dtype=torch.bool)
    expected[30 + at : 201, :2] = True
    assert torch.equal(out.isnan()[:218], expected[:218])
    out[:218].sum().backward()
    assert packed.grad is not None
    own = packed.grad[30:201]
    assert own[at:, :2].isnan().all() and own[:, 6].isnan().any()
    assert packed.grad[:30].isfinite().all() and packed.grad[201:].isfinite().all()


def test_pass_is_bitwise_reproducible() -> None:
    packed = rows(LENGTHS, 3, 1, 32)
    varlen = VarlenAttention(make_starts(LENGTHS), len(packed), CPU)
    runs = [
        compute_results(
            lambda q, k, v: varlen(0, q, k, v), packed, 3, 1, len(packed), torch.float32
        )
        for _ in range(2)
    ]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_invalid_starts_are_rejected() -> None:
    for starts in ([1, 4], [0, 5, 3], [0, 9], []):
        with pytest.raises(ValueError, match="starts"):
            VarlenAttention(np.array(starts, np.int32), 8, CPU)


def test_bin_without_sequences_is_all_padding() -> None:
    varlen = VarlenAttention(np.zeros(1, np.int32), 4, CPU)
    for dtype in (torch.float32, torch.float64):
        packed = torch.ones(4, 3, 16, dtype=dtype)
        assert varlen(0, *packed.split((1, 1, 1), 1)).isfinite().all()


@given(st.lists(st.integers(0, 400), max_size=200))
def test_buckets_contain_each_sequence_once_and_are_few(lengths: list[int]) -> None:
    buckets = group_by_length(np.array(lengths, np.int64))
    members = sorted(int(i) for bucket in buckets for i in bucket)
    assert members == [i for i, length in enumerate(lengths) if length]
    assert len(buckets) <= 32 and all(len(b) >= min(8, len(members)) for b in buckets)
