"""The operators on a CPU, by csrc/ops.cpp through ctypes.

Each function here computes what reference.py's of that name does, or raises Declined: the library
is missing, or does not take such tensors.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from meshrl.kernels.backends.declined import Declined, narrow, need_contiguous
from meshrl.kernels.build import library

# As in csrc/paged.h.
NO_MEMORY, OUT_OF_RANGE = 1, 2

POINTER, FLAG, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, list[type]] = {
    "ops_has_width": [SIZE],
    "ops_bucket_pack": [POINTER, SIZE, SIZE, POINTER, SIZE, POINTER],
    "ops_bucket_scatter": [POINTER, POINTER, SIZE, SIZE, SIZE, POINTER],
    "ops_paged_decode": [FLAG, *[POINTER] * 5, *[SIZE] * 7, FLOAT, POINTER],
    "ops_paged_write": [FLAG, *[POINTER] * 6, *[SIZE] * 5],
    "ops_varlen_prefill": [FLAG, *[POINTER] * 4, *[SIZE] * 6, FLOAT, POINTER],
    "ops_token_logprob": [FLAG, *[POINTER] * 3, *[SIZE] * 2, POINTER],
}


@cache
def functions() -> ctypes.CDLL:
    """The library, built on first use; Declined if it cannot be."""
    built = library("ops")
    if built.path is None:
        raise Declined(built.reason)
    return built.bound(SIGNATURES)


def bucket_pack(rows: Tensor, index: Tensor) -> Tensor:
    """Computes the reference's; Declined: rows are not contiguous."""
    need_contiguous(rows)
    packed = rows.new_empty(index.shape[0], *rows.shape[1:])
    index, size = index.contiguous(), _row_bytes(rows)
    _call("ops_bucket_pack", rows, rows.shape[0], size, index, index.shape[0], packed)
    return packed


def bucket_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    """Computes the reference's; Declined: rows are not contiguous."""
    need_contiguous(rows)
    packed, index = packed.contiguous(), index.contiguous()
    n, size = rows.shape[0], _row_bytes(rows)
    _call("ops_bucket_scatter", packed, index, index.shape[0], n, size, rows)


def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Computes the reference's; Declined: no kernel for the width, or a cache not contiguous."""
    n, heads, width = queries.shape
    need_contiguous(keys, values)
    _need_width(width)
    queries, table, lengths = queries.contiguous(), table.contiguous(), lengths.contiguous()
    out = torch.empty_like(queries)
    sizes = (n, heads, width, keys.shape[0], keys.shape[1], table.shape[1], window)
    tensors = (queries, keys, values, table, lengths)
    _call("ops_paged_decode", narrow(keys), *tensors, *sizes, scale, out)
    return out


def paged_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    """Computes the reference's; Declined: the cache is not contiguous."""
    need_contiguous(keys, values)
    rows = [tensor.contiguous() for tensor in (new_keys, new_values, table, positions)]
    sizes = (new_keys.shape[0], new_keys.shape[2], keys.shape[0], keys.shape[1], table.shape[1])
    _call("ops_paged_write", narrow(keys), keys, values, *rows, *sizes)


def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Computes the reference's; Declined: there is no kernel for the width."""
    _need_width(queries.shape[2])
    queries, keys, values, starts = (t.contiguous() for t in (queries, keys, values, starts))
    out = torch.empty_like(queries)
    sizes = (starts.shape[0] - 1, queries.shape[0], queries.shape[1], *keys.shape[1:], window)
    tensors = (queries, keys, values, starts)
    _call("ops_varlen_prefill", narrow(keys), *tensors, *sizes, scale, out)
    return out


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Computes the reference's; Declined: logits are not contiguous."""
    need_contiguous(logits)
    tokens, temperature = tokens.contiguous(), temperature.contiguous()
    out = torch.empty_like(temperature)
    _call("ops_token_logprob", narrow(logits), logits, tokens, temperature, *logits.shape, out)
    return out


def _need_width(width: int) -> None:
    if not functions().ops_has_width(width):
        raise Declined


def _row_bytes(rows: Tensor) -> int:
    return rows.element_size() * rows.shape[1:].numel()


def _call(name: str, *arguments: Tensor | int | float) -> None:
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    status = getattr(functions(), name)(*plain)
    if status == NO_MEMORY:
        raise MemoryError(f"{name} found no memory")
    if status == OUT_OF_RANGE:
        raise IndexError(f"{name} was given an index, a block or a length that is out of range")
