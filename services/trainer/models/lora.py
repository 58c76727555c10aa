"""Low-rank training: the decoder's own weights are frozen, and adapters beside them are trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshrl.common.job.config import LoraConfig
from meshrl.common.model.architecture.projections import check_adapters, resolve_targets
from meshrl.common.model.network.decoder import Decoder, DecoderLayer
from meshrl.common.model.network.lora import LoraAdapters, LoraFactors


def initialize_adapters(model: Decoder, config: LoraConfig, seed: int) -> None:
    """Freeze the decoder and attach adapters, A normal and B zero, so that outputs do not change.

    The trainable parameters are then those with `requires_grad`. Raise ConfigError if adapters do
    not fit the model.
    """
    attach_adapters(model, config)
    with torch.no_grad():
        for _, parameter, values in draw_adapter_values(model, seed):
            parameter.copy_(values)


def attach_adapters(model: Decoder, config: LoraConfig) -> None:
    """Attach adapters without values, as on a `meta` device; `draw_adapter_values` has them."""
    check_adapters(model.config, config.rank, config.targets)
    names = resolve_targets(model.config, config.targets)
    model.requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.adapters = LoraAdapters(
            model.config, names, config.rank, config.scale, like=layer.qkv
        )


def draw_adapter_values(model: Decoder, seed: int) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield each adapter parameter by name with its initial values, drawn on the CPU.

    A is normal with the model's own spread, std fan_in**-0.5, and B is zero. Without adapters
    nothing is yielded.
    """
    generator = torch.Generator()
    generator.manual_seed(seed)
    for number, layer in enumerate(model.layers):
        for name, part in layer.named_modules(prefix=f"layers.{number}"):
            if isinstance(part, LoraFactors):
                rank, fan_in = part.a.shape
                a = torch.empty(rank, fan_in).normal_(std=fan_in**-0.5, generator=generator)
                yield f"{name}.a", part.a, a
                yield f"{name}.b", part.b, torch.zeros(part.b.shape)


def get_trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name in model order; without adapters, all of them."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
