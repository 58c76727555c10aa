"""Attention as the model sees it: a function that is passed in.

Where keys lie, which queries share a call and how sequences are kept apart differs between
training, an engine and a whole forward pass. The model only hands over one layer's projections, and
says how far back its tokens see. Here is the simplest such function; that of the trainer, over
packed bins, is in `kernels/ops/varlen.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# (layer, queries [.., heads, head_dim], keys and values [.., kv_heads, head_dim], window) -> like
# queries. Each token sees itself and what lies before, of that the last `window` tokens, itself
# among them; 0: all.
Attention = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Rows [rows, length, ..] of one sequence each: every place sees itself and what lies before,
    as far back as the window.

    What lies behind a shorter sequence gives numbers that nobody reads.
    """
    length = q.shape[1]
    slides = 0 < window < length
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible(length, length, window, q.device) if slides else None,
        is_causal=not slides,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def visible(rows: int, seen: int, window: int, device: torch.device) -> Tensor:
    """bool [rows, seen]: what the last `rows` of a sequence's `seen` tokens see of it."""
    key = torch.arange(seen, device=device)
    query = key[seen - rows :, None]
    return (key <= query) & (key > query - window) if window else key <= query
