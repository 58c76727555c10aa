"""Shape of a model, as far as its cost depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshrl.common.model.architecture.config import ModelConfig

HALF_BYTES = 2  # bytes of a number in 16 bits


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder. For a dense one, `active` is `parameters`, and there are no experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    active: float  # parameters that a token is computed with
    experts: int = 0  # of a layer; 0: dense
    experts_per_token: int = 0
    dtype_bytes: int = HALF_BYTES
    mixtures: int = 0  # layers with experts; 0: all of them, if any

    @classmethod
    def from_config(cls, config: ModelConfig, dtype_bytes: int = HALF_BYTES) -> ModelShape:
        """Return the shape of a model with this config.json."""
        sparse, idle = len(config.sparse_layers), config.num_experts - config.num_experts_per_token
        expert = 3 * config.hidden_size * config.expert_ffn_size
        return cls(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            parameters=float(config.num_parameters),
            active=float(config.num_parameters - sparse * idle * expert),
            experts=config.num_experts if sparse else 0,
            experts_per_token=config.num_experts_per_token if sparse else 0,
            dtype_bytes=dtype_bytes,
            mixtures=sparse,
        )

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return (self.mixtures or self.layers) if self.experts else 0

    @property
    def attention_width(self) -> int:
        """Features of all heads together."""
        return self.heads * self.head_dim

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all parameters."""
        return self.parameters * self.dtype_bytes

    def can_split(self, degree: int) -> bool:
        """Return True if tensor parallelism of this degree is possible.

        It must divide the heads. It must also divide the key-value heads, or be a multiple of their
        number.
        """
        shared = not self.kv_heads % degree or not degree % self.kv_heads
        return not self.heads % degree and shared

    def count_read_parameters(self, batch: float) -> float:
        """Return the parameters that a step of `batch` tokens reads.

        Of a mixture's experts these are the experts that get any token, if tokens are spread
        uniformly.
        """
        if not self.experts or self.experts_per_token >= self.experts:
            return self.active
        share = self.experts_per_token / self.experts
        sparse = (self.parameters - self.active) / (1 - share)
        return self.parameters - sparse * math.pow(1 - share, max(batch, 1.0))

    def compute_kv_bytes_per_token(self, degree: int) -> float:
        """Return the bytes of a token's keys and values on each of `degree` ranks.

        A rank has at least one head, so more ranks than key-value heads hold copies.
        """
        heads = -(-self.kv_heads // degree)
        return 2.0 * self.layers * heads * self.head_dim * self.dtype_bytes
