"""Whether a directory has every tensor that its model needs, told from the headers of its files:
nothing is loaded, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.formats.architectures import ARCHITECTURES
from common.model.formats.checkpoint import EMBEDDING, UNEMBEDDING, stored_tensors
from common.model.projections import ATTENTION, projections

_SAME_MODEL = "check that config.json and the weights are of the same model"


def require(directory: Path, config: ModelConfig) -> None:
    """ConfigError, with the file, unless every tensor of the model lies there in its shape."""
    found = stored_tensors(directory)
    for name, shape in expected(config):
        alone = name == EMBEDDING and config.tie_embeddings and name not in found
        stored = found.get(UNEMBEDDING if alone else name)
        if stored is None:
            raise ConfigError(
                f"tensor {name} is missing",
                where=str(directory),
                fix=f"{_SAME_MODEL}, and that no file of it is missing",
            )
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {name} is {list(stored.shape)}, not {list(shape)}",
                where=str(stored.file),
                fix=_SAME_MODEL,
            )


def expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor that is read of a model's files, by Hugging Face's name, with its shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield EMBEDDING, (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield UNEMBEDDING, (vocab, hidden)
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        sparse = index in config.sparse_layers
        for place in projections(config).values():
            if sparse and place.fused not in ATTENTION:
                continue
            yield f"{prefix}{place.module}.weight", (place.rows, place.columns)
            biased = config.attention_bias if place.fused == "qkv" else config.output_bias
            if place.fused in ATTENTION and biased:
                yield f"{prefix}{place.module}.bias", (place.rows,)
        if config.qk_norm:
            yield f"{prefix}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (config.head_dim,)
        if sparse:
            yield from _experts(config, prefix)


def _experts(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    architecture = ARCHITECTURES[config.architecture]
    block, hidden = f"{prefix}{architecture.experts}", config.hidden_size
    yield f"{block}.gate.weight", (config.experts, hidden)
    for expert in range(config.experts):
        shapes = _gated(config.expert_ffn_size, hidden)
        for name, shape in zip(architecture.parts, shapes, strict=True):
            yield f"{block}.experts.{expert}.{name}.weight", shape
    if config.shared_ffn_size:
        shapes = _gated(config.shared_ffn_size, hidden)
        for name, shape in zip(("gate", "up", "down"), shapes, strict=True):
            yield f"{block}.shared_expert.{name}_proj.weight", shape
        yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _gated(wide: int, hidden: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The shapes of gate, up and down."""
    return (wide, hidden), (wide, hidden), (hidden, wide)
