"""Shape of a decoder, read from and written to a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.architecture.architectures import ARCHITECTURES
from meshrl.common.model.architecture.hf_config import format_hf_config, parse_hf_config


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a `Decoder`; widths in features, `rope_scaling` as in config.json."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # None, or a kind of `rope_config.ROPE_TYPE_KEYS`
    no_rope_layers: tuple[int, ...] = ()  # indices of layers without rotary embedding
    sliding_window: int = 0  # tokens that a token of a sliding layer attends to, itself included
    # indices, ascending; other layers attend to all earlier tokens
    sliding_layers: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    attention_bias: bool = False  # on queries, keys and values (but for Qwen2: output too)
    tie_embeddings: bool = False
    max_positions: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    num_experts: int = 0  # experts in a layer that is a mixture; 0: every layer is dense
    num_experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalise_routing: bool = False  # normalize the chosen experts' probabilities to sum 1
    router_aux_loss_coef: float = 0.0  # weight of the load-balancing loss
    dense_layers: tuple[int, ...] = ()  # indices of a mixture's dense layers, ascending
    shared_expert_ffn_size: int = 0  # width of the shared expert, which is gated
    # Ids that the tokenizer lacks, as ascending half-open ranges: `Decoder` sets their logits to
    # minus infinity. config.json has no such key; see `tokenizer.find_absent_ids`.
    absent_ids: tuple[tuple[int, int], ...] = ()
    # Content of the checkpoint's config.json, for `export_hf`; empty without a checkpoint.
    source_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"unknown model architecture {self.architecture!r}",
                where="config.json: model_type",
                fix=f"Use one of {', '.join(ARCHITECTURES)}",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads",
                where="config.json: num_key_value_heads",
                fix="Make it a divisor of num_attention_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"rotary embedding needs an even head width, not {self.head_dim}",
                where="config.json: head_dim",
                fix="Use an even head_dim",
            )
        if self.num_experts and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"{self.num_experts_per_token} of {self.num_experts} experts per token are "
                "not possible",
                where="config.json: num_experts_per_tok",
                fix="Use a number from 1 to the number of experts",
            )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with a mixture of experts, ascending."""
        if not self.num_experts:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @property
    def routing_shape(self) -> tuple[int, int]:
        """Shape of a token's routing: (sparse layers, experts in each)."""
        return len(self.sparse_layers), self.num_experts_per_token

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a decoder of this shape."""
        d, width = self.hidden_size, self.head_dim
        queries, projected = (
            self.num_heads * width,
            (self.num_heads + 2 * self.num_kv_heads) * width,
        )
        attention = 2 * d + projected * d + d * queries + 2 * width * self.qk_norm
        attention += projected * self.attention_bias + d * self.has_output_bias
        expert, shared = 3 * d * self.expert_ffn_size, 3 * d * self.shared_expert_ffn_size
        sparse = self.num_experts * (d + expert) + (shared + d if shared else 0)
        mixtures = len(self.sparse_layers)
        layers = self.num_layers * attention + mixtures * sparse
        layers += (self.num_layers - mixtures) * 3 * d * self.ffn_size
        return layers + d + self.vocab_size * d * (1 if self.tie_embeddings else 2)

    @property
    def token_id_end(self) -> int:
        """Highest id of the tokenizer plus one."""
        last = self.absent_ids[-1] if self.absent_ids else None
        return last[0] if last and last[1] == self.vocab_size else self.vocab_size

    @property
    def has_output_bias(self) -> bool:
        """True if the projection behind attention has a bias; Qwen2 has biases on q, k and v
        only.
        """
        return self.attention_bias and self.architecture not in ("qwen2", "qwen2_moe")

    def get_window_tokens(self, layer: int) -> int:
        """Return how many tokens a token of this layer attends to, itself included; 0: all before
        it.
        """
        return self.sliding_window if layer in self.sliding_layers else 0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Create the shape that a config.json declares; missing keys have the defaults of
        `transformers`.

        Raise ConfigError for a key that this decoder does not support.
        """
        return cls(**parse_hf_config(raw))

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that `transformers`, vLLM and SGLang load."""
        return format_hf_config(self)

    def export_hf(self) -> dict[str, Any]:
        """Return the config.json that the shape was read from, with the changes since.

        For a shape without a checkpoint, return `to_hf`.
        """
        if not self.source_config:
            return format_hf_config(self)
        before, now = (
            format_hf_config(ModelConfig.from_hf(self.source_config)),
            format_hf_config(self),
        )
        return {**self.source_config, **{key: now[key] for key in now if now[key] != before[key]}}
