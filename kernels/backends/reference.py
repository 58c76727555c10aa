"""Reference of every operator in plain PyTorch, which works everywhere."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from meshrl.kernels.backends.cache_layout import BLOCK_TOKENS, unpack_cache


def bucket_pack(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[index], with zeros where the index is negative."""
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], *rows.shape[1:])
    packed = rows.index_select(0, index.clamp(min=0))
    empty = (index < 0).view(-1, *[1] * (rows.dim() - 1))
    return packed.masked_fill_(empty, 0)


def bucket_scatter(packed: Tensor, index: Tensor, rows: Tensor) -> None:
    """Assign rows[index] = packed, except where the index is negative."""
    live = index >= 0
    rows.index_copy_(0, index[live], packed[live])


def paged_decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Return softmax(scale q K^T) V over each sequence's last `window` tokens (0: all), in
    float32.
    """
    n, heads, width = queries.shape
    kv_heads = keys.shape[1]
    if table.device.type == "cpu" and n:  # a CUDA graph cannot capture a number that the host reads
        table = table[:, : max(1, -(-int(lengths.max()) // BLOCK_TOKENS))]
    token = torch.arange(table.shape[1] * BLOCK_TOKENS, device=table.device)
    here = token < lengths[:, None]
    used = here[:, ::BLOCK_TOKENS]
    if window:
        here = here & (token >= lengths[:, None] - window)
    blocks = torch.where(used, table, 0).long()
    # [n, blocks, kv_heads, 16, width] -> [n, kv_heads, tokens, width]
    k, v = (
        part.transpose(1, 2).reshape(n, kv_heads, -1, width).float()
        for part in unpack_cache(keys[blocks], values[blocks])
    )
    here = here[:, None, :, None]
    # Entries that were never written may be NaN, and 0 times NaN is NaN.
    k, v = k.masked_fill(~here, 0), v.masked_fill(~here, 0)
    grouped = queries.float().view(n, kv_heads, heads // kv_heads, width)
    scores = (grouped @ k.transpose(-2, -1) * scale).masked_fill(~here.mT, -torch.inf)
    weights = scores.softmax(-1).masked_fill((lengths <= 0).view(-1, 1, 1, 1), 0)
    return (weights @ v).view(n, heads, width).to(queries.dtype)


def paged_write(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    table: Tensor,
    positions: Tensor,
) -> None:
    """Write token i at positions[i] of its sequence, except where that is negative."""
    live = positions >= 0
    position, k, v = positions[live], new_keys[live], new_values[live]
    block = table[live].gather(1, position[:, None] // BLOCK_TOKENS)[:, 0].long()
    at = position % BLOCK_TOKENS
    if keys.dtype == torch.bfloat16:
        keys[block, :, :, at] = k.view(*k.shape[:-1], -1, 2)
        values[block, :, at // 2, :, at % 2] = v
    else:
        keys[block, :, :, at] = k
        values[block, :, at] = v


def varlen_prefill(
    queries: Tensor, keys: Tensor, values: Tensor, cu_seqlens: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Return causal softmax(scale q K^T) V within each sequence, in float32; zeros behind the last.

    A token attends to the last `window` tokens up to itself; 0: all.
    """
    out = queries.new_zeros(queries.shape)
    shared = queries.shape[1] // keys.shape[1]
    for first, end in pairwise(cu_seqlens.tolist()):
        q = queries[first:end].transpose(0, 1).float()  # [heads, tokens, width]
        k = keys[first:end].transpose(0, 1).repeat_interleave(shared, 0).float()
        v = values[first:end].transpose(0, 1).repeat_interleave(shared, 0).float()
        hidden = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device).triu(1)
        if window:
            hidden = hidden | ~torch.ones_like(hidden).triu(1 - window)
        weights = (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def token_logprob(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Return log softmax(logits / temperature) at one token of each row; 0 where there is none."""
    scaled = logits.float() / temperature.where(temperature != 0, 1.0)[:, None]
    chosen = scaled.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return (chosen - scaled.logsumexp(-1)).masked_fill(tokens < 0, 0)
