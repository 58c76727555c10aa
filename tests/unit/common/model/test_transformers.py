"""Agreement of our decoder with that of transformers on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.network.decoder import Decoder
from tests.attention import causal_attention

pytestmark = pytest.mark.group("transformers")  # imported by one worker for all tests of the group
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5, "head_dim": 8},
    ),
    "llama with biases": ("LlamaConfig", {"attention_bias": True}),
    "qwen2": (
        "Qwen2Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "num_key_value_heads": 3}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3 moe with dense layers": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
        | {"num_experts_per_tok": 2},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 11}),
    "qwen2 moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
        | {"shared_expert_intermediate_size": 24, "num_key_value_heads": 3},
    ),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1]}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
}

tied_and_untied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
families = pytest.mark.parametrize("family", FAMILIES)


def save_reference_model(path: Path, family: str, tied: bool, shard_size: str = "1GB") -> Any:
    import transformers

    config_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SHAPE | extra, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms as well, so that each matters
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model


def compute_our_logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.inference_mode():
        return decoder.compute_logits(decoder(tokens, positions, causal_attention))


def compute_reference_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens).logits
    return logits


def some_tokens() -> torch.Tensor:
    return torch.randint(99, (2, 80), generator=torch.Generator().manual_seed(3))


@pytest.mark.rotating(3)
@families
@tied_and_untied
def test_models_saved_by_transformers_are_read(family: str, tied: bool, tmp_path: Path) -> None:
    model = save_reference_model(tmp_path, family, tied)
    _, decoder = load_model(tmp_path)
    tokens = some_tokens()
    torch.testing.assert_close(
        compute_our_logits(decoder, tokens),
        compute_reference_logits(model, tokens),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.rotating(3)
@families
@tied_and_untied
def test_transformers_reads_saved_models(family: str, tied: bool, tmp_path: Path) -> None:
    import transformers

    save_reference_model(tmp_path / "theirs", family, tied)
    config, _ = load_model(tmp_path / "theirs")
    decoder = Decoder(config)
    decoder.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=_make_generator(name)))
    save_model(tmp_path / "ours", config, decoder.state_dict())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = some_tokens()
    torch.testing.assert_close(
        compute_our_logits(decoder, tokens),
        compute_reference_logits(model, tokens),
        atol=1e-5,
        rtol=0,
    )


def _make_generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(len(name))


def test_shards_with_an_index_are_read(tmp_path: Path) -> None:
    model = save_reference_model(tmp_path, "qwen3", tied=False, shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    _, decoder = load_model(tmp_path)
    tokens = some_tokens()
    torch.testing.assert_close(
        compute_our_logits(decoder, tokens),
        compute_reference_logits(model, tokens),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_large_models_are_saved_in_shards_for_transformers(family: str, tmp_path: Path) -> None:
    import transformers

    save_reference_model(tmp_path / "theirs", family, tied=False)
    config, decoder = load_model(tmp_path / "theirs")
    save_model(tmp_path, config, decoder.state_dict())
    save_model(tmp_path, config, decoder.state_dict(), shard_bytes=40_000)
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    assert all(shard.stat().st_size < 44_000 for shard in shards)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    _, reloaded = load_model(tmp_path)
    tokens = some_tokens()
    assert torch.equal(compute_our_logits(reloaded, tokens), compute_our_logits(decoder, tokens))
    torch.testing.assert_close(
        compute_our_logits(decoder, tokens),
        compute_reference_logits(model, tokens),
        atol=1e-5,
        rtol=0,
    )


def test_single_file_replaces_shards(tmp_path: Path) -> None:
    save_reference_model(tmp_path, "mixtral", tied=False, shard_size="30KB")
    config, decoder = load_model(tmp_path)
    decoder.initialise(torch.Generator().manual_seed(4))
    save_model(tmp_path, config, decoder.state_dict())
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    _, reloaded = load_model(tmp_path)
    assert torch.equal(
        compute_our_logits(reloaded, some_tokens()), compute_our_logits(decoder, some_tokens())
    )


def test_sparse_step_selects_the_moe_layers() -> None:
    raw = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16}
    raw |= {"num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = ModelConfig.from_hf(SHAPE | raw | {"num_hidden_layers": 6})
    assert config.sparse_layers == (1, 5) and config.routing_shape == (2, 2)
    assert ModelConfig.from_hf(config.to_hf()) == config


@families
def test_state_survives_a_round_trip(family: str, tmp_path: Path) -> None:
    save_reference_model(tmp_path, family, tied=False)
    config, decoder = load_model(tmp_path)
    state = decoder.state_dict()
    save_model(tmp_path / "again", config, state)
    returned = load_model(tmp_path / "again")[1].state_dict()
    assert returned.keys() == state.keys()
    assert all(torch.equal(returned[name], state[name]) for name in state)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_older_rope_keys_are_read(tmp_path: Path) -> None:
    save_reference_model(tmp_path, "llama3", tied=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    new_config = ModelConfig.from_hf(raw)
    scaling = dict(raw.pop("rope_parameters"))
    old_config = ModelConfig.from_hf(
        raw | {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    )
    assert new_config == old_config
    assert new_config.rope_theta == 500000.0
    assert new_config.rope_scaling is not None and new_config.rope_scaling["factor"] == 8.0


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "mamba"),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "mrope_section": [2, 2]}),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("attention_multiplier", 0.5),
        ("is_causal", False),
        ("sliding_window", 64),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 4),
        ("head_dim", 7),
        ("router_jitter_noise", 0.1),
    ],
)
def test_unsupported_features_are_rejected_by_their_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_hf({"model_type": "llama"} | SHAPE | {key: value})


@pytest.mark.parametrize(
    "key, value", [("num_experts_per_tok", 5), ("num_experts_per_tok", 0), ("sliding_window", 0)]
)
def test_invalid_moe_configs_are_rejected_by_their_key(key: str, value: Any) -> None:
    raw = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_hf(raw | SHAPE | {key: value})


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_reference_model(tmp_path, "qwen2", tied=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _change_width(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "corrupt"),
    [
        ("model.safetensors", _truncate),
        ("model.safetensors", _change_width),
        ("model.safetensors", Path.unlink),
        ("config.json", _truncate),
        ("config.json", lambda path: path.write_text("[]")),
        ("config.json", lambda path: path.write_text(path.read_text().replace("48", '"wide"'))),
    ],
)
def test_unreadable_files_raise_a_config_error(
    file: str, corrupt: Callable[[Path], Any], tmp_path: Path
) -> None:
    save_reference_model(tmp_path, "qwen2", tied=False)
    corrupt(tmp_path / file)
    with pytest.raises(ConfigError):
        load_model(tmp_path)


def test_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)
