"""Operators: their arguments, and the checks before an implementation runs."""

import torch
from torch import Tensor

from meshrl.kernels.backends.cache_layout import check_cache
from meshrl.kernels.ops.dispatch import register_operator


@register_operator(lambda rows, index: rows.new_empty(index.shape[0], *rows.shape[1:]))
def bucket_pack(rows: Tensor, index: Tensor) -> None:
    """Gather rows [n, ...] by index [b] int64 into [b, ...]; a lane with index -1 is zeros.

    IndexError on a CPU if an index is n or more.
    """
    if rows.dim() < 1 or index.dim() != 1 or index.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)}, index {list(index.shape)} of {index.dtype}")


@register_operator(mutated_arguments=["rows"])
def bucket_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write lanes packed [b, ...] back in place: rows[index[i]] = packed[i]; skip -1.

    If two lanes have one index, either may win. IndexError on a CPU if an index is n or more; lanes
    before it may have been written.
    """
    if rows.dim() < 1 or index.dim() != 1 or index.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)}, index {list(index.shape)} of {index.dtype}")
    if list(packed.shape) != [index.shape[0], *rows.shape[1:]] or packed.dtype != rows.dtype:
        raise ValueError(
            f"packed {list(packed.shape)} of {packed.dtype} for {index.shape[0]} lanes of "
            f"rows {list(rows.shape)} of {rows.dtype}"
        )


@register_operator(lambda queries, *_: queries.new_empty(queries.shape))
def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> None:
    """Compute attention of queries [n, heads, width] to lengths [n] int32 tokens each.

    The result has the shape of the queries. With a `window`, only the last `window` tokens count.
    Token t of sequence i is token t % 16 of block table[i, t // 16]; table [n, m] int32. keys and
    values are a cache of `get_cache_shapes`, in the queries' dtype; query heads share key-value
    heads in order. Length 0 is an empty lane: zeros. Entries of the table or of a block behind a
    sequence's end never affect a result. IndexError on a CPU if a length or a block is out of
    range.
    """
    if window < 0:
        raise ValueError(f"the window is {window} tokens, below 0")
    if queries.dim() != 3 or keys.dim() < 2 or queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"queries of shape {list(queries.shape)} do not match a cache of "
            f"shape {list(keys.shape)}"
        )
    check_cache(keys, values, keys.shape[1], queries.shape[2])
    _check_table(table, lengths, queries.shape[0], torch.int32)
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries are {queries.dtype}, but keys are {keys.dtype}")


@register_operator(mutated_arguments=["keys", "values"])
def paged_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    """Write new_keys, new_values [n, kv_heads, width] into the cache in place, one token each.

    Token i goes to position positions[i] (int64) of the sequence whose blocks are table[i] ([n, m]
    int32); -1 is skipped. IndexError on a CPU if a position or a block is out of range; tokens
    before it may have been written.
    """
    if new_keys.dim() != 3 or new_keys.shape != new_values.shape:
        raise ValueError(
            f"keys of shape {list(new_keys.shape)} do not match values of shape "
            f"{list(new_values.shape)}"
        )
    check_cache(keys, values, *new_keys.shape[1:])
    _check_table(table, positions, new_keys.shape[0], torch.int64)
    if not new_keys.dtype == new_values.dtype == keys.dtype:
        raise ValueError(
            f"keys of {new_keys.dtype} and values of {new_values.dtype} do not "
            f"match a cache of {keys.dtype}"
        )


@register_operator(lambda queries, *_: queries.new_empty(queries.shape))
def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, scale: float, window: int = 0
) -> None:
    """Compute attention of queries [t, heads, width] to keys, values [t, kv_heads, width].

    The result has the shape of the queries. A token attends to the last `window` tokens of its
    sequence up to itself; 0: all.

    cu_seqlens [s + 1] int32 are 0 and the cumulative lengths of s sequences; rows behind the last
    are padding: zeros. IndexError on a CPU if they are not ascending or exceed t.
    """
    if window < 0:
        raise ValueError(f"the window is {window} tokens, below 0")
    shapes = [list(tensor.shape) for tensor in (queries, keys, values)]
    if queries.dim() != 3 or keys.dim() != 3 or keys.shape != values.shape:
        raise ValueError(f"queries, keys and values have mismatched shapes {shapes}")
    if queries.shape[::2] != keys.shape[::2] or queries.shape[1] % keys.shape[1]:
        raise ValueError(f"queries, keys and values have mismatched shapes {shapes}")
    if not queries.dtype == keys.dtype == values.dtype in (torch.float32, torch.bfloat16):
        raise ValueError(f"queries, keys, values of {queries.dtype}, {keys.dtype}, {values.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(f"starts {list(cu_seqlens.shape)} of {cu_seqlens.dtype}")


@register_operator(lambda logits, tokens, temperature: torch.empty_like(temperature))
def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> None:
    """Return log softmax(logits / temperature)[token] of each row, [n] float32.

    The logits are [n, vocab] float32 or bfloat16, tokens [n] int64 (-1: an empty lane, 0),
    temperature [n] float32 (0 counts as 1: greedy). A row with a NaN gives NaN. IndexError on a CPU
    if a token is out of range.
    """
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"logits {list(logits.shape)} of {logits.dtype}")
    _check_rows(tokens, logits.shape[0], torch.int64)
    _check_rows(temperature, logits.shape[0], torch.float32)


def _check_table(table: Tensor, per_row: Tensor, n: int, dtype: torch.dtype) -> None:
    if table.dim() != 2 or table.shape[0] != n or table.dtype != torch.int32:
        raise ValueError(f"table {list(table.shape)} of {table.dtype}, expected [{n}, m] of int32")
    _check_rows(per_row, n, dtype)


def _check_rows(tensor: Tensor, n: int, dtype: torch.dtype) -> None:
    if list(tensor.shape) != [n] or tensor.dtype != dtype:
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype}, expected [{n}] of {dtype}")
