"""Adapters of several requests in one step of the torch paths: the factors of all that are loaded
lie stacked, and each row keeps those of its own.

A row is multiplied by the factors of every adapter and what is not its own becomes zero, whatever
it was (there may be no number in it): no gather, no loop over adapters, and nothing that depends on
the rows, so that a CUDA graph can hold it. The ranks of a few adapters together are small beside
the matrix that they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from meshrl.common.generation.batch.adapters import TARGETS, Changes
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder, Layer

Key = tuple[int, str]  # layer and fused matrix
Owners = tuple[tuple[int, int], ...]  # (place, rank) of each adapter, in the order of its factors


@dataclass(frozen=True)
class _Stack:
    """The factors of all adapters that change one matrix."""

    a: Tensor  # [ranks of all, inputs]
    b: Tensor  # [outputs, ranks of all]
    owners: Owners


class AdapterBank:
    """The adapters of one engine, and whose rows the next step has."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._changes: dict[int, Changes] = {}
        self._stacks: dict[Key, _Stack] = {}
        self._columns: dict[Owners, Tensor] = {}  # int64 [ranks of all]: the place of each
        self._rows: Tensor | None = None
        self._others: dict[Owners, Tensor] = {}  # bool: not this row's, of the rows of this step

    @property
    def loaded(self) -> bool:
        """Whether there is an adapter at all."""
        return bool(self._changes)

    def attach(self, model: Decoder) -> None:
        """Makes the layers of a model add what these adapters change."""
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            layer.adapters = _OfLayer(self, index)

    def put(self, place: int, changes: Changes) -> bool:
        """Takes an adapter; False: its factors went where those of the version before lay, and
        whoever reads them from there goes on."""
        before = self._changes.get(place)
        self._changes[place] = changes
        same = before is not None and _ranks(before) == _ranks(changes)
        if not same:
            self._stack()
            return True
        for key, change in changes.items():
            stack = self._stacks[key]
            at = 0
            for owner, rank in stack.owners:
                if owner == place:
                    stack.a[at : at + rank].copy_(change.a)
                    stack.b[:, at : at + rank].copy_(change.b)
                at += rank
        return False

    def drop(self, place: int) -> None:
        """Forgets an adapter."""
        if self._changes.pop(place, None) is not None:
            self._stack()

    def _stack(self) -> None:
        stacks: dict[Key, _Stack] = {}
        for key in ((i, name) for i in range(self._config.layers) for name in TARGETS):
            own = {at: c[key] for at, c in sorted(self._changes.items()) if key in c}
            if own:
                stacks[key] = _Stack(
                    torch.cat([change.a for change in own.values()]).to(self._device, self._dtype),
                    torch.cat([change.b for change in own.values()], 1).to(
                        self._device, self._dtype
                    ),
                    tuple((at, change.rank) for at, change in own.items()),
                )
        self._stacks = stacks
        every = {stack.owners for stack in stacks.values()}
        self._columns = {
            owners: torch.tensor(
                [at for at, rank in owners for _ in range(rank)], device=self._device
            )
            for owners in every
        }
        self._others.clear()

    def use_for(self, places: NDArray[np.integer]) -> None:
        """Whose rows come next: the place of each, 0 for none, or of all, [1]."""
        if not self._changes or not places.any():
            self.use(None)
        else:
            self.use(torch.from_numpy(places.astype(np.int64)).to(self._device))

    def use(self, rows: Tensor | None) -> None:
        """The same of a tensor there, int64 [n] or [1]; None: no row has an adapter."""
        self._rows = rows
        self._others.clear()

    def added(self, layer: int, fused: str, x: Tensor, y: Tensor) -> Tensor:
        """`y` and what each row's adapter adds to it."""
        stack = self._stacks.get((layer, fused))
        if stack is None or self._rows is None:
            return y
        others = self._others.get(stack.owners)
        if others is None:
            others = self._rows[:, None] != self._columns[stack.owners]
            self._others[stack.owners] = others
        return y + linear(linear(x, stack.a).masked_fill(others, 0.0), stack.b)


@dataclass(frozen=True)
class _OfLayer:
    """See `meshrl.common.model.network.decoder.Added`."""

    bank: AdapterBank
    layer: int

    def added(self, fused: str, x: Tensor, y: Tensor) -> Tensor:
        return self.bank.added(self.layer, fused, x, y)


def _ranks(changes: Changes) -> Mapping[Key, int]:
    return {key: change.rank for key, change in changes.items()}
