"""Directories that hold no model that can be trained say so, by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.checkpoint import load_config
from meshrl.common.model.files.hf import save_model
from meshrl.common.model.files.rows import load_model
from meshrl.common.model.network.decoder import Decoder

TINY = ModelConfig(
    architecture="llama",
    vocab_size=20,
    hidden_size=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn_size=24,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model."""
    return written(tmp_path / "model", TINY)


def written(directory: Path, config: ModelConfig, shard_bytes: int = 10**9) -> Path:
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(0))
    save_model(directory, config, decoder.state_dict(), shard_bytes=shard_bytes)
    return directory


def change(place: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(place / "model.safetensors")
    save_file(tensors | {name: tensor}, place / "model.safetensors")


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32]
)
def test_weights_of_eight_bits_or_integers_are_refused_from_their_headers(
    place: Path, dtype: torch.dtype
) -> None:
    change(place, DOWN, torch.ones(16, 24).to(dtype))
    with pytest.raises(ConfigError, match=rf"quantized: tensor {DOWN} is of type [FIU]"):
        load_config(place)


def test_quantization_that_lies_beside_is_refused(place: Path) -> None:
    (place / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(ConfigError, match=r"quantized: there is a quantize_config\.json"):
        load_config(place)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_refused_with_their_tensor(
    place: Path, wrong: float, dtype: torch.dtype
) -> None:
    broken = torch.ones(16, 24, dtype=dtype)
    broken[3, 4] = wrong
    change(place, DOWN, broken)
    with pytest.raises(ConfigError, match=rf"tensor {DOWN} has 1 of 384 weights"):
        load_model(place)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model-Q4_K_M.gguf", "GGUF of llama.cpp"),
        ("pytorch_model.bin", "pickles of PyTorch"),
        ("pytorch_model-00001-of-00002.bin", "pickles of PyTorch"),
        ("consolidated.00.pth", "authors' own format"),
        ("adapter_config.json", "adapters without the model"),
    ],
)
@pytest.mark.parametrize("described", [True, False])
def test_weights_of_another_format_are_named(
    place: Path, file: str, says: str, described: bool
) -> None:
    (place / "model.safetensors").unlink()
    if not described:
        (place / "config.json").unlink()
    (place / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=says):
        load_config(place)


def test_a_file_that_is_cut_off_is_told_from_its_header(place: Path) -> None:
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"not whole: \d+ bytes are there of \d+"):
        load_config(place)
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match="not whole"):
        load_config(place)


def test_a_description_may_lie_alone_until_weights_are_wanted(place: Path) -> None:
    (place / "model.safetensors").unlink()
    assert load_config(place) == TINY
    with pytest.raises(ConfigError, match="neither model"):
        load_model(place)


def test_a_shard_that_the_index_names_and_is_not_there_is_named(tmp_path: Path) -> None:
    place = written(tmp_path / "model", TINY, shard_bytes=2000)
    lost = sorted(place.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=f"files of weights are missing: {lost.name}"):
        load_config(place)


def test_one_file_is_read_before_the_shards_of_an_index(tmp_path: Path) -> None:
    place = written(tmp_path / "model", TINY, shard_bytes=2000)
    other = written(tmp_path / "other", TINY)
    change(other, "model.norm.weight", torch.full((16,), 3.0))
    (other / "model.safetensors").rename(place / "model.safetensors")
    assert load_model(place)[1].final_norm.mean() == 3.0


def test_an_unembedding_of_its_own_is_taken_though_the_description_ties_it(tmp_path: Path) -> None:
    place = written(tmp_path / "model", TINY)
    described = json.loads((place / "config.json").read_text())
    described["tie_word_embeddings"] = True
    (place / "config.json").write_text(json.dumps(described))
    config, decoder = load_model(place)
    assert not config.tie_embeddings and not torch.equal(decoder.unembedding, decoder.embedding)
    assert load_config(place) == config
    save_model(tmp_path / "again", config, decoder.state_dict())
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is False


def test_an_unembedding_of_the_same_numbers_is_tied(tmp_path: Path) -> None:
    place = written(tmp_path / "model", replace(TINY, tie_embeddings=True))
    embedding = load_file(place / "model.safetensors")["model.embed_tokens.weight"]
    change(place, "lm_head.weight", embedding)
    config, _ = load_model(place)
    assert config.tie_embeddings


def test_a_tied_embedding_may_lie_under_the_name_of_the_unembedding(tmp_path: Path) -> None:
    place = written(tmp_path / "model", replace(TINY, tie_embeddings=True))
    tensors = load_file(place / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": embedding}, place / "model.safetensors")
    assert torch.equal(load_model(place)[1].embedding, embedding)
