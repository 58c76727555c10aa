"""Attention for training: rows that hold one sequence, or several packed ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# (layer, queries [.., heads, head_dim], keys and values [.., kv_heads, head_dim]) -> like queries
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]

PADDING = -1  # segment id of places that hold no token
_BLOCKED = -1e30  # finite, so that a row without a visible place gives numbers, not NaN


def packed_attention(segments: Tensor, dtype: torch.dtype = torch.float32) -> Attention:
    """Causal attention within each segment of rows `segments` [rows, length].

    Rows that hold one segment from their first place on (padding only behind it) need no mask and
    take the causal kernel, which is faster; a padded place then yields a number nobody reads.
    """
    if _one_segment_a_row(segments):
        return causal_attention
    mask = _segment_mask(segments, dtype)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _dense(q, k, v, mask)

    return attend


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row one sequence: every place sees itself and what lies before it."""
    return _dense(q, k, v, None)


def segment_positions(segments: Tensor) -> Tensor:
    """Position of each place within its segment, int64 [rows, length]."""
    place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return place - torch.where(starts, place, 0).cummax(1).values


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _segment_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive [rows, 1, length, length]: built once, used by every layer."""
    length = segments.shape[1]
    seen = segments.unsqueeze(1) == segments.unsqueeze(2)
    seen &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~seen, _BLOCKED).unsqueeze(1)


def _one_segment_a_row(segments: Tensor) -> bool:
    empty = segments == PADDING
    whole = ((segments == segments[:, :1]) | empty).all()
    behind = (empty[:, 1:] | ~empty[:, :-1]).all()
    return bool(whole & behind & ~empty[:, 0].any())
