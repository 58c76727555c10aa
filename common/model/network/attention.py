"""Attention as the model sees it: a function that is passed in.

Where keys lie, which queries share a call and how sequences are kept apart differs between
training, an engine and a whole forward pass. The model only hands over one layer's projections, and
says how far back its tokens see. The trainer's, over packed bins, is in `kernels/ops/varlen.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (layer, queries [.., heads, head_dim], keys and values [.., kv_heads, head_dim], window) -> like
# queries. Each token sees itself and what lies before, of that the last `window` tokens, itself
# among them; 0: all.
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


def build_causal_mask(rows: int, context_tokens: int, window: int, device: torch.device) -> Tensor:
    """bool [rows, seen]: what the last `rows` of a sequence's `seen` tokens see of it."""
    key = torch.arange(context_tokens, device=device)
    query = key[context_tokens - rows :, None]
    return (key <= query) & (key > query - window) if window else key <= query
