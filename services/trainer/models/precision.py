"""Mixed precision: passes in bfloat16, master weights and sums in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from meshrl.common.model.network.decoder import Decoder


class WorkingCopy:
    """Narrower copy of a model for passes; gradients are summed over bins in float32."""

    def __init__(self, masters: Decoder, dtype: torch.dtype) -> None:
        # Narrow copies of the tensors first, so that no float32 copy of the model is made.
        narrow: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in masters.parameters()
        }
        narrow |= {id(b): b.to(dtype) for b in masters.buffers()}
        self.model = copy.deepcopy(masters, narrow)
        self._masters: list[Tensor] = list(masters.parameters())
        self._parameters: list[Tensor] = list(self.model.parameters())
        self._sums: dict[Tensor, Tensor] = {}
        add = make_weak_hook(self._accumulate)
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters after a step."""
        torch._foreach_copy_(self._parameters, self._masters)

    def set_gradient_sums(self, gradients: list[Tensor | None]) -> None:
        """Add later gradients to these float32 tensors, by parameter; None skips a parameter."""
        pairs = zip(self._parameters, gradients, strict=True)
        self._sums = {parameter: total for parameter, total in pairs if total is not None}

    def _accumulate(self, parameter: Tensor) -> None:
        total, found = self._sums.get(parameter), parameter.grad
        if total is not None and found is not None:
            total += found
        parameter.grad = None


def make_weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that references its method weakly: the collector cannot see hooks'
    references.
    """
    found = WeakMethod(method)

    def call(tensor: Tensor) -> None:
        if (there := found()) is not None:
            there(tensor)

    return call
