"""Operators on the paged cache: write tokens into it, and attend to it with one query per
sequence.
"""

import torch
from torch import Tensor

from kernels.backends import reference
from kernels.backends.layout import check_cache
from kernels.ops.dispatch import offer


@torch.library.custom_op("meshrl::paged_decode", mutates_args=())
def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of queries [n, heads, width] to lengths [n] int32 tokens each -> like queries; with
    a `window`, to the last `window` of them.

    Token t of sequence i is token t % 16 of block table[i, t // 16]; table [n, m] int32. keys and
    values are a cache of `cache_shapes`, in the queries' type; query heads share key-value heads in
    order. Length 0 is an empty lane: zeros. What the table or a block hold behind a sequence's end
    is never read into a result. IndexError on a CPU if a length or a block is out of range.
    """
    _check_decode(queries, keys, values, table, lengths, scale, window)
    return reference.paged_decode(queries, keys, values, table, lengths, scale, window)


@torch.library.custom_op("meshrl::paged_write", mutates_args={"keys", "values"})
def paged_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    """Puts new_keys, new_values [n, kv_heads, width] into the cache in place, one token each.

    Token i goes to position positions[i] (int64) of the sequence whose blocks are table[i] ([n, m]
    int32); -1 is skipped. IndexError on a CPU if a position or a block is out of range; tokens
    before it may have been written.
    """
    _check_write(keys, values, new_keys, new_values, table, positions)
    reference.paged_write(keys, values, new_keys, new_values, table, positions)


def _check_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> None:
    if window < 0:
        raise ValueError(f"a window of {window} tokens")
    if queries.dim() != 3 or keys.dim() < 2 or queries.shape[1] % keys.shape[1]:
        raise ValueError(f"queries {list(queries.shape)} for a cache of {list(keys.shape)}")
    check_cache(keys, values, keys.shape[1], queries.shape[2])
    _check_table(table, lengths, queries.shape[0], torch.int32)
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries of {queries.dtype}, keys of {keys.dtype}")


def _check_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    if new_keys.dim() != 3 or new_keys.shape != new_values.shape:
        raise ValueError(f"keys {list(new_keys.shape)}, values {list(new_values.shape)}")
    check_cache(keys, values, *new_keys.shape[1:])
    _check_table(table, positions, new_keys.shape[0], torch.int64)
    if not new_keys.dtype == new_values.dtype == keys.dtype:
        raise ValueError(f"{new_keys.dtype}, {new_values.dtype} for a cache of {keys.dtype}")


def _check_table(table: Tensor, per_row: Tensor, n: int, dtype: torch.dtype) -> None:
    if table.dim() != 2 or table.shape[0] != n or table.dtype != torch.int32:
        raise ValueError(f"table {list(table.shape)} of {table.dtype}, expected [{n}, m] of int32")
    if list(per_row.shape) != [n] or per_row.dtype != dtype:
        raise ValueError(f"{list(per_row.shape)} of {per_row.dtype}, expected [{n}] of {dtype}")


offer(paged_decode, _check_decode, lambda queries, *_: queries.new_empty(queries.shape))
offer(paged_write, _check_write, lambda *_: None)
