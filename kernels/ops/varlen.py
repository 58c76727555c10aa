"""Causal attention within packed sequences, forward and backward, without padding.

A window limits it to each token's last ones.

| tensors | implementation |
|---|---|
| float32 and bfloat16 on a CPU, heads of whole vectors | csrc/varlen.cpp |
| bfloat16 and float16 on a GPU | `torch.nn.attention.varlen` (FlashAttention) |
| all others; no compiler | buckets of nearly equal lengths, each one dense causal SDPA |

The inputs derived from the sequences are built once and serve all layers and both passes.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshrl.kernels.backends.kernel_unsupported import KernelUnsupported
from meshrl.kernels.library_build import build_library
from meshrl.kernels.ops.dispatch import log_fallback_once

C_POINTER, C_INT64, C_FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# starts, sequences, tokens, heads, kv_heads, width, window, scale
_SHAPE_SIGNATURE = [C_POINTER, *[C_INT64] * 6, C_FLOAT]
SIGNATURES: dict[str, list[Any]] = {
    "varlen_has_width": [C_INT64],
    "varlen_forward": [*[C_POINTER] * 3, *[C_INT64] * 3, *_SHAPE_SIGNATURE, C_POINTER, C_POINTER],
    "varlen_backward": [
        *[C_POINTER] * 3,
        *[C_INT64] * 3,
        *_SHAPE_SIGNATURE,
        *[C_POINTER] * 3,
        C_INT64,
        *[C_POINTER] * 3,
    ],
}
NO_MEMORY = 1  # as in csrc/varlen.cpp
HALF_DTYPES = (torch.bfloat16, torch.float16)
MIN_LENGTH_RATIO = 0.8  # shortest of a bucket / longest, at least: at most a fifth is padding
MIN_BUCKET_SEQUENCES = 8  # sequences that are worth a bucket of their own


class VarlenAttention:
    """Attention of a bin, called with (layer, queries, keys, values, window).

    Queries are [n, heads, width], keys and values [n, kv_heads, width], and the result is [n,
    heads, width]. cu_seqlens [s + 1] int32 are 0 and the cumulative lengths of s sequences; rows
    behind the last are padding, with finite but undefined results. ValueError if they are not
    ascending or exceed the number of rows.
    """

    def __init__(
        self, cu_seqlens: NDArray[np.int32], num_positions: int, device: torch.device
    ) -> None:
        if (
            len(cu_seqlens) < 1
            or cu_seqlens[0] != 0
            or (np.diff(cu_seqlens) < 0).any()
            or cu_seqlens[-1] > num_positions
        ):
            raise ValueError(
                f"starts of sequences do not increase from 0 to at most {num_positions}"
            )
        self.num_positions, self.device = num_positions, device
        self.cu_seqlens = np.ascontiguousarray(cu_seqlens, np.int32)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """Return attention of queries [t, heads, width], in their shape; `layer` is not used.

        A token attends to the last `window` tokens, itself included; 0: all before it.
        """
        if (
            q.device.type == "cuda"
            and q.dtype in HALF_DTYPES
            and (not window or _can_flash_slide(q.device))
        ):
            varlen, has_gqa = _get_flash_attention(window)
            if not has_gqa and q.shape[1] != k.shape[1]:
                shared = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            starts, longest = self._flash_sequences
            return varlen(q, k, v, starts, starts, longest, longest)
        if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
            try:
                if not _load_library().varlen_has_width(q.shape[-1]):
                    raise KernelUnsupported
            except KernelUnsupported as declined:
                if declined.reason:
                    log_fallback_once("cpu", declined.reason)
            else:
                out: Tensor = _NativeVarlenAttention.apply(  # type: ignore[no-untyped-call]
                    q.float(), k.float(), v.float(), self.cu_seqlens, window
                )
                return out.to(q.dtype)
        return self._attend_in_buckets(q, k, v, window)

    @cached_property
    def _flash_sequences(self) -> tuple[Tensor, int]:
        """Starts and the longest length for a GPU, where padding counts as a sequence.

        Rows that no kernel writes may be NaN, which even a gradient of zero multiplies to NaN.
        """
        offsets = (
            self.cu_seqlens
            if self.cu_seqlens[-1] == self.num_positions
            else [*self.cu_seqlens, self.num_positions]
        )
        starts = np.asarray(offsets, np.int32)
        # Kernels and graphs are selected by this length, so it takes few values.
        longest = 1 << int(np.diff(starts).max(initial=1) - 1).bit_length()
        return torch.from_numpy(starts).to(self.device), longest

    def _attend_in_buckets(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        buckets, back = self._buckets
        rows = [
            scaled_dot_product_attention(
                q[index].transpose(1, 2),
                k[index].transpose(1, 2),
                v[index].transpose(1, 2),
                attn_mask=_build_window_mask(index.shape[1], window, q.device) if window else None,
                is_causal=not window,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            .transpose(1, 2)
            .flatten(0, 1)
            for index in buckets
        ]
        # row that the padding reads, behind all others
        if self.cu_seqlens[-1] < self.num_positions or not rows:
            rows.append(q.new_zeros(1, *q.shape[1:]))
        return torch.cat(rows).index_select(0, back)

    @cached_property
    def _buckets(self) -> tuple[list[Tensor], Tensor]:
        """Rows [sequences, length] of each bucket, and the index of each row among all of these.

        A sequence shorter than its bucket is padded with its own first row: causal attention
        ignores later rows, so neither results nor gradients depend on the padding.
        """
        lengths = np.diff(self.cu_seqlens)
        buckets, filled = [], 0
        back = np.zeros(self.num_positions, np.int64)
        for members in group_by_length(lengths):
            longest, first = int(lengths[members].max()), self.cu_seqlens[members][:, None]
            at = np.arange(longest)[None, :]
            real = at < lengths[members][:, None]
            index = np.where(real, first + at, first).astype(np.int64)
            back[index[real]] = filled + np.flatnonzero(real)
            filled += index.size
            buckets.append(torch.from_numpy(index).to(self.device))
        back[self.cu_seqlens[-1] :] = filled
        return buckets, torch.from_numpy(back).to(self.device)


def group_by_length(lengths: NDArray[np.integer[Any]]) -> list[NDArray[np.int64]]:
    """Group indices of sequences of nearly equal lengths, longest first, without empty ones."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    buckets = []
    while len(order):
        ranked = lengths[order]
        count = max(MIN_BUCKET_SEQUENCES, int((ranked >= MIN_LENGTH_RATIO * ranked[0]).sum()))
        if len(order) - count < MIN_BUCKET_SEQUENCES:
            count = len(order)
        buckets.append(order[:count])
        order = order[count:]
    return buckets


