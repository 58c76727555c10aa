"""What a model lacks in its files, and files that are not whole, are found from their headers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from common.model.formats.architectures import ARCHITECTURES
from common.model.formats.checkpoint import INDEX
from common.model.formats.tensors import expected, require
from common.model.hf import save_model, state_to_hf

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=16,
    hidden_size=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn_size=12,
)
NAME = "model.layers.1.mlp.down_proj.weight"


def of(architecture: str) -> ModelConfig:
    sparse = {"experts": 2, "experts_per_token": 1, "expert_ffn_size": 6}
    return replace(
        CONFIG,
        architecture=architecture,
        qk_norm=architecture.startswith("qwen3"),
        attention_bias=architecture.startswith("qwen2"),
        shared_ffn_size=10 if architecture == "qwen2_moe" else 0,
        **(sparse if ARCHITECTURES[architecture].experts else {}),
    )


@pytest.mark.parametrize(
    "config",
    [
        *map(of, ARCHITECTURES),
        replace(CONFIG, tie_embeddings=True, attention_bias=True),
        replace(of("qwen3_moe"), dense_layers=(0,)),
    ],
    ids=lambda config: config.architecture,
)
def test_the_tensors_that_are_expected_are_those_that_a_model_has(config: ModelConfig) -> None:
    with torch.device("meta"):
        state = state_to_hf(config, Decoder(config).state_dict())
    assert dict(expected(config)) == {n: tuple(t.shape) for n, t in state.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    directory = tmp_path_factory.mktemp("model")
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter)
    save_model(directory, CONFIG, decoder.state_dict(), shard_bytes=1500)
    return directory


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def refusal(model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        require(model, CONFIG)
    assert str(model) in str(caught.value) and caught.value.fix
    return str(caught.value)


def change(model: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Puts another tensor, or none, in place of one."""
    index = json.loads((model / INDEX).read_text())["weight_map"]
    file = model / index[name]
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)


def test_a_whole_model_is_accepted(model: Path) -> None:
    assert len(shards(model)) > 2
    require(model, CONFIG)
    change(model, NAME, torch.zeros(8, 12, dtype=torch.bfloat16))
    require(model, CONFIG)


def test_a_download_that_was_cut_off_anywhere_is_named(model: Path) -> None:
    file = shards(model)[1]
    whole = file.read_bytes()
    for length in (len(whole) - 10, 100, 8, 3, 0):  # tensors, the header, its length
        file.write_bytes(whole[:length])
        assert file.name in refusal(model)
    file.write_bytes(whole + b"more")
    assert file.name in refusal(model)


def test_tensors_of_another_length_than_their_shape_are_told(model: Path) -> None:
    file = shards(model)[0]
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"[16,8]", b"[16,4]", 1))
    assert "another length there than its shape" in refusal(model)


def test_it_is_said_how_many_files_of_an_index_are_missing(model: Path) -> None:
    for file in shards(model)[1:]:
        file.unlink()
    assert "the index names it; so are" in refusal(model)


def test_a_pointer_of_git_lfs_is_named_as_one(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    shards(model)[0].write_text(pointer)
    assert "pointer of Git LFS" in (said := refusal(model)) and "git lfs pull" in said
    (model / INDEX).write_text(pointer)
    assert "pointer of Git LFS" in refusal(model)


def test_every_tensor_is_there_in_its_shape(model: Path) -> None:
    change(model, NAME, torch.zeros(8, 11))
    assert f"{NAME} is [8, 11], not [8, 12]" in refusal(model)
    change(model, NAME, None)
    assert f"tensor {NAME} is missing" in refusal(model)
