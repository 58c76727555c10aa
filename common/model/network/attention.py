"""Attention interface of the model: a function that callers pass in.

The location of keys, the batching of queries and the separation of sequences differ between
training, an engine and a whole forward pass. The model passes one layer's projections and the
window of its tokens. The trainer's attention, over packed bins, is in `kernels/ops/varlen.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (layer, queries [.., heads, head_dim], keys and values [.., kv_heads, head_dim], window) -> like
# queries. Each token attends to the last `window` tokens, itself included; 0: all up to itself.
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


def build_causal_mask(rows: int, context_tokens: int, window: int, device: torch.device) -> Tensor:
    """Return a bool mask [rows, context_tokens]: which tokens the last `rows` tokens attend to."""
    key = torch.arange(context_tokens, device=device)
    query = key[context_tokens - rows :, None]
    return (key <= query) & (key > query - window) if window else key <= query
