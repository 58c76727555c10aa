"""The attention that a model calls: its type, and a plain version. Packed bins use
`kernels/varlen.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# (layer, queries [.., heads, head_dim], keys and values [.., kv_heads, head_dim]) -> like queries
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows [rows, length, ..] of one sequence each: every place sees itself and what lies before.

    What lies behind a shorter sequence gives numbers that nobody reads.
    """
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
