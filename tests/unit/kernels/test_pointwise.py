"""Fused operators against PyTorch's in float64, with gradients, for all shapes."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshrl.kernels.ops.pointwise as pointwise
from meshrl.common.model.network.pointwise import TORCH_POINTWISE, PointwiseOps
from meshrl.kernels.library_build import build_library
from meshrl.kernels.ops.pointwise import FusedPointwise

EPS = 1e-6
FUSED = FusedPointwise(TORCH_POINTWISE)
CLOSE = 4e-6  # relative to the largest number of a result: some dozens of float32 roundings
native = pytest.mark.needs("compiler")


class UnusableBackend:
    """Backend that fails at any use, for cases that must not need it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} went the plain way")


def draw(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, dtype=torch.float64, generator=generator)


def angles(*before: int, width: int) -> tuple[Tensor, Tensor]:
    turned = draw(*before, 1, width, seed=9)
    # a table whose halves differ, because equal halves are not required
    return (
        turned.cos(),
        turned.sin(),
    )


def compute_results(
    compute: Callable[..., Any], inputs: Iterable[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return the result of `compute` and the gradients of a fixed sum of it by all inputs."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    outs = compute(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    slopes = [draw(*out.shape, seed=20 + i).to(out) for i, out in enumerate(outs)]
    slopes_in = torch.autograd.grad(outs, leaves, slopes)
    return [tensor.detach() for tensor in (*outs, *slopes_in)]


def check(compute: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Check `compute(operators, *inputs)`, fused in float32 and plain in float64. Cancellation
    leaves few digits in float32, so that the error may be a multiple of PyTorch's.
    """
    kinds = (
        (FusedPointwise(UnusableBackend()), torch.float32),
        (TORCH_POINTWISE, torch.float32),
        (TORCH_POINTWISE, torch.float64),
    )
    runs = [compute_results(lambda *x, o=o: compute(o, *x), inputs, dtype) for o, dtype in kinds]
    for found, usual, exact in zip(*runs, strict=True):
        assert found.shape == exact.shape and found.dtype == torch.float32
        if not exact.numel():
            continue
        allowed = CLOSE * exact.abs().max() + 4 * (usual.double() - exact).abs().max()
        error = (found.double() - exact).abs().max()
        assert error <= allowed, f"{error} of {allowed}"
    return runs[0]


def make_heads_function(
    operators: PointwiseOps, counts: tuple[int, int], cos: Tensor, sin: Tensor
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def compute(qkv: Tensor, *norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        there = cos.to(qkv), sin.to(qkv)
        return operators.split_norm_rotate_heads(
            qkv, *there, counts, cast(tuple[Tensor, Tensor], norms) if norms else None, EPS
        )

    return compute


def check_heads(rows: int, counts: tuple[int, int], width: int, normed: bool) -> list[Tensor]:
    heads, kv_heads = counts
    cos, sin = angles(rows, width=width)
    norms = (draw(width, seed=1), draw(width, seed=2)) if normed else ()
    qkv = draw(rows, (heads + 2 * kv_heads) * width)
    return check(
        lambda operators, *inputs: make_heads_function(operators, counts, cos, sin)(*inputs),
        qkv,
        *norms,
    )


@native
@settings(max_examples=60)
@given(st.integers(0, 70), st.integers(1, 150))
def test_swiglu_matches_torch(rows: int, size: int) -> None:
    check(lambda operators, x: operators.swiglu(x), draw(rows, 2 * size, spread=4.0))


@native
@settings(max_examples=60)
@given(st.integers(0, 140), st.integers(1, 150))
def test_rms_norm_matches_torch(rows: int, size: int) -> None:
    check(lambda o, x, weight: o.rms_norm(x, weight, EPS), draw(rows, size), draw(size, seed=1))


@native
@settings(max_examples=60)
@given(
    st.integers(0, 70),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([2, 6, 16, 32, 48, 64, 96, 128]),
    st.booleans(),
)
def test_head_split_matches_torch(
    rows: int, counts: tuple[int, int], width: int, normed: bool
) -> None:
    check_heads(rows, counts, width, normed)


@native
def test_operators_accept_any_leading_shape() -> None:
    check(lambda o, x: o.swiglu(x), draw(3, 5, 24))
    check(lambda o, x, w: o.rms_norm(x, w, EPS), draw(3, 5, 24), draw(24, seed=1))
    cos, sin = angles(3, 5, width=16)
    check(lambda o, x: make_heads_function(o, (2, 1), cos, sin)(x), draw(3, 5, 64))


@native
def test_weight_gradient_over_many_rows_keeps_its_precision() -> None:
    x, slope = draw(20_000, 16) + 1.0, torch.ones(20_000, 16, dtype=torch.float64)
    found = []
    for operators, dtype in ((FUSED, torch.float32), (TORCH_POINTWISE, torch.float64)):
        weight = torch.ones(16, dtype=dtype, requires_grad=True)
        operators.rms_norm(x.to(dtype), weight, EPS).backward(slope.to(dtype))
        assert weight.grad is not None
        found.append(weight.grad.double())
    torch.testing.assert_close(*found, rtol=2e-6, atol=0)


@native
def test_strided_input_gives_the_same_result() -> None:
    wide = draw(7, 100).float()
    part = wide[:, ::2]
    assert torch.equal(FUSED.swiglu(part), FUSED.swiglu(part.contiguous()))
    weight = draw(50).float()
    assert torch.equal(FUSED.rms_norm(part, weight, EPS), FUSED.rms_norm(part.clone(), weight, EPS))
    table = torch.cat(angles(7, width=10), 1).float()  # cosines and sines of a token in one row
    cos, sin = table[:, :1], table[:, 1:]
    together = FUSED.split_norm_rotate_heads(part, cos, sin, (3, 1), None, EPS)
    apart = FUSED.split_norm_rotate_heads(part.clone(), cos.clone(), sin.clone(), (3, 1), None, EPS)
    mixed = FUSED.split_norm_rotate_heads(part, cos, sin.clone(), (3, 1), None, EPS)
    for one, *others in zip(together, apart, mixed, strict=True):
        assert all(torch.equal(one, other) for other in others)


@native
def test_gradients_may_reach_only_some_results() -> None:
    cos, sin = (tensor.float() for tensor in angles(6, width=16))
    for operators in (FusedPointwise(UnusableBackend()), TORCH_POINTWISE):
        leaf = draw(6, 64).float().requires_grad_()
        q, _, v = operators.split_norm_rotate_heads(leaf, cos, sin, (2, 1), None, EPS)
        v.transpose(0, 1).sum().backward()
        assert leaf.grad is not None
        assert not leaf.grad[:, :48].any() and (leaf.grad[:, 48:] == 1).all()
        assert q.requires_grad


@native
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_required_gradients_are_computed(wanted: tuple[bool, bool]) -> None:
    def gradients(operators: PointwiseOps, dtype: torch.dtype) -> list[Tensor | None]:
        x, weight = draw(40, 24).to(dtype), draw(24, seed=1).to(dtype)
        x.requires_grad_(wanted[0])
        weight.requires_grad_(wanted[1])
        operators.rms_norm(x, weight, EPS).square().sum().backward()
        cos, sin = (tensor.to(dtype) for tensor in angles(40, width=6))
        norms = weight.detach()[:6].clone().requires_grad_(wanted[0]), weight.detach()[6:12].clone()
        norms[1].requires_grad_(wanted[1])
        outs = operators.split_norm_rotate_heads(x.detach(), cos, sin, (2, 1), norms, EPS)
        cast(Tensor, sum(out.square().sum() for out in outs)).backward()
        return [tensor.grad for tensor in (x, weight, *norms)]

    found = gradients(FusedPointwise(UnusableBackend()), torch.float32)
    expected = gradients(TORCH_POINTWISE, torch.float64)
    assert [g is None for g in found] == [g is None for g in expected]
    assert [g is not None for g in found] == [*wanted, *wanted]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@native
def test_extreme_gates_saturate_and_nan_propagates() -> None:
    gates = torch.tensor([-1e4, -100.0, -50.0, 0.0, 50.0, 100.0, 1e4, torch.nan])
    leaf = torch.cat((gates, torch.ones(8))).requires_grad_()
    out = FUSED.swiglu(leaf)
    out.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(out[3:7].detach(), gates[3:7]) and out[:3].abs().max() < 1e-19
    assert out[7].isnan() and leaf.grad[7].isnan()
    assert (leaf.grad[4:7] == 1).all() and leaf.grad[:3].abs().max() < 1e-19
    row = torch.full((1, 20), torch.nan)
    assert FUSED.rms_norm(row, torch.ones(20), EPS).isnan().all()


@native
def test_results_are_bitwise_reproducible_and_independent_of_other_rows() -> None:
    for normed in (False, True):
        runs = [check_heads(50, (3, 1), 32, normed) for _ in range(2)]
        assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    x, weight = draw(50, 40).float(), draw(40, seed=1).float()
    assert torch.equal(FUSED.rms_norm(x, weight, EPS)[7:9], FUSED.rms_norm(x[7:9], weight, EPS))
    assert torch.equal(FUSED.swiglu(x)[7:9], FUSED.swiglu(x[7:9]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_use_the_torch_implementation(dtype: torch.dtype) -> None:
    x, weight = draw(9, 64).to(dtype), draw(64, seed=1).to(dtype)
    cos, sin = (tensor.to(dtype) for tensor in angles(9, width=16))
    assert torch.equal(FUSED.swiglu(x), TORCH_POINTWISE.swiglu(x))
    assert torch.equal(FUSED.rms_norm(x, weight, EPS), TORCH_POINTWISE.rms_norm(x, weight, EPS))
    arguments = x, cos, sin, (2, 1), (weight[:16], weight[16:32]), EPS
    pairs = zip(
        FUSED.split_norm_rotate_heads(*arguments),
        TORCH_POINTWISE.split_norm_rotate_heads(*arguments),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)


def test_missing_compiler_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    build_library.cache_clear()
    pointwise._load_library.cache_clear()
    try:
        x = draw(9, 64).float()
        assert torch.equal(FUSED.swiglu(x), TORCH_POINTWISE.swiglu(x))
    finally:
        build_library.cache_clear()
        pointwise._load_library.cache_clear()
