"""Checkpoint files: validation, reads by rows, writes by tensors, and memory use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files import weight_files
from meshrl.common.model.files.hf_writer import save_model, state_to_hf
from meshrl.common.model.files.initial_parameters import (
    ParameterSource,
    PretrainedParameters,
    RandomParameters,
    fill_normal_rows,
    load_model,
)
from meshrl.common.model.files.safetensors_writer import SafetensorsWriter
from meshrl.common.model.network.decoder import Decoder, DecoderLayer
from tests.load import scaled

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=16,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=12,
)
NAME = "model.layers.1.mlp.down_proj.weight"
TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor(7, dtype=torch.int64),
    "narrow": torch.arange(3, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
    "c": torch.arange(6, dtype=torch.float32).reshape(3, 2).T,
}
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
# Every second of many blocks is freed, with the heap settings of a role process.
PROGRAM = """
import sys
import torch
from meshrl.common.model.files.tensor_storages import set_mmap_threshold

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

if sys.argv[1] == "returned":
    set_mmap_threshold(1 << 20)
blocks = [torch.ones(1 << 20) for _ in range(32)]
before = resident()
del blocks[::2]
print((before - resident()) >> 20)
"""
HEAP_ENV = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def make_config(architecture: str) -> ModelConfig:
    sparse: dict[str, Any] = {"num_experts": 2, "num_experts_per_token": 1, "expert_ffn_size": 6}
    return replace(
        CONFIG,
        architecture=architecture,
        qk_norm=architecture.startswith("qwen3"),
        attention_bias=architecture in ("qwen2", "qwen2_moe"),
        shared_expert_ffn_size=10 * (architecture == "qwen2_moe"),
        **(sparse if ARCHITECTURES[architecture].experts_module else {}),
    )


@pytest.mark.parametrize(
    "config",
    [
        *map(make_config, ARCHITECTURES),
        replace(CONFIG, tie_embeddings=True, attention_bias=True),
        replace(make_config("qwen3_moe"), dense_layers=(0,)),
    ],
    ids=lambda config: config.architecture,
)
def test_expected_tensors_are_those_of_the_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        state = state_to_hf(config, Decoder(config).state_dict())
    assert dict(weight_files.iter_expected_tensors(config)) == {
        n: tuple(t.shape) for n, t in state.items()
    }


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model in several files and return its directory."""
    directory = tmp_path_factory.mktemp("model")
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter)
    save_model(directory, CONFIG, decoder.state_dict(), shard_bytes=1500)
    return directory


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def check_and_catch(model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        weight_files.check_weights(model, CONFIG)
    assert str(model) in str(caught.value) and caught.value.fix
    return str(caught.value)


def replace_tensor(model: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace one tensor in its file, or remove it."""
    index = json.loads((model / weight_files.INDEX_FILE).read_text())["weight_map"]
    file = model / index[name]
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)


def test_complete_model_is_accepted_in_one_or_several_files(model: Path) -> None:
    assert len(shards(model)) > 2
    weight_files.check_weights(model, CONFIG)
    single = {name: tensor for file in shards(model) for name, tensor in load_file(file).items()}
    save_file(single, model / weight_files.SINGLE_FILE)
    (model / weight_files.INDEX_FILE).unlink()
    weight_files.check_weights(model, CONFIG)


def test_truncated_file_is_named_with_its_lengths(model: Path) -> None:
    file = shards(model)[1]
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    message = check_and_catch(model)
    assert file.name in message and f"{len(content) - 10} of {len(content)} bytes" in message
    for length in (100, 8, 3, 0):  # within the header, before it, within its length
        file.write_bytes(content[:length])
        assert file.name in check_and_catch(model)
    file.write_bytes(content + b"more")
    assert file.name in check_and_catch(model)


def test_missing_files_of_an_index_are_named(model: Path) -> None:
    first, *_, last = shards(model)
    first.unlink()
    last.unlink()
    message = check_and_catch(model)
    assert "2 of " in message and first.name in message and last.name in message


def test_git_lfs_pointer_is_recognised(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    shards(model)[0].write_text(pointer)
    assert "pointer of Git LFS" in check_and_catch(model) and "git lfs pull" in check_and_catch(
        model
    )
    (model / weight_files.INDEX_FILE).write_text(pointer)
    assert "pointer of Git LFS" in check_and_catch(model)


@pytest.mark.parametrize(
    "content", [b"not safetensors at all", b"\xff" * 64, b"PK\x03\x04" + bytes(60)]
)
def test_invalid_safetensors_file_is_named(model: Path, content: bytes) -> None:
    shards(model)[0].write_bytes(content)
    assert shards(model)[0].name in check_and_catch(model)


def test_invalid_index_is_named(model: Path) -> None:
    for content in ("{", "[]", '{"weight_map": 3}', "{}"):
        (model / weight_files.INDEX_FILE).write_text(content)
        assert "index" in check_and_catch(model)


def test_tensors_need_their_shape_and_a_trainable_dtype(model: Path) -> None:
    replace_tensor(model, NAME, torch.zeros(8, 11))
    assert f"{NAME} is [8, 11], not [8, 12]" in check_and_catch(model)
    replace_tensor(model, NAME, torch.zeros(8, 12, dtype=torch.int8))
    assert f"{NAME} is of type I8" in check_and_catch(model) and "quantized" in check_and_catch(
        model
    )
    replace_tensor(model, NAME, torch.zeros(8, 12).to(torch.float8_e4m3fn))
    assert "F8_E4M3" in check_and_catch(model)
    replace_tensor(model, NAME, torch.zeros(8, 12, dtype=torch.bfloat16))
    weight_files.check_weights(model, CONFIG)
    replace_tensor(model, NAME, None)
    assert f"tensor {NAME} is missing" in check_and_catch(model)


def add_tensor(model: Path, name: str) -> None:
    """Add a tensor to the first file."""
    file = shards(model)[0]
    save_file(load_file(file) | {name: torch.ones(4)}, file)


def test_unused_tensor_is_rejected(model: Path) -> None:
    add_tensor(model, "model.layers.0.self_attn.rotary_emb.inv_freq")
    add_tensor(model, "model.embeddings.position_ids")
    weight_files.check_weights(model, CONFIG)
    content = shards(model)[0].read_bytes()
    for name in (
        f"model.layers.{CONFIG.num_layers}.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "mtp.fc.weight",
    ):
        add_tensor(model, name)
        assert f"tensor {name} belongs to no part of the {CONFIG.architecture}" in check_and_catch(
            model
        )
        add_tensor(model, "score.weight")
        assert "and 1 more belong to no part" in check_and_catch(model)
        shards(model)[0].write_bytes(content)


def test_directory_of_another_format_is_named(tmp_path: Path) -> None:
    assert "neither model.safetensors nor" in check_and_catch(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert "pickles of PyTorch" in check_and_catch(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_non_finite_weight_is_found_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    weights = torch.tensor([[0.0, -largest], [torch.finfo(dtype).tiny, largest]], dtype=dtype)
    file = tmp_path / "model.safetensors"
    save_file({"odd": torch.ones(3, dtype=torch.int8), NAME: weights}, file)
    weight_files.check_finite(tmp_path)
    for number in (float("nan"), float("inf"), -float("inf")):
        weights[1, 0] = number
        save_file({"odd": torch.ones(3, dtype=torch.int8), NAME: weights}, file)
        with pytest.raises(ConfigError, match=f"tensor {NAME} has 1 of 4 weights"):
            weight_files.check_finite(tmp_path)


def test_written_bytes_match_the_safetensors_library(tmp_path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    file = SafetensorsWriter(tmp_path / "ours", {name: t.to("meta") for name, t in TENSORS.items()})
    for name, tensor in reversed(TENSORS.items()):
        assert not (tmp_path / "ours").exists()
        file.write_tensor(name, tensor)
    file.finish()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_file_does_not_appear_before_all_tensors_are_written(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "ours", TENSORS)
    file.write_tensor("a", TENSORS["a"])
    with pytest.raises(ValueError, match="b was not written"):
        file.finish()
    assert not (tmp_path / "ours").exists()


def make_model(config: ModelConfig) -> Decoder:
    model = Decoder(config)
    generator = torch.Generator()
    generator.manual_seed(11)
    model.initialise(generator)
    return model


def read_rank_rows(
    model: Decoder, source: ParameterSource, rank: int, ranks: int
) -> dict[str, Any]:
    """Return the rows of each parameter that one of several ranks reads."""
    rows_by_name = {}
    for name, parameter in model.named_parameters():
        total = parameter.shape[0]
        rows_per_rank = -(-total // ranks)
        first = min(rank * rows_per_rank, total)
        rows = torch.full(
            (min(first + rows_per_rank, total) - first, *parameter.shape[1:]), torch.nan
        )
        source.fill_rows(name, parameter.shape, first, rows)
        rows_by_name[name] = rows
    return rows_by_name


def assert_rows_form_model(model: Decoder, parts: list[dict[str, Any]]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(torch.cat([part[name] for part in parts]), parameter.detach()), name


@pytest.mark.parametrize("shape", [(7, 3), (5, 3), (4, 4), (16,), (33, 31), (40, 64), (1, 17)])
@pytest.mark.parametrize("block", [16, 64, 1 << 22])
def test_rows_are_initialised_as_in_the_whole_tensor(shape: tuple[int, ...], block: int) -> None:
    whole_generator, rows_generator = torch.Generator(), torch.Generator()
    whole_generator.manual_seed(3)
    rows_generator.manual_seed(3)
    expected = torch.empty(shape).normal_(std=0.7, generator=whole_generator)
    for first in range(shape[0]):
        rows_generator.manual_seed(3)
        rows = torch.empty(shape[0] - first, *shape[1:])
        fill_normal_rows(torch.Size(shape), 0.7, rows_generator, first, rows, block)
        assert torch.equal(rows, expected[first:])
    # the next parameter is right as well
    assert torch.equal(whole_generator.get_state(), rows_generator.get_state())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_rows_of_a_new_model_form_the_whole_model(kind: str, ranks: int) -> None:
    config = ModelConfig.from_hf(MODELS[kind])
    model = make_model(config)
    assert_rows_form_model(
        model, [read_rank_rows(model, RandomParameters(config, 11), r, ranks) for r in range(ranks)]
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_rows_of_a_directory_form_its_model(kind: str, shard_bytes: int, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(MODELS[kind])
    save_model(tmp_path, config, make_model(config).state_dict(), shard_bytes=shard_bytes)
    config, model = load_model(tmp_path)
    source = PretrainedParameters(tmp_path, config)
    assert_rows_form_model(model, [read_rank_rows(model, source, rank, 3) for rank in range(3)])


def test_non_finite_weights_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(DENSE)
    model = make_model(config)
    with torch.no_grad():
        cast(DecoderLayer, model.layers[1]).down[20, 3] = torch.nan
    save_model(tmp_path, config, model.state_dict())
    source = PretrainedParameters(tmp_path, config)
    assert read_rank_rows(model, source, 0, 2)  # this rank's rows are finite
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight has 1 of"):
        read_rank_rows(model, source, 1, 2)
    other = ModelConfig.from_hf(DENSE | {"intermediate_size": 48})
    with pytest.raises(ConfigError, match=r"is \[40, 24\], not \[48, 24\]"):
        PretrainedParameters(tmp_path, other)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="the model cannot be read: OSError"):
        read_rank_rows(model, source, 0, 2)


@pytest.mark.deep
@pytest.mark.parametrize(("mode", "freed_mib"), [("kept", 0), ("returned", 64)])
def test_large_blocks_are_returned_if_configured(mode: str, freed_mib: int) -> None:
    command = [sys.executable, "-c", PROGRAM, mode]
    environment = os.environ | HEAP_ENV
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=scaled(120.0)
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == pytest.approx(freed_mib, abs=8)
