"""The shape of a decoder, read from and written to a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_QK_NORM = ("qwen3", "qwen3_moe")
_NO_BIAS_KEY = ("qwen2", "mixtral")  # their biases are always, or never, there
_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """What `Decoder` needs to know; widths in features, `rope_scaling` as config.json has it."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # None or llama3's
    norm_eps: float = 1e-6
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    attention_bias: bool = False  # on queries, keys and values (llama, qwen3: output too)
    tie_embeddings: bool = False
    max_positions: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    experts: int = 0  # experts in a layer that is a mixture; 0: every layer is dense
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalise_routing: bool = False  # the chosen experts' probabilities are made to sum to 1
    balance_coefficient: float = 0.0  # weight of the load-balancing loss
    dense_layers: tuple[int, ...] = ()  # indices of a mixture's dense layers, ascending

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"unknown model architecture {self.architecture!r}",
                where="config.json: model_type",
                fix=f"use one of {', '.join(ARCHITECTURES)}",
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads",
                where="config.json: num_key_value_heads",
                fix="make it a divisor of num_attention_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"rotary embedding needs an even head width, not {self.head_dim}",
                where="config.json: head_dim",
                fix="use an even head_dim",
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"{self.experts_per_token} of {self.experts} experts cannot be chosen",
                where="config.json: num_experts_per_tok",
                fix="use a number from 1 to that of the experts",
            )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts, ascending."""
        if not self.experts:
            return ()
        return tuple(i for i in range(self.layers) if i not in self.dense_layers)

    @property
    def expert_shape(self) -> tuple[int, int]:
        """Experts that a token is sent to: (sparse layers, experts in each)."""
        return len(self.sparse_layers), self.experts_per_token

    @property
    def output_bias(self) -> bool:
        """Whether the projection behind attention has a bias; Qwen2 has them on q, k and v only."""
        return self.attention_bias and self.architecture != "qwen2"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The shape that a config.json declares; ConfigError on a key whose meaning this decoder
        lacks.
        """
        architecture = str(raw.get("model_type", "llama"))
        _refuse_unsupported(raw)
        heads, hidden = _need(raw, "num_attention_heads"), _need(raw, "hidden_size")
        theta, scaling = _rope(raw)
        eos = raw.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=_need(raw, "vocab_size"),
            hidden_size=hidden,
            layers=_need(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            ffn_size=_need(raw, "intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            qk_norm=architecture in _QK_NORM,
            attention_bias=architecture == "qwen2" or bool(raw.get("attention_bias", False)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            bos_id=raw.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            pad_id=raw.get("pad_token_id"),
            **_mixture(architecture, raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json that `transformers`, vLLM and SGLang load."""
        eos = list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None)
        raw: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_id,
        }
        if self.architecture not in _NO_BIAS_KEY:
            raw["attention_bias"] = self.attention_bias
        if self.architecture == "llama":
            raw["mlp_bias"] = False
        elif self.architecture != "mixtral":
            raw["use_sliding_window"] = False
        return raw | self._mixture_to_hf()

    def _mixture_to_hf(self) -> dict[str, Any]:
        chosen = {
            "num_experts_per_tok": self.experts_per_token,
            "router_aux_loss_coef": self.balance_coefficient,
        }
        if self.architecture == "mixtral":
            widths = {"intermediate_size": self.expert_ffn_size, "sliding_window": None}
            return chosen | widths | {"num_local_experts": self.experts}
        if self.architecture == "qwen3_moe":
            return chosen | {
                "num_experts": self.experts,
                "moe_intermediate_size": self.expert_ffn_size,
                "norm_topk_prob": self.normalise_routing,
                "decoder_sparse_step": 1,
                "mlp_only_layers": list(self.dense_layers),
            }
        return {}


def _need(raw: Mapping[str, Any], key: str) -> int:
    if key not in raw:
        raise ConfigError(f"{key} is missing", where="config.json", fix=f"add {key}")
    return int(raw[key])


def _mixture(architecture: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts."""
    if architecture not in ("qwen3_moe", "mixtral"):
        return {}
    count = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    found: dict[str, Any] = {
        "experts": _need(raw, count),
        "experts_per_token": _need(raw, "num_experts_per_tok"),
        "balance_coefficient": float(raw.get("router_aux_loss_coef", 0.001)),
    }
    if architecture == "mixtral":
        return found | {
            "expert_ffn_size": _need(raw, "intermediate_size"),
            "normalise_routing": True,
        }
    step, listed = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or ()
    layers = range(_need(raw, "num_hidden_layers"))
    return found | {
        "expert_ffn_size": _need(raw, "moe_intermediate_size"),
        "normalise_routing": bool(raw.get("norm_topk_prob", False)),
        "dense_layers": tuple(i for i in layers if i in listed or (i + 1) % step),
    }


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_theta` + `rope_scaling` or the newer `rope_parameters`."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = float(raw.get("rope_theta") or parameters.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"rotary scaling {kind!r} is not implemented",
            where="config.json: rope_scaling",
            fix="use a model with default or llama3 scaling",
        )
    for key in _LLAMA3_KEYS:
        if key not in parameters:
            raise ConfigError(f"{key} is missing", where="config.json: rope_scaling")
    return theta, {"rope_type": "llama3", **{key: parameters[key] for key in _LLAMA3_KEYS}}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"activation {activation!r} is not implemented",
            where="config.json: hidden_act",
            fix="use a model with silu",
        )
    if raw.get("mlp_bias"):
        raise ConfigError(
            "biases in the feed-forward layers are not implemented",
            where="config.json: mlp_bias",
            fix="use a model without them",
        )
    if raw.get("router_jitter_noise"):
        raise ConfigError(
            "noise on what a router sees is not implemented",
            where="config.json: router_jitter_noise",
            fix="set it to 0",
        )
    always = raw.get("model_type") == "mixtral"  # others have a switch beside the width
    if (always or raw.get("use_sliding_window", False)) and raw.get("sliding_window"):
        raise ConfigError(
            "sliding-window attention is not implemented",
            where="config.json: use_sliding_window",
            fix="use a model without it",
        )
