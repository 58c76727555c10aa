"""Models that engines of load tests have, by name, and their weights, drawn from a seed."""

from __future__ import annotations

import torch

from common.model.architecture.config import ModelConfig
from common.model.network.decoder import Decoder
from loadtests.weights.contents import Tensors


def _model(hidden: int, layers: int, ffn: int, vocabulary: int = 4096) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=layers,
        heads=hidden // 64,
        kv_heads=max(1, hidden // 128),
        head_dim=64,
        ffn_size=ffn,
        qk_norm=True,
        tie_embeddings=True,
        max_positions=8192,
    )


MODELS = {
    "tiny": _model(64, 2, 128, 64),  # 0.3 MiB
    "little": _model(256, 2, 640, 4096),  # 8 MiB: eight chunks or more
    "small": _model(512, 4, 1536),  # 60 MiB in float32
    "medium": _model(1024, 6, 2816),  # 300 MiB
}


def drawn(name: str, seed: int) -> Tensors:
    """The weights of one in float32; each seed gives others."""
    model = Decoder(MODELS[name])
    model.initialise(torch.Generator().manual_seed(seed))
    return {key: tensor.detach() for key, tensor in model.state_dict().items()}
