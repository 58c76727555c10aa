"""Operators on a CPU, by csrc/ops.cpp through ctypes.

Each function computes what the function of that name in reference.py does. It raises
KernelUnsupported if the library is missing or does not support such tensors.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from meshrl.kernels.backends.kernel_unsupported import (
    KernelUnsupported,
    bfloat16_flag,
    require_contiguous,
)
from meshrl.kernels.library_build import build_library

# As in csrc/paged.h.
NO_MEMORY, OUT_OF_RANGE = 1, 2

C_POINTER, C_INT, C_INT64, C_FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, list[type]] = {
    "ops_has_width": [C_INT64],
    "ops_bucket_pack": [C_POINTER, C_INT64, C_INT64, C_POINTER, C_INT64, C_POINTER],
    "ops_bucket_scatter": [C_POINTER, C_POINTER, C_INT64, C_INT64, C_INT64, C_POINTER],
    "ops_paged_decode": [C_INT, *[C_POINTER] * 5, *[C_INT64] * 7, C_FLOAT, C_POINTER],
    "ops_paged_write": [C_INT, *[C_POINTER] * 6, *[C_INT64] * 5],
    "ops_varlen_prefill": [C_INT, *[C_POINTER] * 4, *[C_INT64] * 6, C_FLOAT, C_POINTER],
    "ops_token_logprob": [C_INT, *[C_POINTER] * 3, *[C_INT64] * 2, C_POINTER],
}


@cache
def load_library() -> ctypes.CDLL:
    """Return the library, built on first use; raise KernelUnsupported if that fails."""
    built = build_library("ops")
    if built.path is None:
        raise KernelUnsupported(built.reason)
    return built.load_with_signatures(SIGNATURES)


def bucket_pack(rows: Tensor, index: Tensor) -> Tensor:
    """Compute the reference's operator; KernelUnsupported: rows are not contiguous."""
    require_contiguous(rows)
    packed = rows.new_empty(index.shape[0], *rows.shape[1:])
    index, size = index.contiguous(), _count_row_bytes(rows)
    _call_library("ops_bucket_pack", rows, rows.shape[0], size, index, index.shape[0], packed)
    return packed


def bucket_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    """Compute the reference's operator; KernelUnsupported: rows are not contiguous."""
    require_contiguous(rows)
    packed, index = packed.contiguous(), index.contiguous()
    n, size = rows.shape[0], _count_row_bytes(rows)
    _call_library("ops_bucket_scatter", packed, index, index.shape[0], n, size, rows)


def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Compute the reference's operator.

    KernelUnsupported: no kernel for the width, or the cache is not contiguous.
    """
    n, heads, width = queries.shape
    require_contiguous(keys, values)
    _require_width(width)
    queries, table, lengths = queries.contiguous(), table.contiguous(), lengths.contiguous()
    out = torch.empty_like(queries)
    sizes = (n, heads, width, keys.shape[0], keys.shape[1], table.shape[1], window)
    tensors = (queries, keys, values, table, lengths)
    _call_library("ops_paged_decode", bfloat16_flag(keys), *tensors, *sizes, scale, out)
    return out


def paged_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    """Compute the reference's operator; KernelUnsupported: the cache is not contiguous."""
    require_contiguous(keys, values)
    rows = [tensor.contiguous() for tensor in (new_keys, new_values, table, positions)]
    sizes = (new_keys.shape[0], new_keys.shape[2], keys.shape[0], keys.shape[1], table.shape[1])
    _call_library("ops_paged_write", bfloat16_flag(keys), keys, values, *rows, *sizes)


def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Compute the reference's operator; KernelUnsupported: there is no kernel for the width."""
    _require_width(queries.shape[2])
    queries, keys, values, cu_seqlens = (
        t.contiguous() for t in (queries, keys, values, cu_seqlens)
    )
    out = torch.empty_like(queries)
    sizes = (cu_seqlens.shape[0] - 1, queries.shape[0], queries.shape[1], *keys.shape[1:], window)
    tensors = (queries, keys, values, cu_seqlens)
    _call_library("ops_varlen_prefill", bfloat16_flag(keys), *tensors, *sizes, scale, out)
    return out


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Compute the reference's operator; KernelUnsupported: logits are not contiguous."""
    require_contiguous(logits)
    tokens, temperature = tokens.contiguous(), temperature.contiguous()
    out = torch.empty_like(temperature)
    _call_library(
        "ops_token_logprob", bfloat16_flag(logits), logits, tokens, temperature, *logits.shape, out
    )
    return out


def _require_width(width: int) -> None:
    if not load_library().ops_has_width(width):
        raise KernelUnsupported


def _count_row_bytes(rows: Tensor) -> int:
    return rows.element_size() * rows.shape[1:].numel()


def _call_library(name: str, *arguments: Tensor | int | float) -> None:
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    status = getattr(load_library(), name)(*plain)
    if status == NO_MEMORY:
        raise MemoryError(f"{name} could not allocate memory")
    if status == OUT_OF_RANGE:
        raise IndexError(f"{name} received an index, a block or a length out of range")
