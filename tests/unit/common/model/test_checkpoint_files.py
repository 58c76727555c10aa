"""Weights that are not whole are found from the headers of their files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files import checkpoint_files
from meshrl.common.model.files.hf import save_model, state_to_hf
from meshrl.common.model.network.decoder import Decoder

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
    sparse: dict[str, Any] = {"experts": 2, "experts_per_token": 1, "expert_ffn_size": 6}
    return replace(
        CONFIG,
        architecture=architecture,
        qk_norm=architecture.startswith("qwen3"),
        attention_bias=architecture in ("qwen2", "qwen2_moe"),
        shared_ffn_size=10 * (architecture == "qwen2_moe"),
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
    assert dict(checkpoint_files.expected(config)) == {n: tuple(t.shape) for n, t in state.items()}


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
        checkpoint_files.check(model, CONFIG)
    assert str(model) in str(caught.value) and caught.value.fix
    return str(caught.value)


def change(model: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Puts another tensor, or none, in place of one."""
    index = json.loads((model / checkpoint_files.INDEX).read_text())["weight_map"]
    file = model / index[name]
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)


def test_a_whole_model_is_accepted_in_several_files_and_in_one(model: Path) -> None:
    assert len(shards(model)) > 2
    checkpoint_files.check(model, CONFIG)
    single = {name: tensor for file in shards(model) for name, tensor in load_file(file).items()}
    save_file(single, model / checkpoint_files.SINGLE)
    (model / checkpoint_files.INDEX).unlink()
    checkpoint_files.check(model, CONFIG)


def test_a_download_that_was_cut_off_is_named_with_its_lengths(model: Path) -> None:
    file = shards(model)[1]
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    said = refusal(model)
    assert file.name in said and f"{len(whole) - 10} bytes are there of {len(whole)}" in said
    for length in (100, 8, 3, 0):  # within the header, before it, within its length
        file.write_bytes(whole[:length])
        assert file.name in refusal(model)
    file.write_bytes(whole + b"more")
    assert file.name in refusal(model)


def test_files_of_an_index_that_are_missing_are_named(model: Path) -> None:
    first, *_, last = shards(model)
    first.unlink()
    last.unlink()
    said = refusal(model)
    assert "2 of " in said and first.name in said and last.name in said


def test_a_pointer_of_git_lfs_is_named_as_one(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    shards(model)[0].write_text(pointer)
    assert "pointer of Git LFS" in refusal(model) and "git lfs pull" in refusal(model)
    (model / checkpoint_files.INDEX).write_text(pointer)
    assert "pointer of Git LFS" in refusal(model)


@pytest.mark.parametrize(
    "content", [b"not safetensors at all", b"\xff" * 64, b"PK\x03\x04" + bytes(60)]
)
def test_what_is_no_safetensors_file_is_named(model: Path, content: bytes) -> None:
    shards(model)[0].write_bytes(content)
    assert shards(model)[0].name in refusal(model)


def test_an_index_that_is_none_is_named(model: Path) -> None:
    for content in ("{", "[]", '{"weight_map": 3}', "{}"):
        (model / checkpoint_files.INDEX).write_text(content)
        assert "index" in refusal(model)


def test_tensors_are_there_in_their_shape_and_in_a_type_that_is_trained(model: Path) -> None:
    change(model, NAME, torch.zeros(8, 11))
    assert f"{NAME} is [8, 11], not [8, 12]" in refusal(model)
    change(model, NAME, torch.zeros(8, 12, dtype=torch.int8))
    assert f"{NAME} is of type I8" in refusal(model) and "quantized" in refusal(model)
    change(model, NAME, torch.zeros(8, 12).to(torch.float8_e4m3fn))
    assert "F8_E4M3" in refusal(model)
    change(model, NAME, torch.zeros(8, 12, dtype=torch.bfloat16))
    checkpoint_files.check(model, CONFIG)
    change(model, NAME, None)
    assert f"tensor {NAME} is missing" in refusal(model)


def add(model: Path, name: str) -> None:
    """Puts a further tensor into the first file."""
    file = shards(model)[0]
    save_file(load_file(file) | {name: torch.ones(4)}, file)


def test_a_tensor_that_no_part_of_the_model_uses_is_refused(model: Path) -> None:
    add(model, "model.layers.0.self_attn.rotary_emb.inv_freq")
    add(model, "model.embeddings.position_ids")
    checkpoint_files.check(model, CONFIG)
    whole = shards(model)[0].read_bytes()
    for name in (
        f"model.layers.{CONFIG.layers}.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "mtp.fc.weight",
    ):
        add(model, name)
        assert f"tensor {name} belongs to no part of the {CONFIG.architecture}" in refusal(model)
        add(model, "score.weight")
        assert "and 1 more belong to no part" in refusal(model)
        shards(model)[0].write_bytes(whole)


def test_a_directory_of_another_format_is_named_as_such(tmp_path: Path) -> None:
    assert "neither model.safetensors nor" in refusal(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert "pickles of PyTorch" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_that_is_no_number_is_found_in_every_type(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    weights = torch.tensor([[0.0, -largest], [torch.finfo(dtype).tiny, largest]], dtype=dtype)
    file = tmp_path / "model.safetensors"
    save_file({"odd": torch.ones(3, dtype=torch.int8), NAME: weights}, file)
    checkpoint_files.check_finite(tmp_path)
    for number in (float("nan"), float("inf"), -float("inf")):
        weights[1, 0] = number
        save_file({"odd": torch.ones(3, dtype=torch.int8), NAME: weights}, file)
        with pytest.raises(ConfigError, match=f"tensor {NAME} has 1 of 4 weights"):
            checkpoint_files.check_finite(tmp_path)
