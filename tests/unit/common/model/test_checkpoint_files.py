"""Files of weights: whole, read by rows, written by tensors, and their memory."""

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
# Every second of many blocks is freed, while the heap is kept as a role process has it.
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
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def of(architecture: str) -> ModelConfig:
    sparse: dict[str, Any] = {"experts": 2, "experts_per_token": 1, "expert_ffn_size": 6}
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
        *map(of, ARCHITECTURES),
        replace(CONFIG, tie_embeddings=True, attention_bias=True),
        replace(of("qwen3_moe"), dense_layers=(0,)),
    ],
    ids=lambda config: config.architecture,
)
def test_the_tensors_that_are_expected_are_those_that_a_model_has(config: ModelConfig) -> None:
    with torch.device("meta"):
        state = state_to_hf(config, Decoder(config).state_dict())
    assert dict(weight_files.iter_expected_tensors(config)) == {
        n: tuple(t.shape) for n, t in state.items()
    }


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
        weight_files.check_weights(model, CONFIG)
    assert str(model) in str(caught.value) and caught.value.fix
    return str(caught.value)


def change(model: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Puts another tensor, or none, in place of one."""
    index = json.loads((model / weight_files.INDEX_FILE).read_text())["weight_map"]
    file = model / index[name]
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)


def test_a_whole_model_is_accepted_in_several_files_and_in_one(model: Path) -> None:
    assert len(shards(model)) > 2
    weight_files.check_weights(model, CONFIG)
    single = {name: tensor for file in shards(model) for name, tensor in load_file(file).items()}
    save_file(single, model / weight_files.SINGLE_FILE)
    (model / weight_files.INDEX_FILE).unlink()
    weight_files.check_weights(model, CONFIG)


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
    (model / weight_files.INDEX_FILE).write_text(pointer)
    assert "pointer of Git LFS" in refusal(model)


@pytest.mark.parametrize(
    "content", [b"not safetensors at all", b"\xff" * 64, b"PK\x03\x04" + bytes(60)]
)
def test_what_is_no_safetensors_file_is_named(model: Path, content: bytes) -> None:
    shards(model)[0].write_bytes(content)
    assert shards(model)[0].name in refusal(model)


def test_an_index_that_is_none_is_named(model: Path) -> None:
    for content in ("{", "[]", '{"weight_map": 3}', "{}"):
        (model / weight_files.INDEX_FILE).write_text(content)
        assert "index" in refusal(model)


def test_tensors_are_there_in_their_shape_and_in_a_type_that_is_trained(model: Path) -> None:
    change(model, NAME, torch.zeros(8, 11))
    assert f"{NAME} is [8, 11], not [8, 12]" in refusal(model)
    change(model, NAME, torch.zeros(8, 12, dtype=torch.int8))
    assert f"{NAME} is of type I8" in refusal(model) and "quantized" in refusal(model)
    change(model, NAME, torch.zeros(8, 12).to(torch.float8_e4m3fn))
    assert "F8_E4M3" in refusal(model)
    change(model, NAME, torch.zeros(8, 12, dtype=torch.bfloat16))
    weight_files.check_weights(model, CONFIG)
    change(model, NAME, None)
    assert f"tensor {NAME} is missing" in refusal(model)


def add(model: Path, name: str) -> None:
    """Puts a further tensor into the first file."""
    file = shards(model)[0]
    save_file(load_file(file) | {name: torch.ones(4)}, file)


def test_a_tensor_that_no_part_of_the_model_uses_is_refused(model: Path) -> None:
    add(model, "model.layers.0.self_attn.rotary_emb.inv_freq")
    add(model, "model.embeddings.position_ids")
    weight_files.check_weights(model, CONFIG)
    whole = shards(model)[0].read_bytes()
    for name in (
        f"model.layers.{CONFIG.num_layers}.input_layernorm.weight",
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
    weight_files.check_finite(tmp_path)
    for number in (float("nan"), float("inf"), -float("inf")):
        weights[1, 0] = number
        save_file({"odd": torch.ones(3, dtype=torch.int8), NAME: weights}, file)
        with pytest.raises(ConfigError, match=f"tensor {NAME} has 1 of 4 weights"):
            weight_files.check_finite(tmp_path)


def test_its_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    whole = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(whole, tmp_path / "theirs", metadata={"format": "pt"})
    file = SafetensorsWriter(tmp_path / "ours", {name: t.to("meta") for name, t in TENSORS.items()})
    for name, tensor in reversed(TENSORS.items()):
        assert not (tmp_path / "ours").exists()
        file.write_tensor(name, tensor)
    file.finish()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_it_does_not_appear_without_all_of_them(tmp_path: Path) -> None:
    file = SafetensorsWriter(tmp_path / "ours", TENSORS)
    file.write_tensor("a", TENSORS["a"])
    with pytest.raises(ValueError, match="b was not written"):
        file.finish()
    assert not (tmp_path / "ours").exists()


def drawn_whole(config: ModelConfig) -> Decoder:
    model = Decoder(config)
    generator = torch.Generator()
    generator.manual_seed(11)
    model.initialise(generator)
    return model


def in_rows(model: Decoder, beginning: ParameterSource, rank: int, ranks: int) -> dict[str, Any]:
    """What one of several ranks gets of each parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        total = parameter.shape[0]
        each = -(-total // ranks)
        first = min(rank * each, total)
        into = torch.full((min(first + each, total) - first, *parameter.shape[1:]), torch.nan)
        beginning.fill_rows(name, parameter.shape, first, into)
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
        fill_normal_rows(torch.Size(shape), 0.7, other, first, into, block)
        assert torch.equal(into, whole[first:])
    assert torch.equal(one.get_state(), other.get_state())  # the next parameter is right, too


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_fresh_model_in_rows_is_the_whole_one(kind: str, ranks: int) -> None:
    config = ModelConfig.from_hf(MODELS[kind])
    model = drawn_whole(config)
    assert_whole(
        model, [in_rows(model, RandomParameters(config, 11), r, ranks) for r in range(ranks)]
    )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_rows_of_a_directory_are_those_of_the_model_that_it_holds(
    kind: str, shard_bytes: int, tmp_path: Path
) -> None:
    config = ModelConfig.from_hf(MODELS[kind])
    save_model(tmp_path, config, drawn_whole(config).state_dict(), shard_bytes=shard_bytes)
    config, model = load_model(tmp_path)
    beginning = PretrainedParameters(tmp_path, config)
    assert_whole(model, [in_rows(model, beginning, rank, 3) for rank in range(3)])


def test_weights_that_are_none_and_tensors_of_another_shape_are_named(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(DENSE)
    model = drawn_whole(config)
    with torch.no_grad():
        cast(DecoderLayer, model.layers[1]).down[20, 3] = torch.nan
    save_model(tmp_path, config, model.state_dict())
    beginning = PretrainedParameters(tmp_path, config)
    assert in_rows(model, beginning, 0, 2)  # whose rows are well
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj\.weight has 1 of"):
        in_rows(model, beginning, 1, 2)
    other = ModelConfig.from_hf(DENSE | {"intermediate_size": 48})
    with pytest.raises(ConfigError, match=r"is \[40, 24\], not \[48, 24\]"):
        PretrainedParameters(tmp_path, other)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="the model cannot be read: OSError"):
        in_rows(model, beginning, 0, 2)


@pytest.mark.deep
@pytest.mark.parametrize(("how", "freed_mib"), [("kept", 0), ("returned", 64)])
def test_large_blocks_go_back_where_that_is_wished(how: str, freed_mib: int) -> None:
    words = [sys.executable, "-c", PROGRAM, how]
    environment = os.environ | KEPT
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=scaled(120.0)
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == pytest.approx(freed_mib, abs=8)
