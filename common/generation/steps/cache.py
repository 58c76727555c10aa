"""The contiguous cache of keys and values, and attention over it for decoding and for prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.model.architecture.config import ModelConfig
from common.model.network.attention import Attention, visible

_BLOCK = 32  # context is computed in multiples of it: few distinct shapes, little waste
_BAND = 16  # lanes that are computed to the length of their longest: long tails cost few of them
_BLOCKED = -1e30  # finite: exp of it is 0 and no row becomes NaN
_GATHER_BELOW = 0.7  # share of the slots in a span below which copying the cache of those pays


@dataclass(frozen=True, slots=True)
class _Band:
    """Lanes that attend together, over the first `length` places of their slots."""

    lanes: slice
    slots: slice | Tensor  # a view of the cache, or a copy
    length: int
    places: Tensor  # [lanes * kv_heads, 1, 1]: of the new tokens


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
        self._visible, self._blocked = like.new_tensor(0.0), like.new_tensor(_BLOCKED)

    def decode(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Attention:
        """One new token in each of `slots` (ascending), written at its position.

        Attention runs over lanes: all slots from the first to the last, where they lie, or, when
        few of those decode, only these, copied.
        """
        first, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
        index, place = self._tensor(slots), self._tensor(positions)
        gather = len(slots) < _GATHER_BELOW * span
        spread = not gather and len(slots) < span
        reach, inside = positions, index
        if spread:
            reach = np.zeros(span, np.int64)
            reach[slots - first] = positions
            inside = index - first
        bands = self._bands(reach, first, index if gather else None)
        masks: dict[int, list[Tensor]] = {}  # by window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            if window not in masks:
                masks[window] = [self._mask(band, window) for band in bands]
            keys, values = self.keys[layer], self.values[layer]
            keys[index, :, :, place] = k
            values[index, :, place] = v
            if spread:
                q = q.new_zeros(span, *q.shape[1:]).index_copy_(0, inside, q)
            both = zip(bands, masks[window], strict=True)
            parts = [self._attend(band, mask, q, keys, values) for band, mask in both]
            mixed = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(q.shape)
            return mixed.index_select(0, inside) if spread else mixed

        return attend

    def _bands(self, reach: NDArray[np.int64], first: int, copied: Tensor | None) -> list[_Band]:
        """Cuts lanes that see up to `reach`; neighbours of equal length stay together."""
        starts = range(0, len(reach), _BAND)
        longest = np.maximum.reduceat(reach, starts) // _BLOCK
        blocks = longest.tolist()
        cuts = [i * _BAND for i in range(len(blocks)) if i == 0 or blocks[i] != blocks[i - 1]]
        places = self._tensor(reach)
        if self._heads > 1:
            places = places.repeat_interleave(self._heads)
        places = places.view(-1, 1, 1)
        bands = []
        for start, end in zip(cuts, [*cuts[1:], len(reach)], strict=True):
            length = (blocks[start // _BAND] + 1) * _BLOCK
            where = slice(first + start, first + end) if copied is None else copied[start:end]
            rows = places[start * self._heads : end * self._heads]
            bands.append(_Band(slice(start, end), where, length, rows))
        return bands

    def _mask(self, band: _Band, window: int) -> Tensor:
        """[lanes * kv_heads, 1, length]: what is added to scores."""
        columns = self._columns[: band.length]
        hidden = columns > band.places
        if window:
            hidden |= columns <= band.places - window
        return torch.where(hidden, self._blocked, self._visible)

    def _attend(self, band: _Band, mask: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[lanes * kv_heads, heads / kv_heads, head_dim]"""
        keys, values = keys[..., : band.length], values[:, :, : band.length]
        if isinstance(band.slots, slice):
            keys, values = keys[band.slots], values[band.slots]
        else:
            keys, values = keys.index_select(0, band.slots), values.index_select(0, band.slots)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        queries = q[band.lanes].reshape(len(keys), -1, q.shape[-1])
        scores = torch.baddbmm(mask, queries, keys, alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values)

    def prefill(self, slot: int, start: int, count: int) -> Attention:
        """`count` tokens of one slot from position `start` on; queries [count, heads, width]."""
        end = start + count

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            mask = None
            if start or 0 < window < end:
                seen = visible(count, end, window, q.device)
                mask = torch.where(seen, self._visible, self._blocked)
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

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._columns.device)
