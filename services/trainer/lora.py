"""Low-rank training: a decoder's own weights stand still, adapters beside them learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.config import LoraConfig
from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.decoder import Decoder, Layer
from common.model.lora import Adapters, LowRank
from common.model.projections import projections, targeted


def check(model: ModelConfig, config: LoraConfig) -> None:
    """ConfigError when the job's adapters do not fit the model."""
    names = targeted(config.targets)
    parts = projections(model)
    if not names:
        raise ConfigError("nothing to adapt", where="lora.targets", fix="name a projection")
    inside = sorted({parts[name].fused for name in names} & {"gate_up", "down"})
    if inside and model.sparse_layers:
        raise ConfigError(
            f"{', '.join(inside)} of a mixture of experts take no adapters",
            where="lora.targets",
            fix='set it to ["qkv", "output"]',
        )
    smallest = min(min(parts[name].rows, parts[name].columns) for name in names)
    if config.rank > smallest:
        raise ConfigError(
            f"adapters of rank {config.rank} for a projection of width {smallest}",
            where="lora.rank",
            fix=f"at most {smallest}; above it, train the whole model",
        )


def adapt(model: Decoder, config: LoraConfig, seed: int) -> None:
    """Freezes the decoder and gives it adapters, A normal and B zero: it computes what it did.

    Parameters that train are from then on those with `requires_grad`. ConfigError as `check`.
    """
    check(model.config, config)
    generator = torch.Generator()
    generator.manual_seed(seed)
    names = targeted(config.targets)
    model.requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.adapters = Adapters(model.config, names, config.rank, config.scale, like=layer.qkv)
        for part in layer.adapters.children():
            assert isinstance(part, LowRank)
            _normal(part.a, generator)


@torch.no_grad()
def _normal(a: Tensor, generator: torch.Generator) -> None:
    """With the model's own spread, std fan_in**-0.5; drawn on the CPU, whatever `a` lies on."""
    a.copy_(torch.empty(a.shape).normal_(std=a.shape[1] ** -0.5, generator=generator))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name, in the model's order: all of them without adapters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