class _NativeVarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: NDArray[np.int32], window: int
    ) -> Tensor:
        q, k, v = (_make_rows_contiguous(tensor) for tensor in (q, k, v))
        out = q.new_empty(q.shape)
        log_sum = q.new_empty(q.shape[1], q.shape[0])
        _call_library("varlen_forward", *_build_arguments(q, k, v, starts, window), out, log_sum)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.starts, ctx.window = starts, window
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        slope = _make_rows_contiguous(slopes[0])
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        arguments = _build_arguments(q, k, v, ctx.starts, ctx.window)
        _call_library(
            "varlen_backward", *arguments, out, log_sum, slope, slope.stride(0), *gradients
        )
        return *gradients, None, None


def _make_rows_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor with each token's numbers contiguous; strides between tokens may be
    larger.
    """
    beside = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if beside else tensor.contiguous()


def _build_arguments(
    q: Tensor, k: Tensor, v: Tensor, starts: NDArray[np.int32], window: int
) -> tuple[Any, ...]:
    n, heads, width = q.shape
    strides = q.stride(0), k.stride(0), v.stride(0)
    sizes = len(starts) - 1, n, heads, k.shape[1], width
    return q, k, v, *strides, starts.ctypes.data, *sizes, window, width**-0.5


@cache
def _load_library() -> ctypes.CDLL:
    """Return the library, built on first use; raise KernelUnsupported if that fails."""
    built = build_library("varlen")
    if built.path is None:
        raise KernelUnsupported(built.reason)
    return built.load_with_signatures(SIGNATURES)


def _call_library(name: str, *arguments: Any) -> None:
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    status = getattr(_load_library(), name)(*plain)
    if status == NO_MEMORY:
        raise MemoryError(f"{name} could not allocate memory")
    if status:
        raise IndexError(f"{name} received sequences out of range")


def _build_window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return the bool mask [length, length] of the tokens that each token attends to."""
    key = torch.arange(length, device=device)
    return (key <= key[:, None]) & (key > key[:, None] - window)


@cache
def _can_flash_slide(device: torch.device) -> bool:
    """Return True if PyTorch's attention supports a window with our meaning.

    It is tried once, on a few tokens, since its documentation does not define if a token itself
    counts.
    """
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return False
    tokens, window = 16, 5
    q, k, v = torch.randn(3, tokens, 1, 64, device=device, dtype=torch.bfloat16)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    found = _get_flash_attention(window)[0](q, k, v, starts, starts, tokens, tokens)
    scores = (q[:, 0].float() @ k[:, 0].float().T) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~_build_window_mask(tokens, window, device), -torch.inf).softmax(
        -1
    )
    return torch.allclose(found[:, 0].float(), weights @ v[:, 0].float(), atol=0.05)


@cache
def _get_flash_attention(window: int) -> tuple[Callable[..., Tensor], bool]:
    """Return PyTorch's causal attention, and if it supports grouped heads; depends on its
    version.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in known:
        options = {"window_size": (window - 1 if window else -1, 0)}
    has_gqa = "enable_gqa" in known
    if has_gqa:
        options["enable_gqa"] = True

    def attend(*arguments: Any) -> Tensor:
        out = varlen_attn(*arguments, **options)
        assert isinstance(out, Tensor)
        return out

    return attend, has_gqa
