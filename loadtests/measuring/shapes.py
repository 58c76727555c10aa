"""Small models with random weights. This module imports no mesh."""

from __future__ import annotations

from typing import Any

import torch

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder

Tensors = dict[str, torch.Tensor]


def shape(
    hidden: int, layers: int, ffn: int, vocabulary: int, heads: tuple[int, int], **more: Any
) -> ModelConfig:
    """Return the shape of a decoder, Qwen3's if no other architecture is named.

    Args:
        hidden: Width of its stream.
        layers: How many it has.
        ffn: Width of its feed-forward part.
        vocabulary: Tokens.
        heads: Heads of queries, and of keys and values.
        more: Further fields of its configuration.
    """
    about: dict[str, Any] = {"architecture": "qwen3", "max_positions": 8192} | more
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        ffn_size=ffn,
        qk_norm=about["architecture"] == "qwen3",
        **({"head_dim": hidden // heads[0]} | about),
    )


def drawn(config: ModelConfig, seed: int = 0) -> Tensors:
    """Return the weights of a model in float32; the same seed draws the same."""
    model = Decoder(config)
    model.initialise(torch.Generator().manual_seed(seed))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
