"""Low-rank training: the decoder's own weights are frozen, and adapters beside them learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.job.config import LoraConfig
from common.model.decoder import Decoder, Layer
from common.model.lora import Adapters, LowRank
from common.model.projections import check_adapters, targeted


def adapt(model: Decoder, config: LoraConfig, seed: int) -> None:
    """Freezes the decoder and gives it adapters, A normal and B zero: it computes what it did.

    Parameters that train are from then on those with `requires_grad`. ConfigError when adapters do
    not fit the model.
    """
    check_adapters(model.config, config.rank, config.targets)
    generator = torch.Generator()
    generator.manual_seed(seed)
    names = targeted(model.config, config.targets)
    model.requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.adapters = Adapters(model.config, names, config.rank, config.scale, like=layer.qkv)
        for part in layer.adapters.children():
            assert isinstance(part, LowRank)
            _normal(part.a, generator)


@torch.no_grad()
def _normal(a: Tensor, generator: torch.Generator) -> None:
    """Normal values with the model's own spread, std fan_in**-0.5; drawn on the CPU, wherever `a`
    lies.
    """
    a.copy_(torch.empty(a.shape).normal_(std=a.shape[1] ** -0.5, generator=generator))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name, in the model's order: all of them without adapters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
