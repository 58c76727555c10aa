"""Changes of a checkpoint that MeshRL must refuse, or compute as `transformers` does."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_YARN = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
# Keys of config.json and what they are set to; None removes the key.
KEYS: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "gelu"),
    ("hidden_act", "relu"),
    ("hidden_act", "gelu_pytorch_tanh"),
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("use_bias", True),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("partial_rotary_factor", 0.5),
    ("attention_multiplier", 0.5),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("logits_scaling", 8.0),
    ("logit_scale", 0.0625),
    ("query_pre_attn_scalar", 16),
    ("clip_qkv", 8.0),
    ("qk_layernorm", True),
    ("use_qk_norm", True),
    ("parallel_attn", True),
    ("use_parallel_residual", True),
    ("alibi", True),
    ("position_embedding_type", "alibi"),
    ("is_causal", False),
    ("router_jitter_noise", 0.1),
    ("scoring_func", "sigmoid"),
    ("n_shared_experts", 1),
    ("attention_chunk_size", 16),
    ("attention_sink", True),
    ("rope_interleaved", True),
    ("rope_scaling", _YARN),
    ("rope_scaling", {"rope_type": "ntk", "factor": 2.0}),
    ("rope_scaling", {"type": "su", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 1, 2]}),
    ("rope_scaling", {"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    ("rope_scaling", {"type": "linear", "factor": 3.0}),
    ("rope_theta", None),
    ("rope_parameters", None),
    ("rms_norm_eps", None),
    ("layer_types", ["chunked_attention"]),
    ("sliding_window", 7),
    ("sliding_window", 0),
    ("use_sliding_window", True),
    ("max_window_layers", None),
    ("norm_topk_prob", True),
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [1]),
    ("no_rope_layers", [0, 1, 0, 1]),
    ("no_rope_layer_interval", 1),
    ("head_dim", 20),
    ("head_dim", None),
    ("num_key_value_heads", None),
    ("num_experts_per_tok", 1),
    ("tie_word_embeddings", True),
    ("tie_word_embeddings", False),
    ("quantization_config", {"quant_method": "fp8"}),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ("compression_config", {"format": "pack-quantized"}),
    ("model_type", None),
    ("model_type", "gemma2"),
    ("model_type", "phi3"),
    ("model_type", "llama"),
    ("model_type", "qwen2"),
)
FILES = ("float8_e4m3fn", "float8_e5m2", "int8", "int32", "nan", "infinite")


def change(random: Random, directory: Path) -> str:
    """Changes a key of config.json or, more rarely, a tensor; returns what it did."""
    if random.random() < 0.15:
        return _tensor(random, directory / "model.safetensors")
    key, value = random.choice(KEYS)
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    if value is None:
        raw.pop(key, None)
    else:
        raw[key] = value
    file.write_text(json.dumps(raw))
    return f"{key} = {value!r}"


def _tensor(random: Random, file: Path) -> str:
    tensors = load_file(file)
    name = random.choice([name for name in sorted(tensors) if name.startswith("model.layers")])
    kind = random.choice(FILES)
    if kind in ("nan", "infinite"):
        broken = torch.nan if kind == "nan" else torch.inf
        tensors[name].view(-1)[random.randrange(tensors[name].numel())] = broken
    else:
        tensors[name] = tensors[name].to(getattr(torch, kind))
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{name} is {kind}"
