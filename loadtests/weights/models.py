"""Models that engines of load tests have, by name, and their weights, drawn from a seed."""

from __future__ import annotations

from loadtests.measuring import shapes
from loadtests.weights.contents import Tensors
from meshrl.common.model.architecture.config import ModelConfig


def _model(hidden: int, layers: int, ffn: int, vocabulary: int = 4096) -> ModelConfig:
    heads = (hidden // 64, max(1, hidden // 128))
    return shapes.shape(hidden, layers, ffn, vocabulary, heads, tie_embeddings=True)


MODELS = {
    "tiny": _model(64, 2, 128, 64),  # 0.3 MiB
    "little": _model(256, 2, 640, 4096),  # 8 MiB: eight chunks or more
    "small": _model(512, 4, 1536),  # 60 MiB in float32
    "medium": _model(1024, 6, 2816),  # 300 MiB
}


def drawn(name: str, seed: int) -> Tensors:
    return shapes.drawn(MODELS[name], seed)
