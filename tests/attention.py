"""Simplest attention function of a decoder: whole sequences, one in a row."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshrl.common.model.network.attention import build_causal_mask


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Return causal attention over rows [rows, length, ...], one sequence per row, within `window`.

    Positions after the end of a shorter sequence have unused values.
    """
    length = q.shape[1]
    slides = 0 < window < length
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=build_causal_mask(length, length, window, q.device) if slides else None,
        is_causal=not slides,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
