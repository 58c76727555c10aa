"""Rows that are drawn or read alone are those of the whole model, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf import save_model
from meshrl.common.model.files.rows import Beginning, Drawn, StoredRows, load_model, normal_rows
from meshrl.common.model.network.decoder import Decoder, Layer

DENSE = {
    "model_type": "qwen2",  # biases of queries, keys and values
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MIXTURE = DENSE | {
    "model_type": "qwen2_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
NORMED = DENSE | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False}
MODELS = {"dense": DENSE, "mixture": MIXTURE, "normed": NORMED}


def drawn_whole(config: ModelConfig) -> Decoder:
    model = Decoder(config)
    generator = torch.Generator()
    generator.manual_seed(11)
    model.initialise(generator)
    return model


def in_rows(model: Decoder, beginning: Beginning, rank: int, ranks: int) -> dict[str, Any]:
    """What one of several ranks gets of each parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        total = parameter.shape[0]
        each = -(-total // ranks)
        first = min(rank * each, total)
        into = torch.full((min(first + each, total) - first, *parameter.shape[1:]), torch.nan)
        beginning.fill(name, parameter.shape, first, into)
        found[name] = into
    return found


def assert_whole(model: Decoder, parts: list[dict[str, Any]]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(torch.cat([part[name] for part in parts]), parameter.detach()), name


@pytest.mark.parametrize("shape", [(7, 3), (5, 3), (4, 4), (16,), (33, 31), (40, 64), (1, 17)])
@pytest.mark.parametrize("block", [16, 64, 1 << 22])
def test_blocks_are_drawn_as_the_whole_is(shape: tuple[int, ...], block: int) -> None:
    one, other = torch.Generator(), torch.Generator()
    one.manual_seed(3)
    other.manual_seed(3)
    whole = torch.empty(shape).normal_(std=0.7, generator=one)
    for first in range(shape[0]):
        other.manual_seed(3)
        into = torch.empty(shape[0] - first, *shape[1:])
        normal_rows(torch.Size(shape), 0.7, other, first, into, block)
        assert torch.equal(into, whole[first:])
    assert torch.equal(one.get_state(), other.get_state())  # the next parameter is right, too


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_fresh_model_in_rows_is_the_whole_one(kind: str, ranks: int) -> None:
    config = ModelConfig.from_hf(MODELS[kind])
    model = drawn_whole(config)
    assert_whole(model, [in_rows(model, Drawn(config, 11), r, ranks) for r in range(ranks)])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_rows_of_a_directory_are_those_of_the_model_that_it_holds(
    kind: str, shard_bytes: int, tmp_path: Path
) -> None:
    config = ModelConfig.from_hf(MODELS[kind])
    save_model(tmp_path, config, drawn_whole(config).state_dict(), shard_bytes=shard_bytes)
    config, model = load_model(tmp_path)
    beginning = StoredRows(tmp_path, config)
    assert_whole(model, [in_rows(model, beginning, rank, 3) for rank in range(3)])


def test_weights_that_are_none_and_tensors_of_another_shape_are_named(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(DENSE)
    model = drawn_whole(config)
    with torch.no_grad():
        cast(Layer, model.layers[1]).down[20, 3] = torch.nan
    save_model(tmp_path, config, model.state_dict())
    beginning = StoredRows(tmp_path, config)
    assert in_rows(model, beginning, 0, 2)  # whose rows are well
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight has 1 of"):
        in_rows(model, beginning, 1, 2)
    other = ModelConfig.from_hf(DENSE | {"intermediate_size": 48})
    with pytest.raises(ConfigError, match=r"is \[40, 24\], not \[48, 24\]"):
        StoredRows(tmp_path, other)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="the model cannot be read: OSError"):
        in_rows(model, beginning, 0, 2)
