"""Adapters of several requests in one step of the torch backends.

The factors of all loaded adapters are stacked. Each row is multiplied by all of them, and a mask
sets the products of other adapters to zero, including NaN values. So there is no gather, no loop
over adapters and no operation that depends on the rows, and a CUDA graph can capture the step. The
ranks of a few adapters together are small beside the matrix that they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from meshrl.common.generation.batch.adapter_deltas import ADAPTER_TARGETS, AdapterDeltas
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder, DecoderLayer

TargetKey = tuple[int, str]  # layer and fused matrix
# (adapter index, rank) of each adapter, in the order of its factors
Owners = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _StackedFactors:
    """Factors of all adapters that change one matrix."""

    a: Tensor  # [ranks of all, inputs]
    b: Tensor  # [outputs, ranks of all]
    owners: Owners


class AdapterBank:
    """Adapters of one engine, and the adapter of each row of the next step."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._deltas: dict[int, AdapterDeltas] = {}
        self._stacks: dict[TargetKey, _StackedFactors] = {}
        # int64 [ranks of all]: adapter index of each rank
        self._factor_owners: dict[Owners, Tensor] = {}
        self._row_adapters: Tensor | None = None
        self._foreign_masks: dict[
            Owners, Tensor
        ] = {}  # bool mask of each row of this step: True where a rank is not of its adapter

    @property
    def has_adapters(self) -> bool:
        """True if any adapter is loaded."""
        return bool(self._deltas)

    def attach_model(self, model: Decoder) -> None:
        """Make the layers of a model add the changes of these adapters."""
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            layer.adapters = _LayerAdapters(self, index)

    def load(self, adapter_index: int, deltas: AdapterDeltas) -> bool:
        """Load an adapter; return False if it replaced the factors of an earlier version in place.

        Code that captured the addresses, such as a CUDA graph, then stays valid.
        """
        before = self._deltas.get(adapter_index)
        self._deltas[adapter_index] = deltas
        same = before is not None and _get_ranks(before) == _get_ranks(deltas)
        if not same:
            self._stack_factors()
            return True
        for key, change in deltas.items():
            stack = self._stacks[key]
            at = 0
            for owner, rank in stack.owners:
                if owner == adapter_index:
                    stack.a[at : at + rank].copy_(change.a)
                    stack.b[:, at : at + rank].copy_(change.b)
                at += rank
        return False

    def unload(self, adapter_index: int) -> None:
        """Remove an adapter."""
        if self._deltas.pop(adapter_index, None) is not None:
            self._stack_factors()

    def _stack_factors(self) -> None:
        stacks: dict[TargetKey, _StackedFactors] = {}
        for key in ((i, name) for i in range(self._config.num_layers) for name in ADAPTER_TARGETS):
            own = {at: c[key] for at, c in sorted(self._deltas.items()) if key in c}
            if own:
                stacks[key] = _StackedFactors(
                    torch.cat([change.a for change in own.values()]).to(self._device, self._dtype),
                    torch.cat([change.b for change in own.values()], 1).to(
                        self._device, self._dtype
                    ),
                    tuple((at, change.rank) for at, change in own.items()),
                )
        self._stacks = stacks
        every = {stack.owners for stack in stacks.values()}
        self._factor_owners = {
            owners: torch.tensor(
                [at for at, rank in owners for _ in range(rank)], device=self._device
            )
            for owners in every
        }
        self._foreign_masks.clear()

    def set_row_adapters(self, adapter_indices: NDArray[np.integer]) -> None:
        """Set the adapter index of each row of the next step, or of all rows, [1]; 0: none."""
        if not self._deltas or not adapter_indices.any():
            self.set_row_adapter_tensor(None)
        else:
            self.set_row_adapter_tensor(
                torch.from_numpy(adapter_indices.astype(np.int64)).to(self._device)
            )

    def set_row_adapter_tensor(self, rows: Tensor | None) -> None:
        """Set the adapter index of each row from a device tensor, int64 [n] or [1].

        None: no row has an adapter.
        """
        self._row_adapters = rows
        self._foreign_masks.clear()

    def apply_lora(self, layer: int, fused_name: str, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` plus the change that each row's adapter adds to it."""
        stack = self._stacks.get((layer, fused_name))
        if stack is None or self._row_adapters is None:
            return y
        others = self._foreign_masks.get(stack.owners)
        if others is None:
            others = self._row_adapters[:, None] != self._factor_owners[stack.owners]
            self._foreign_masks[stack.owners] = others
        return y + linear(linear(x, stack.a).masked_fill(others, 0.0), stack.b)


@dataclass(frozen=True)
class _LayerAdapters:
    """Implementation of `meshrl.common.model.network.decoder.ProjectionAdapters`."""

    bank: AdapterBank
    layer: int

    def apply_lora(self, fused_name: str, x: Tensor, y: Tensor) -> Tensor:
        return self.bank.apply_lora(self.layer, fused_name, x, y)


def _get_ranks(changes: AdapterDeltas) -> Mapping[TargetKey, int]:
    return {key: change.rank for key, change in changes.items()}
