"""Fused pointwise operators of a decoder, forward and backward, in one pass over memory.

They are csrc/pointwise.cpp, for float32 on a CPU. PyTorch runs such arithmetic as a chain of
operators that each read and write whole tensors: a third of a small model's training step.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshrl.kernels.library_build import build_library
from meshrl.kernels.ops.dispatch import log_fallback_once

C_POINTER, C_INT64, C_FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SWIGLU_SIGNATURE = [C_INT64, C_INT64, C_POINTER]  # rows, size, result
# cosines, sines, their stride, norms' weights, tokens, heads, kv_heads, width
_HEADS_SIGNATURE = [C_POINTER, C_POINTER, C_INT64, C_POINTER, C_POINTER, *[C_INT64] * 4]
SIGNATURES: dict[str, list[Any]] = {
    "pointwise_swiglu": [C_POINTER, *_SWIGLU_SIGNATURE],
    "pointwise_swiglu_backward": [C_POINTER, C_POINTER, *_SWIGLU_SIGNATURE],
    "pointwise_norm": [C_POINTER, C_POINTER, C_INT64, C_INT64, C_FLOAT, C_POINTER, C_POINTER],
    "pointwise_norm_backward": [*[C_POINTER] * 4, C_INT64, C_INT64, *[C_POINTER] * 3],
    "pointwise_heads": [C_POINTER, *_HEADS_SIGNATURE, C_FLOAT, *[C_POINTER] * 4],
    "pointwise_heads_backward": [C_POINTER, *_HEADS_SIGNATURE, *[C_POINTER] * 8],
}
NormWeights = tuple[Tensor, Tensor] | None


class PointwiseOps(Protocol):
    """Protocol of a decoder's pointwise operators.

    Shapes [..] are arbitrary, the same in all tensors of a call.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm of x [.., n] over its last dimension."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [.., n] of [.., 2 n], the gate first."""

    def split_norm_rotate_heads(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_counts: tuple[int, int],
        norms: NormWeights,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [.., heads, width], keys and values [.., kv_heads, width] of projections.

        The projections are [.., (heads + 2 kv_heads) width]. Queries and keys are normed, if
        weights for that are given, and rotated by `cos` and `sin` [.., 1, width]; `head_counts` are
        heads and kv_heads.
        """


class FusedPointwise:
    """Fused implementation, equal to `plain` up to float32's rounding.

    It calls `plain` for tensors of another dtype or device, and always without a compiler.
    """

    def __init__(self, plain: PointwiseOps) -> None:
        self._fallback = plain

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm of x [.., n] over its last dimension."""
        if not _can_fuse(x, weight):
            return self._fallback.rms_norm(x, weight, eps)
        out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [.., n] of [.., 2 n], the gate first."""
        if not _can_fuse(gate_up):
            return self._fallback.swiglu(gate_up)
        out: Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
        return out

    def split_norm_rotate_heads(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_counts: tuple[int, int],
        norms: NormWeights,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `PointwiseOps.split_norm_rotate_heads`."""
        fits = cos.shape == sin.shape == (*qkv.shape[:-1], 1, cos.shape[-1])
        if not fits or not _can_fuse(qkv, cos, sin, *(norms or ())):
            return self._fallback.split_norm_rotate_heads(qkv, cos, sin, head_counts, norms, eps)
        weights = norms or (None, None)
        q, k, v = _SplitNormRotateHeads.apply(qkv, cos, sin, *weights, head_counts, eps)  # type: ignore[no-untyped-call]
        return q, k, v


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        _call_library("pointwise_norm", x, weight, inverse.numel(), x.shape[-1], eps, out, inverse)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        gradients = [
            torch.empty_like(tensor) if needs_gradient else None
            for tensor, needs_gradient in zip((x, weight), ctx.needs_input_grad, strict=False)
        ]
        arguments = x, weight, inverse, slope.contiguous(), inverse.numel(), x.shape[-1]
        _call_library("pointwise_norm_backward", *arguments, *gradients, torch.empty_like(weight))
        return *gradients, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _call_library("pointwise_swiglu", gate_up, *_get_row_shape(out), out)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty_like(gate_up)
        _call_library(
            "pointwise_swiglu_backward",
            gate_up,
            slope.contiguous(),
            *_get_row_shape(slope),
            gradient,
        )
        return gradient


class _SplitNormRotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        counts: tuple[int, int],
        eps: float,
    ) -> tuple[Tensor, ...]:
        qkv, cos, sin = qkv.contiguous(), _flatten_angles(cos), _flatten_angles(sin)
        if cos.stride(0) != sin.stride(0):
            cos, sin = cos.contiguous(), sin.contiguous()
        before, width = qkv.shape[:-1], cos.shape[-1]
        heads, kv_heads = counts
        shape = heads, kv_heads, width
        outputs = [qkv.new_empty(*before, count, width) for count in (heads, kv_heads, kv_heads)]
        normed = query_norm is not None
        inverse = qkv.new_empty(*before, heads + kv_heads) if normed else None
        arguments = cos, sin, cos.stride(0), query_norm, key_norm, len(cos), *shape
        _call_library("pointwise_heads", qkv, *arguments, eps, *outputs, inverse)
        saved_qkv = qkv if normed else None  # rotations do not need it
        ctx.save_for_backward(saved_qkv, cos, sin, query_norm, key_norm, inverse)
        ctx.shape = shape
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, query_norm, key_norm, inverse = ctx.saved_tensors
        heads, kv_heads, width = ctx.shape
        arriving = [slope.contiguous() for slope in slopes]
        qkv_gradient = slopes[0].new_empty(*slopes[0].shape[:-2], (heads + 2 * kv_heads) * width)
        norm_slopes = [
            torch.empty_like(norm) if norm is not None and needs_gradient else None
            for norm, needs_gradient in zip(
                (query_norm, key_norm), ctx.needs_input_grad[3:5], strict=True
            )
        ]
        arguments = cos, sin, cos.stride(0), query_norm, key_norm, len(cos), *ctx.shape
        room = qkv_gradient.new_empty(2, width)
        _call_library(
            "pointwise_heads_backward",
            *(qkv, *arguments, inverse, *arriving, qkv_gradient, *norm_slopes, room),
        )
        return qkv_gradient, None, None, *norm_slopes, None, None


def _get_row_shape(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[:-1].numel(), tensor.shape[-1]


def _flatten_angles(angles: Tensor) -> Tensor:
    """Return [n, width] of [.., 1, width], contiguous."""
    rows = angles.reshape(-1, angles.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _can_fuse(*tensors: Tensor) -> bool:
    """Return True if all are plain float32 tensors in host memory, and there is a library."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return False
        if type(tensor) not in (Tensor, torch.nn.Parameter):  # a DTensor does not own its memory
            return False
    return _load_library() is not None


@cache
def _load_library() -> ctypes.CDLL | None:
    """Return the library, built on first use; log and return None if that fails."""
    built = build_library("pointwise")
    if built.path is None:
        log_fallback_once("cpu", built.reason)
        return None
    return built.load_with_signatures(SIGNATURES, None)


def _call_library(name: str, *arguments: Tensor | float | None) -> None:
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    getattr(_load_library(), name)(*plain)
