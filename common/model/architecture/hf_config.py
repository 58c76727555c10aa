"""Conversion between config.json and a decoder's shape.

An absent key has the default of the architecture's configuration class in `transformers`. An
unknown key that might change the arithmetic is rejected, so that no model is computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import (
    ARCHITECTURES,
    NEUTRAL_KEYS,
    REQUIRED_KEYS,
    Architecture,
    is_neutral,
)
from meshrl.common.model.architecture.rope_config import ROPE_KEYS as ROTARY_KEYS
from meshrl.common.model.architecture.rope_config import parse_rope_config

if TYPE_CHECKING:
    from meshrl.common.model.architecture.config import ModelConfig

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_SILU_NAMES = ("silu", "swish")  # synonyms
_SLIDING, _FULL = "sliding_attention", "full_attention"


def parse_hf_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a config.json into the fields of `ModelConfig`.

    Raise ConfigError, with the key, if this decoder does not compute such a model.
    """
    name, architecture = _get_architecture(raw)
    for key in _QUANTIZATION_KEYS:
        if found := raw.get(key):
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            raise ConfigError(
                f"the weights are quantized ({method or 'by ' + key}) and cannot be trained",
                where=f"config.json: {key}",
                fix="Use the model's unquantized weights (bfloat16, float16 or float32)",
            )
    _reject_unknown_keys(raw, architecture)
    value = _ConfigReader(raw, architecture)
    _reject_unsupported(value)
    heads, hidden = _require_int(raw, "num_attention_heads"), _require_int(raw, "hidden_size")
    layers, positions = (
        _require_int(raw, "num_hidden_layers"),
        int(value("max_position_embeddings")),
    )
    theta, scaling = parse_rope_config(raw, value("rope_theta"), positions)
    eos = raw.get("eos_token_id")
    return {
        "architecture": name,
        "vocab_size": _require_int(raw, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": int(value("num_key_value_heads") or heads),
        "head_dim": int(value("head_dim") or hidden // heads),
        "ffn_size": _require_int(raw, "intermediate_size"),
        "rope_theta": theta,
        "rope_scaling": scaling or None,
        "norm_eps": float(value("rms_norm_eps")),
        "qk_norm": name in ("qwen3", "qwen3_moe"),
        "attention_bias": name == "qwen2"
        or bool(value("qkv_bias" if name == "qwen2_moe" else "attention_bias")),
        "tie_embeddings": bool(value("tie_word_embeddings")),
        "max_positions": positions,
        "bos_id": raw.get("bos_token_id"),
        "eos_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        "pad_id": raw.get("pad_token_id"),
        "no_rope_layers": _parse_no_rope_layers(value, layers),
        **_parse_windows(name, value, layers),
        **_parse_experts(name, architecture, value, layers),
    }


def format_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config.json that `transformers`, vLLM and SGLang load."""
    name = config.architecture
    eos = list(config.eos_ids) if len(config.eos_ids) > 1 else next(iter(config.eos_ids), None)
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name].model_class],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_id,
    }
    known = ARCHITECTURES[name].defaults
    if "attention_bias" in known:
        raw["attention_bias"] = config.attention_bias
    if "qkv_bias" in known:
        raw["qkv_bias"] = config.attention_bias
    if "mlp_bias" in known:
        raw["mlp_bias"] = False
    if "no_rope_layers" in known:
        raw["no_rope_layers"] = [
            int(i not in config.no_rope_layers) for i in range(config.num_layers)
        ]
    return raw | _format_windows(config) | _format_experts(config)


def _get_architecture(raw: Mapping[str, Any]) -> tuple[str, Architecture]:
    name = raw.get("model_type")
    known = ", ".join(ARCHITECTURES)
    if name is None:
        raise ConfigError(
            "model_type is missing, so the architecture is unknown",
            where="config.json: model_type",
            fix=f"Add model_type; use one of {known}",
        )
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"unknown model architecture {name!r}",
            where="config.json: model_type",
            fix=f"Use one of {known}",
        )
    return name, ARCHITECTURES[name]


def _reject_unknown_keys(raw: Mapping[str, Any], architecture: Architecture) -> None:
    known = {
        *architecture.defaults,
        *architecture.ignored_keys,
        *REQUIRED_KEYS,
        *ROTARY_KEYS,
        *_QUANTIZATION_KEYS,
    }
    if "num_local_experts" in known:
        known.add("num_experts")
    if architecture.experts_module:
        known.add("num_local_experts")
    for key, value in raw.items():
        if key in known or key in NEUTRAL_KEYS:
            continue
        off = is_neutral(key, value)
        if key in ("sliding_window", "max_window_layers") and not raw.get("use_sliding_window"):
            off = off or "use_sliding_window" in raw
        if key == "layer_types" and raw["model_type"] != "mistral" and set(value) == {_FULL}:
            off = not (raw.get("sliding_window") and raw.get("use_sliding_window", True))
        if not off:
            raise ConfigError(
                f"{key} = {value!r} is not supported for {raw['model_type']} and might "
                "change the model's computation",
                where=f"config.json: {key}",
                fix="Use a model without the key; if the key does not change the "
                "computation, remove it",
            )


class _ConfigReader:
    """Values of a config.json with the architecture's defaults."""

    def __init__(self, raw: Mapping[str, Any], architecture: Architecture) -> None:
        if raw["model_type"] in ("mixtral", "qwen3_moe"):  # synonyms
            names = ("num_experts", "num_local_experts")
            found = [raw[name] for name in names if raw.get(name) is not None]
            raw = {**raw, **{name: found[0] for name in names if found and raw.get(name) is None}}
        self._raw, self._defaults = raw, architecture.defaults

    def __call__(self, key: str) -> Any:
        found = self._raw.get(key)
        if found is not None:
            return found
        default = self._defaults.get(key)
        # A null window means no window; a null of other keys counts as absent.
        return None if key == "sliding_window" and key in self._raw else default


def _reject_unsupported(read: _ConfigReader) -> None:
    if read("hidden_act") not in _SILU_NAMES:
        raise ConfigError(
            f"activation {read('hidden_act')!r} is not implemented",
            where="config.json: hidden_act",
            fix="Use a model with silu",
        )
    if read("mlp_bias"):
        raise ConfigError(
            "biases in the feed-forward layers are not implemented",
            where="config.json: mlp_bias",
            fix="Use a model without such biases",
        )
    if read("router_jitter_noise"):
        raise ConfigError(
            "noise on a router's input is not implemented",
            where="config.json: router_jitter_noise",
            fix="Set it to 0",
        )


def _require_int(raw: Mapping[str, Any], key: str) -> int:
    if key not in raw:
        raise ConfigError(f"{key} is missing", where="config.json", fix=f"Add {key}")
    return int(raw[key])


def _parse_no_rope_layers(value: _ConfigReader, layers: int) -> tuple[int, ...]:
    listed, interval = value("no_rope_layers"), value("no_rope_layer_interval")
    if listed is not None:
        if len(listed) < layers:
            raise ConfigError(
                f"no_rope_layers has {len(listed)} entries for {layers} layers",
                where="config.json: no_rope_layers",
                fix="Give each layer one entry: 1 with rotary embedding, 0 without",
            )
        return tuple(i for i in range(layers) if not listed[i])
    if not interval:
        return ()
    return tuple(i for i in range(layers) if (i + 1) % int(interval) == 0)


def _parse_windows(name: str, value: _ConfigReader, layers: int) -> dict[str, Any]:
    """Return the width of sliding windows in tokens, and the layers that have one."""
    window = value("sliding_window")
    in_use = name in ("mistral", "mixtral") or value("use_sliding_window")
    listed = value("layer_types") if ARCHITECTURES[name].has_layer_types else None
    if listed is not None:
        unknown = {kind for kind in listed} - {_SLIDING, _FULL}
        if len(listed) != layers or unknown:
            what = f"has {sorted(unknown)}" if unknown else f"has {len(listed)} entries"
            raise ConfigError(
                f"layer_types {what} for {layers} layers of full or sliding attention",
                where="config.json: layer_types",
                fix=f"Use a model of {_FULL} and {_SLIDING} layers",
            )
        if _SLIDING in listed and not (in_use and window):
            raise ConfigError(
                "layer_types has sliding layers, but no window is in use",
                where="config.json: use_sliding_window",
                fix="Set use_sliding_window and sliding_window, or make all layers full",
            )
        sliding = [i for i in range(layers) if listed[i] == _SLIDING]
    elif not in_use or window is None:
        sliding = []
    elif name in ("qwen2", "qwen3"):
        sliding = list(range(int(value("max_window_layers")), layers))
    elif name == "qwen2_moe":
        sliding = [i for i in range(layers) if i % 2 == 0 and i < int(value("max_window_layers"))]
    elif name == "smollm3":
        sliding = list(_parse_no_rope_layers(value, layers))
    else:
        sliding = list(range(layers))
    if not sliding:
        return {}
    if int(window) < 1:
        raise ConfigError(
            f"a sliding window of {window} tokens contains no token",
            where="config.json: sliding_window",
            fix="Set use_sliding_window to false, or sliding_window to at least 1",
        )
    return {"sliding_window": int(window), "sliding_layers": tuple(sliding)}


def _format_windows(config: ModelConfig) -> dict[str, Any]:
    known = ARCHITECTURES[config.architecture].defaults
    window = config.sliding_window or None
    if "use_sliding_window" not in known:
        return {"sliding_window": window} if "sliding_window" in known else {}
    if window is None:
        return {"use_sliding_window": False}
    raw = {"use_sliding_window": True, "sliding_window": window}
    if not ARCHITECTURES[config.architecture].has_layer_types:
        return raw
    kinds = [_SLIDING if i in config.sliding_layers else _FULL for i in range(config.num_layers)]
    return raw | {"layer_types": kinds, "max_window_layers": config.num_layers}


def _parse_experts(
    name: str, architecture: Architecture, value: _ConfigReader, layers: int
) -> dict[str, Any]:
    if not architecture.experts_module:
        return {}
    mixtral = name == "mixtral"
    found: dict[str, Any] = {
        "num_experts": int(value("num_local_experts" if mixtral else "num_experts")),
        "num_experts_per_token": int(value("num_experts_per_tok")),
        "router_aux_loss_coef": float(value("router_aux_loss_coef")),
    }
    if mixtral:
        return found | {
            "expert_ffn_size": int(value("intermediate_size")),
            "normalise_routing": True,
        }
    step, listed = int(value("decoder_sparse_step")), value("mlp_only_layers") or ()
    return found | {
        "expert_ffn_size": int(value("moe_intermediate_size")),
        "normalise_routing": bool(value("norm_topk_prob")),
        "dense_layers": tuple(i for i in range(layers) if i in listed or (i + 1) % step),
        "shared_expert_ffn_size": int(value("shared_expert_intermediate_size") or 0),
    }


def _format_experts(config: ModelConfig) -> dict[str, Any]:
    if not config.num_experts:
        known = ARCHITECTURES[config.architecture].defaults
        return {key: 0 for key in ("num_experts", "num_local_experts") if key in known}
    chosen = {
        "num_experts_per_tok": config.num_experts_per_token,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }
    if config.architecture == "mixtral":
        return chosen | {
            "intermediate_size": config.expert_ffn_size,
            "num_local_experts": config.num_experts,
        }
    shared = {"shared_expert_intermediate_size": config.shared_expert_ffn_size}
    return (
        chosen
        | {
            "num_experts": config.num_experts,
            "moe_intermediate_size": config.expert_ffn_size,
            "norm_topk_prob": config.normalise_routing,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.dense_layers),
        }
        | (shared if config.architecture == "qwen2_moe" else {})
    )
