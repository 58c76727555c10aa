"""The model that a zebra rank's passes run on: attention whole, of experts its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import is_expert
from meshrl.services.trainer.arithmetic.cut_rows import local
from meshrl.services.trainer.models.precision import weakly
from meshrl.services.trainer.sharding.owners import evenly
from meshrl.services.trainer.sharding.rows import gathered, summed


class Passing:
    """A copy of the rows of `masters` in the type of passes. Gradients are summed over bins in
    float32, and over attention ranks when a round has ended.
    """

    def __init__(
        self,
        masters: Decoder,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        attention: dist.ProcessGroup | None,
    ) -> None:
        """`attention`: the group of the attention ranks; None on an expert rank."""
        self._attention = attention
        self._masters = dict(masters.named_parameters())
        self._shapes = shapes
        with torch.device("meta"):
            self.model = Decoder(masters.config, dtype, len(masters.rope))
        for name, parameter in list(self.model.named_parameters()):
            own: Tensor = parameter.detach()
            if is_expert(name):
                own = own.new_empty(local(self._masters[name].detach()).shape)
            elif attention is None:
                own = own.new_empty(0)
            put(self.model, name, nn.Parameter(own))
        self.model.to_empty(device=device)
        self.model.settle()
        self._parameters = dict(self.model.named_parameters())
        self._sums: dict[Tensor, Tensor] = {}
        add = weakly(self._add)
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self.stale = True  # the masters have changed

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over the masters if they have changed; all attention ranks do so together."""
        if not self.stale:
            return
        for name, parameter in self._parameters.items():
            rows = local(self._masters[name].detach())
            if is_expert(name):
                parameter.copy_(rows)
            elif self._attention is not None:
                ranks, total = self._attention.size(), self._shapes[name][0]
                if ranks > 1:
                    about = total, -(-total // ranks), parameter.dtype
                    rows = gathered(rows, *about, self._attention)
                parameter.copy_(rows)
        self.stale = False

    def collect(self) -> None:
        self._sums = {
            p: torch.zeros_like(p, dtype=torch.float32) for p in self._parameters.values()
        }

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        if (total := self._sums.get(parameter)) is not None and parameter.grad is not None:
            total += parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return the flat float32 gradient of this rank's rows, summed over attention ranks."""
        sums, self._sums = self._sums, {}
        parts = []
        for name, parameter in self._parameters.items():
            total = sums.pop(parameter)
            if is_expert(name):
                parts.append(total.reshape(-1))
            elif self._attention is not None:
                ranks, rank = self._attention.size(), self._attention.rank()
                if ranks > 1:  # this rank's rows of the sum over attention ranks
                    rows, each = evenly(len(total), rank, ranks), -(-len(total) // ranks)
                    own = summed(total, each, total.dtype, self._attention)
                    total = own[: rows.stop - rows.start]
                parts.append(total.reshape(-1))
        return torch.cat(parts)

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}


def put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives a module another parameter of this name."""
    place, _, kind = name.rpartition(".")
    setattr(model.get_submodule(place), kind, parameter)
