"""Keys and values of contiguous slots, and attention over them while decoding or prefilling."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.model.attention import Attention
from common.model.config import ModelConfig

_BLOCK = 32  # context is computed in multiples of it: few distinct shapes, little waste
_BLOCKED = -1e30  # finite: exp of it is 0 and no row becomes NaN
_GATHER_BELOW = 0.7  # share of a span's rows below which copying the cache of those rows pays


class Cache:
    """keys [layers, slots, kv_heads, head_dim, length] lie transposed, so that the few queries that
    share a head multiply along memory; values [layers, slots, kv_heads, length, head_dim]."""

    def __init__(self, config: ModelConfig, slots: int, length: int, like: Tensor) -> None:
        length = -(-length // _BLOCK) * _BLOCK
        layers, heads, width = config.layers, config.kv_heads, config.head_dim
        self._heads, self._scale = heads, width**-0.5
        self.keys = torch.zeros(
            layers, slots, heads, width, length, dtype=like.dtype, device=like.device
        )
        self.values = torch.zeros(
            layers, slots, heads, length, width, dtype=like.dtype, device=like.device
        )
        self._columns = torch.arange(length, device=like.device)

    def decode(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Attention:
        """One new token in each of `slots` (ascending), written at its position."""
        first, last, n = int(slots[0]), int(slots[-1]) + 1, len(slots)
        length = -(-(int(positions.max()) + 1) // _BLOCK) * _BLOCK
        index, place = self._tensor(slots), self._tensor(positions)
        spread = gather = False
        if n < last - first:
            gather = n < _GATHER_BELOW * (last - first)
            spread = not gather
        where = place
        if spread:
            inside = index - first
            where = place.new_zeros(last - first).index_copy_(0, inside, place)
        mask = self._mask(where.unsqueeze(1), length, like=self.keys)
        if self._heads > 1:
            mask = mask.repeat_interleave(self._heads, 0)
        mask = mask.unsqueeze(1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[index, :, :, place] = k
            values[index, :, place] = v
            keys, values = keys[..., :length], values[:, :, :length]
            if gather:
                keys, values = keys.index_select(0, index), values.index_select(0, index)
            else:
                keys, values = keys[first:last], values[first:last]
            rows = q
            if spread:
                rows = q.new_zeros(last - first, *q.shape[1:]).index_copy_(0, inside, q)
            grouped = rows.reshape(keys.shape[0] * self._heads, -1, q.shape[-1])
            scores = torch.baddbmm(mask, grouped, keys.flatten(0, 1), alpha=self._scale)
            mixed = torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows.shape)
            return mixed.index_select(0, inside) if spread else mixed

        return attend

    def prefill(self, slot: int, start: int, count: int) -> Attention:
        """`count` tokens of one slot from position `start` on; queries [count, heads, width]."""
        end = start + count
        places = self._columns[start:end].unsqueeze(1)
        mask = self._mask(places, end, like=self.keys) if start else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer, slot], self.values[layer, slot]
            keys[:, :, start:end] = k.permute(1, 2, 0)
            values[:, start:end] = v.transpose(0, 1)
            out = scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                keys[:, :, :end].mT.contiguous().unsqueeze(0),
                values[:, :end].unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            return out.squeeze(0).transpose(0, 1)

        return attend

    def copy(self, source: int, target: int, count: int) -> None:
        """The first `count` entries of one slot become another's."""
        self.keys[:, target, :, :, :count] = self.keys[:, source, :, :, :count]
        self.values[:, target, :, :count] = self.values[:, source, :, :count]

    def _mask(self, positions: Tensor, length: int, like: Tensor) -> Tensor:
        """Additive [n, length]: each row sees up to its position."""
        beyond = self._columns[:length] > positions
        return torch.zeros(beyond.shape, dtype=like.dtype, device=like.device).masked_fill_(
            beyond, _BLOCKED
        )

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._columns.device)
