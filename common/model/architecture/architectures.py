"""Architectures that the decoder implements, and their defaults for keys that a config.json lacks.

The defaults are those of the configuration classes in `transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Defaults that all architectures share; an architecture's own defaults take precedence.
_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "head_dim": None,  # hidden_size / num_attention_heads
}
_QWEN_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096}
_MOE_DEFAULTS = {"router_aux_loss_coef": 0.001}
_QWEN_MOE_DEFAULTS = _MOE_DEFAULTS | {
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}


@dataclass(frozen=True)
class Architecture:
    """Decoder of `transformers`, described by its differences from Llama."""

    model_class: str  # class with a language-modelling head
    own_defaults: Mapping[str, Any]  # defaults beside the shared ones
    has_layer_types: bool = False  # config.json may set for each layer if its window slides
    experts_module: str = ""  # name of the layer's part that has router and experts; "": no mixture
    # projections of an expert
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ignored_keys: frozenset[str] = field(default_factory=frozenset)  # keys without a meaning here

    @property
    def defaults(self) -> dict[str, Any]:
        """Value of each key of config.json that is absent."""
        return _COMMON_DEFAULTS | dict(self.own_defaults)


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,  # equal to the number of heads
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        _MOE_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.0,
        },
        experts_module="block_sparse_moe",
        expert_projections=("w1", "w3", "w2"),
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        _QWEN_WINDOW_DEFAULTS
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "max_window_layers": 28,
            "layer_types": None,
        },
        has_layer_types=True,
        ignored_keys=frozenset({"attention_bias", "qkv_bias"}),  # always present
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        _QWEN_WINDOW_DEFAULTS
        | _QWEN_MOE_DEFAULTS
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "max_window_layers": 28,
            "layer_types": None,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        has_layer_types=True,
        experts_module="mlp",
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        _QWEN_WINDOW_DEFAULTS
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_window_layers": 28,
            "layer_types": None,
            "attention_bias": False,
        },
        has_layer_types=True,
        ignored_keys=frozenset({"use_qk_norm"}),  # always present
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        _QWEN_WINDOW_DEFAULTS
        | _QWEN_MOE_DEFAULTS
        | {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        experts_module="mlp",
        # All layers or none have windows; norms of queries and keys are always present.
        ignored_keys=frozenset({"max_window_layers", "use_qk_norm"}),
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_bias": False,
            "mlp_bias": False,
        },
        has_layer_types=True,
        ignored_keys=frozenset({"max_window_layers"}),
    ),
}

# Keys without an effect on the arithmetic: names, tokens, training, generation.
NEUTRAL_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "name_or_path",
        "tokenizer_class",
        "auto_map",
        "is_llama_config",
        "transformers.js_config",
        "attn_implementation",
        "model_max_length",
        "max_sequence_length",
        "max_seq_length",
        "keys_to_ignore_at_inference",
        "neftune_noise_alpha",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "additional_special_tokens_ids",
        "vocab_file",
        "use_cache",
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "output_router_logits",
        "gradient_checkpointing",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "is_encoder_decoder",
        "is_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "tie_encoder_decoder",
        "chunk_size_feed_forward",
        "pruned_heads",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "prefix",
        "task_specific_params",
        "max_length",
        "min_length",
        "max_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    }
)
REQUIRED_KEYS = (  # keys that every config.json must have
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# keys whose value True is the behaviour of every decoder
_TRUE_BY_DEFAULT = frozenset({"is_causal", "use_rope"})
_FACTOR_KEY = re.compile(r"multiplier|scal(e|ing)$|factor")  # factors whose value 1 has no effect
# Ids of tokens, dropout (for pre-training), and notes of tools.
_NEUTRAL_KEY = re.compile(r"_token_ids?$|dropout|_pdrop$|layerdrop|^_|^unsloth")


def is_neutral(key: str, value: Any) -> bool:
    """Return True if a model computes the same with `key = value` as without the key."""
    empty = value is None or (isinstance(value, str | list | dict) and not value)
    if empty or _NEUTRAL_KEY.search(key):
        return True
    if not isinstance(value, bool | int | float):
        return False
    if key in _TRUE_BY_DEFAULT:
        return value == 1
    if value == 1 and not isinstance(value, bool):
        return _FACTOR_KEY.search(key) is not None
    return value == 0
