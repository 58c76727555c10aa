"""Configurations of models, and directories that hold none that can be trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.files.model_directory import load_config
from meshrl.common.model.network.decoder import Decoder

pytestmark = pytest.mark.group("transformers")  # which one worker imports for all
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "intermediate_size": 96,
}
TINY = ModelConfig(
    architecture="llama",
    vocab_size=20,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=24,
)


def of(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": architecture} | SIZES | more)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_is_absent_has_the_value_that_transformers_gives_it(architecture: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(architecture, **SIZES).to_dict()
    theirs |= theirs.pop("rope_parameters")
    theirs["num_experts"] = theirs.get("num_experts", theirs.get("num_local_experts"))
    for key, value in ARCHITECTURES[architecture].defaults.items():
        # What is None here is made of other keys there; a window that is not used is made none.
        if value is not None and not (key == "sliding_window" and "use_sliding_window" in theirs):
            assert theirs[key] == value, key
    ours = of(architecture)
    assert ours.rope_theta == theirs["rope_theta"] and ours.norm_eps == theirs["rms_norm_eps"]
    assert ours.num_kv_heads == (theirs["num_key_value_heads"] or 32)
    assert ours.head_dim == (theirs.get("head_dim") or 2)
    assert ours.tie_embeddings == theirs["tie_word_embeddings"]
    assert ours.max_positions == theirs["max_position_embeddings"]
    if "no_rope_layers" in theirs:
        assert ours.no_rope_layers == (3,)
    assert bool(ours.sliding_layers) == (architecture == "mistral")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie_embeddings": True, "qk_norm": True, "kv_heads": 4},
        {"attention_bias": True, "head_dim": 6},
        {"attention_bias": True, "architecture": "qwen2"},
        {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 24},
        {"experts": 4, "experts_per_token": 2, "expert_ffn_size": 24, "dense_layers": (1, 2)},
        {"experts": 3, "experts_per_token": 1, "expert_ffn_size": 8, "shared_ffn_size": 40},
    ],
)
def test_its_size_is_that_of_the_decoder_which_it_describes(keys: dict[str, Any]) -> None:
    config = replace(of("llama"), **keys)
    with torch.device("meta"):
        made = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert config.num_parameters == made


@pytest.mark.parametrize(
    ("architecture", "keys", "layers"),
    [
        ("qwen2", {"max_window_layers": 1}, (1, 2, 3)),
        ("qwen2", {"layer_types": ["sliding_attention", *["full_attention"] * 3]}, (0,)),
        ("qwen3", {"max_window_layers": 9}, ()),
        ("qwen2_moe", {"max_window_layers": 3}, (0, 2)),
        ("qwen3_moe", {}, (0, 1, 2, 3)),
        ("smollm3", {}, (3,)),
    ],
)
def test_windows_slide_in_the_layers_that_the_architecture_says(
    architecture: str, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    config = of(architecture, use_sliding_window=True, sliding_window=8, **keys)
    assert config.sliding_layers == layers
    assert [config.get_window_tokens(i) for i in range(4)] == [8 * (i in layers) for i in range(4)]
    assert of(architecture, use_sliding_window=False, sliding_window=8).sliding_layers == ()


@pytest.mark.parametrize(
    ("architecture", "keys", "says"),
    [
        ("llama", {"logit_scale": 0.1}, "logit_scale = 0.1 means nothing to llama"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types has .'chunked_att"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "no window in use"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0},
            "of 0",
        ),
        ("mistral", {"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
    ],
)
def test_what_might_change_the_arithmetic_and_is_not_known_is_refused(
    architecture: str, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        of(architecture, **keys)


# What switches nothing on, in keys that no architecture here has.
NEUTRAL: dict[str, Any] = {
    "anything": 0,
    "shared_expert_intermediate_size": 0,
    "attn_logit_softcapping": 0.0,
    "use_something": False,
    "pruned": [],
    "vision_config": {},
    "extra": "",
    "n_shared_experts": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "video_token_id": 151656,
    "extra_token_ids": [1, 2],
    "embd_pdrop": 0.1,
    "hidden_dropout_prob": 0.1,
    "layerdrop": 0.05,
    "classifier_dropout": 0.3,
    "is_causal": True,
    "use_rope": True,
}


# Beside them, what might be meant.
MEANT: dict[str, Any] = {
    "embedding_multiplier": 1.5,
    "logit_scale": 0.0625,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1.0,
    "use_something": True,
    "is_causal": False,
    "use_rope": 0,
    "final_logit_softcapping": 1.0,
    "vision_config": {"depth": 2},
    "extra": "gelu",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_changes_nothing_is_never_refused(architecture: str) -> None:
    known = ARCHITECTURES[architecture].defaults
    plain = of(architecture)
    for key, value in NEUTRAL.items():
        if key not in known:
            assert of(architecture, **{key: value}) == plain, key
    for key, value in MEANT.items():
        with pytest.raises(ConfigError, match=f"{key} = "):
            of(architecture, **{key: value})
    scaling = {"rope_type": "default", "mrope_section": [], "apply_scaling": False, "scale": 1.0}
    assert of(architecture, rope_scaling=scaling) == plain
    if architecture.endswith("_moe"):
        dense = of(architecture, num_experts=0)
        assert dense.sparse_layers == () and ModelConfig.from_hf(dense.to_hf()) == dense


def test_quantized_or_undescribed_models_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="model_type is missing") as caught:
        ModelConfig.from_hf(SIZES)
    assert "one of llama, mistral" in caught.value.fix
    (place / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(ConfigError, match=r"quantized: there is a quantize_config\.json"):
        load_config(place)


# As published, but for the sizes of their matrices.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.2": {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "use_mrope": False,
        "rope_theta": 1000000.0,
        "num_key_value_heads": 2,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "max_window_layers": 28,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Qwen3-Coder-30B-A3B": {
        "model_type": "qwen3_moe",
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "qkv_bias": False,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    },
    "OpenLLaMA": {"model_type": "llama", "max_sequence_length": 2048, "pad_token_id": 0},
    "SmolLM2": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "mlp_bias": False,
    },
    "SmolLM3": {
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "pretraining_tp": 2,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Mistral v0.1": {"model_type": "mistral", "sliding_window": 4096, "_name_or_path": "somewhere"},
    "Mixtral": {"model_type": "mixtral", "sliding_window": None, "router_aux_loss_coef": 0.02},
    "TinyLlama": {"model_type": "llama", "rope_scaling": None, "unsloth_fixed": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_descriptions_are_read_and_given_back_as_they_are(
    name: str, tmp_path: Path
) -> None:
    raw = PUBLISHED[name] | SIZES | {"architectures": ["Something"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(tmp_path)
    assert config.export_hf() == raw
    assert ModelConfig.from_hf(config.to_hf()) == config
    untied = replace(config, tie_embeddings=not config.tie_embeddings)
    assert untied.export_hf() == raw | {"tie_word_embeddings": untied.tie_embeddings}


def test_a_model_of_a_job_file_is_exported_with_all_keys() -> None:
    made = of("qwen3").export_hf()
    assert made["architectures"] == ["Qwen3ForCausalLM"] and made["head_dim"] == 128
    assert made["eos_token_id"] is None  # which is not what the architecture would take


def test_scaling_beside_the_original_positions_is_read_as_transformers_reads_it() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "finetuned": True}
    config = of("llama", rope_scaling=scaling, original_max_position_embeddings=512)
    assert config.rope_scaling is not None
    assert config.rope_scaling["original_max_position_embeddings"] == 512
    config = of("llama", rope_scaling=scaling, rope_parameters={"rope_type": "linear"})
    assert config.rope_scaling is not None and config.rope_scaling["rope_type"] == "yarn"
    assert config.rope_scaling["original_max_position_embeddings"] == 2048


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
