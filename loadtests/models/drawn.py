"""Draws the configuration of a small decoder of any kind that MeshRL supports."""

from __future__ import annotations

from random import Random
from typing import Any

CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2": "Qwen2Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "smollm3": "SmolLM3Config",
}
VOCABULARY = 96


def drawn(random: Random, architecture: str, length: int) -> dict[str, Any]:
    """Return the arguments of its `transformers` configuration class, for sequences of `length`."""
    heads = random.choice((2, 4, 6))
    layers = random.randint(2, 4)
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * 2 * random.randint(4, 10),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
        "intermediate_size": random.randint(24, 100),
        "max_position_embeddings": max(length, 64),
        "tie_word_embeddings": random.random() < 0.5,
        "rms_norm_eps": random.choice((1e-6, 1e-5)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": _rotary(random, length),
    }
    if architecture not in ("qwen2", "smollm3", "qwen2_moe") and random.random() < 0.6:
        options["head_dim"] = random.choice((8, 12, 16, 32, 48, 64))
    # Qwen3 declares its head width; transformers needs it for Mixtral with some RoPE scalings.
    if architecture in ("qwen3", "mixtral") and "head_dim" not in options:
        options["head_dim"] = 16
    if architecture in ("llama", "qwen3", "qwen3_moe", "smollm3"):
        options["attention_bias"] = random.random() < 0.3
    if architecture == "qwen2_moe":
        options["qkv_bias"] = random.random() < 0.7
    return (
        options
        | _window(random, architecture, layers, length)
        | _mixture(random, architecture, layers)
        | _unrotated(random, architecture, layers)
    )


def _rotary(random: Random, length: int) -> dict[str, Any]:
    kind = random.choice(("default", "default", "linear", "yarn", "yarn", "llama3", "dynamic"))
    rotary: dict[str, Any] = {"rope_type": kind, "rope_theta": random.choice((1e4, 5e5, 1e6))}
    if kind != "default":
        rotary["factor"] = random.choice((2.0, 4.0, 8.0))
    if kind in ("yarn", "llama3"):
        rotary["original_max_position_embeddings"] = max(16, length // 4)
    if kind == "llama3":
        rotary |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        rotary |= random.choice(
            (
                {},
                {"beta_fast": 16.0, "beta_slow": 2.0},
                {"attention_factor": 1.2},
                {"mscale": 1.0, "mscale_all_dim": 0.5},
                {"truncate": False},
            )
        )
    return rotary


def _window(random: Random, architecture: str, layers: int, length: int) -> dict[str, Any]:
    window = random.choice((None, random.randint(1, length), random.randint(4, 40)))
    if architecture in ("mistral", "mixtral"):
        return {"sliding_window": window}
    if architecture == "llama":
        return {}
    options: dict[str, Any] = {"use_sliding_window": window is not None}
    if window is not None:
        options["sliding_window"] = window
    if architecture in ("qwen2", "qwen3", "qwen2_moe"):
        options["max_window_layers"] = random.randint(0, layers)
        if window is not None and random.random() < 0.5:
            kinds = ("full_attention", "sliding_attention")
            options["layer_types"] = [random.choice(kinds) for _ in range(layers)]
    return options


def _mixture(random: Random, architecture: str, layers: int) -> dict[str, Any]:
    if architecture not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return {}
    experts = random.randint(2, 8)
    chosen: dict[str, Any] = {"num_experts_per_tok": random.randint(1, min(3, experts))}
    if architecture == "mixtral":
        return chosen | {"num_local_experts": experts}
    chosen |= {
        "num_experts": experts,
        "moe_intermediate_size": random.randint(8, 40),
        "norm_topk_prob": random.random() < 0.5,
        "decoder_sparse_step": random.choice((1, 1, 2)),
        "mlp_only_layers": random.choice(([], [], [0])),
    }
    if architecture == "qwen2_moe":
        chosen["shared_expert_intermediate_size"] = random.randint(8, 60)
    return chosen


def _unrotated(random: Random, architecture: str, layers: int) -> dict[str, Any]:
    if architecture != "smollm3":
        return {}
    if random.random() < 0.5:
        return {"no_rope_layers": [random.randint(0, 1) for _ in range(layers)]}
    return {"no_rope_layer_interval": random.choice((2, 3, 4))}
