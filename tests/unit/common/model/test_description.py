"""Model configurations, and directories without a trainable model."""

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

pytestmark = pytest.mark.group("transformers")  # imported by one worker for all tests of the group
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


def make_config(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": architecture} | SIZES | more)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_absent_keys_have_the_defaults_of_transformers(architecture: str) -> None:
    from transformers import AutoConfig

    reference = AutoConfig.for_model(architecture, **SIZES).to_dict()
    reference |= reference.pop("rope_parameters")
    reference["num_experts"] = reference.get("num_experts", reference.get("num_local_experts"))
    for key, value in ARCHITECTURES[architecture].defaults.items():
        # A None here derives from other keys there; an unused window becomes None.
        if value is not None and not (
            key == "sliding_window" and "use_sliding_window" in reference
        ):
            assert reference[key] == value, key
    config = make_config(architecture)
    assert (
        config.rope_theta == reference["rope_theta"]
        and config.norm_eps == reference["rms_norm_eps"]
    )
    assert config.num_kv_heads == (reference["num_key_value_heads"] or 32)
    assert config.head_dim == (reference.get("head_dim") or 2)
    assert config.tie_embeddings == reference["tie_word_embeddings"]
    assert config.max_positions == reference["max_position_embeddings"]
    if "no_rope_layers" in reference:
        assert config.no_rope_layers == (3,)
    assert bool(config.sliding_layers) == (architecture == "mistral")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie_embeddings": True, "qk_norm": True, "num_kv_heads": 4},
        {"attention_bias": True, "head_dim": 6},
        {"attention_bias": True, "architecture": "qwen2"},
        {"num_experts": 4, "num_experts_per_token": 2, "expert_ffn_size": 24},
        {
            "num_experts": 4,
            "num_experts_per_token": 2,
            "expert_ffn_size": 24,
            "dense_layers": (1, 2),
        },
        {
            "num_experts": 3,
            "num_experts_per_token": 1,
            "expert_ffn_size": 8,
            "shared_expert_ffn_size": 40,
        },
    ],
)
def test_parameter_count_is_that_of_the_decoder(keys: dict[str, Any]) -> None:
    config = replace(make_config("llama"), **keys)
    with torch.device("meta"):
        parameter_count = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert config.num_parameters == parameter_count


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
def test_sliding_layers_follow_the_architecture(
    architecture: str, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    config = make_config(architecture, use_sliding_window=True, sliding_window=8, **keys)
    assert config.sliding_layers == layers
    assert [config.get_window_tokens(i) for i in range(4)] == [8 * (i in layers) for i in range(4)]
    assert (
        make_config(architecture, use_sliding_window=False, sliding_window=8).sliding_layers == ()
    )


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("llama", {"logit_scale": 0.1}, "logit_scale = 0.1 is not supported for llama"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types has .'chunked_att"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "no window is in use"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0},
            "of 0",
        ),
        ("mistral", {"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
    ],
)
def test_unknown_keys_that_may_change_the_model_are_rejected(
    architecture: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(architecture, **keys)


# Values that enable nothing, in keys that no architecture here has.
NEUTRAL_KEYS: dict[str, Any] = {
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


# Values of similar keys that may enable something.
MEANINGFUL_KEYS: dict[str, Any] = {
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
def test_neutral_keys_are_accepted(architecture: str) -> None:
    known = ARCHITECTURES[architecture].defaults
    plain = make_config(architecture)
    for key, value in NEUTRAL_KEYS.items():
        if key not in known:
            assert make_config(architecture, **{key: value}) == plain, key
    for key, value in MEANINGFUL_KEYS.items():
        with pytest.raises(ConfigError, match=f"{key} = "):
            make_config(architecture, **{key: value})
    scaling = {"rope_type": "default", "mrope_section": [], "apply_scaling": False, "scale": 1.0}
    assert make_config(architecture, rope_scaling=scaling) == plain
    if architecture.endswith("_moe"):
        dense = make_config(architecture, num_experts=0)
        assert dense.sparse_layers == () and ModelConfig.from_hf(dense.to_hf()) == dense


def test_quantized_models_and_missing_model_types_are_rejected(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="model_type is missing") as caught:
        ModelConfig.from_hf(SIZES)
    assert "one of llama, mistral" in caught.value.fix
    (model_dir / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(ConfigError, match=r"quantized: the directory has quantize_config\.json"):
        load_config(model_dir)


# as published, except for the sizes of their matrices
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
def test_published_configs_are_read_and_exported_unchanged(name: str, tmp_path: Path) -> None:
    raw = PUBLISHED[name] | SIZES | {"architectures": ["Something"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(tmp_path)
    assert config.export_hf() == raw
    assert ModelConfig.from_hf(config.to_hf()) == config
    untied = replace(config, tie_embeddings=not config.tie_embeddings)
    assert untied.export_hf() == raw | {"tie_word_embeddings": untied.tie_embeddings}


def test_model_of_a_job_file_is_exported_with_all_keys() -> None:
    exported = make_config("qwen3").export_hf()
    assert exported["architectures"] == ["Qwen3ForCausalLM"] and exported["head_dim"] == 128
    assert exported["eos_token_id"] is None  # not the default of the architecture


def test_rope_scaling_is_read_as_by_transformers() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "finetuned": True}
    config = make_config("llama", rope_scaling=scaling, original_max_position_embeddings=512)
    assert config.rope_scaling is not None
    assert config.rope_scaling["original_max_position_embeddings"] == 512
    config = make_config("llama", rope_scaling=scaling, rope_parameters={"rope_type": "linear"})
    assert config.rope_scaling is not None and config.rope_scaling["rope_type"] == "yarn"
    assert config.rope_scaling["original_max_position_embeddings"] == 2048


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """Save a model and return its directory."""
    return save_random_model(tmp_path / "model", TINY)


def save_random_model(directory: Path, config: ModelConfig, shard_bytes: int = 10**9) -> Path:
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(0))
    save_model(directory, config, decoder.state_dict(), shard_bytes=shard_bytes)
    return directory


def replace_tensor(model_dir: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    save_file(tensors | {name: tensor}, model_dir / "model.safetensors")


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32]
)
def test_quantized_dtypes_are_rejected_from_their_headers(
    model_dir: Path, dtype: torch.dtype
) -> None:
    replace_tensor(model_dir, DOWN, torch.ones(16, 24).to(dtype))
    with pytest.raises(ConfigError, match=rf"quantized: tensor {DOWN} is of type [FIU]"):
        load_config(model_dir)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_weights_are_rejected_with_their_tensor(
    model_dir: Path, value: float, dtype: torch.dtype
) -> None:
    broken = torch.ones(16, 24, dtype=dtype)
    broken[3, 4] = value
    replace_tensor(model_dir, DOWN, broken)
    with pytest.raises(ConfigError, match=rf"tensor {DOWN} has 1 of 384 weights"):
        load_model(model_dir)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model-Q4_K_M.gguf", "GGUF of llama.cpp"),
        ("pytorch_model.bin", "pickles of PyTorch"),
        ("pytorch_model-00001-of-00002.bin", "pickles of PyTorch"),
        ("consolidated.00.pth", "authors' own format"),
        ("adapter_config.json", "adapters without the model"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_weights_of_another_format_are_named(
    model_dir: Path, file: str, message: str, has_config: bool
) -> None:
    (model_dir / "model.safetensors").unlink()
    if not has_config:
        (model_dir / "config.json").unlink()
    (model_dir / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        load_config(model_dir)


def test_truncated_file_is_detected_from_its_header(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"incomplete: the file has \d+ of \d+ bytes"):
        load_config(model_dir)
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match="incomplete"):
        load_config(model_dir)


def test_config_is_loaded_without_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    assert load_config(model_dir) == TINY
    with pytest.raises(ConfigError, match="neither model"):
        load_model(model_dir)


def test_missing_shard_of_an_index_is_named(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", TINY, shard_bytes=2000)
    missing = sorted(model_dir.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ConfigError, match=f"files of weights are missing: {missing.name}"):
        load_config(model_dir)


def test_single_file_takes_precedence_over_shards(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", TINY, shard_bytes=2000)
    other = save_random_model(tmp_path / "other", TINY)
    replace_tensor(other, "model.norm.weight", torch.full((16,), 3.0))
    (other / "model.safetensors").rename(model_dir / "model.safetensors")
    assert load_model(model_dir)[1].final_norm.mean() == 3.0


def test_separate_unembedding_overrides_a_tied_config(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", TINY)
    description = json.loads((model_dir / "config.json").read_text())
    description["tie_word_embeddings"] = True
    (model_dir / "config.json").write_text(json.dumps(description))
    config, decoder = load_model(model_dir)
    assert not config.tie_embeddings and not torch.equal(decoder.unembedding, decoder.embedding)
    assert load_config(model_dir) == config
    save_model(tmp_path / "again", config, decoder.state_dict())
    assert json.loads((tmp_path / "again/config.json").read_text())["tie_word_embeddings"] is False


def test_equal_unembedding_is_tied(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", replace(TINY, tie_embeddings=True))
    embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    replace_tensor(model_dir, "lm_head.weight", embedding)
    config, _ = load_model(model_dir)
    assert config.tie_embeddings


def test_tied_embedding_may_have_the_name_of_the_unembedding(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", replace(TINY, tie_embeddings=True))
    tensors = load_file(model_dir / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": embedding}, model_dir / "model.safetensors")
    assert torch.equal(load_model(model_dir)[1].embedding, embedding)
