"""Decoder for training and generation: Llama, Mistral, Qwen, SmolLM3 or Mixtral.

It is dense or has a mixture of experts (`moe.py`). It differs from the textbook in two ways. First,
callers pass in attention and may pass in pointwise operators, so the model is independent of
packing, caches, parallelism and processors. Second, query, key and value projections are one
matrix, gate and up projections another (rows in that order), because dispatch dominates a small
model's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.attention import AttentionFunction
from meshrl.common.model.network.moe import LayerRouting, MixtureOfExperts, Routing
from meshrl.common.model.network.pointwise import TORCH_POINTWISE, PointwiseOps
from meshrl.common.model.network.rope import build_rope_table
from meshrl.kernels.absent_ids import mask_absent_logits


class ProjectionAdapters(Protocol):
    """Change that adapters add to a layer's projections."""

    def apply_lora(self, fused_name: str, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` [.., rows] plus the adapters' change.

        `y` is `x` [.., columns] through our matrix `fused_name`.
        """


_EMBEDDING_STD = 0.02


class Decoder(nn.Module):
    """Decoder, with parameters allocated but not set: `initialise` them or load a state.

    `max_positions` bounds the rotary table (memory only); positions must stay below it.
    """

    rope: Tensor  # [max_positions, 2, head_dim]: cosines, and sines with the first half negated

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.pointwise: PointwiseOps = TORCH_POINTWISE
        d, vocab = config.hidden_size, config.vocab_size
        self.embedding = nn.Parameter(torch.empty(vocab, d, dtype=dtype))
        self._sparse_layers = frozenset(config.sparse_layers)
        self.layers = nn.ModuleList(
            (MoeDecoderLayer if index in self._sparse_layers else DecoderLayer)(config, dtype)
            for index in range(config.num_layers)
        )
        self.final_norm = nn.Parameter(torch.empty(d, dtype=dtype))
        if not config.tie_embeddings:
            self.unembedding = nn.Parameter(torch.empty(vocab, d, dtype=dtype))
        table = build_rope_table(config, max_positions or config.max_positions)
        self.register_buffer("rope", table.to(dtype), persistent=False)

    def set_pointwise(self, pointwise: PointwiseOps) -> None:
        """Set the pointwise operators of all parts."""
        for part in self.modules():
            if isinstance(part, Decoder | DecoderLayer | MixtureOfExperts):
                part.pointwise = pointwise

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        experts: Tensor | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return normalised hidden states [.., hidden_size] of `tokens` [..] at `positions` [..].

        In a mixture of experts, `experts` [.., sparse layers, k] sets the experts of each token
        (`meshrl.common.base.expert_routing.UNKNOWN_EXPERT`: the router chooses), and `routing`
        receives the routing of each token.
        """
        hidden = embedding(tokens, self.embedding)
        rotation = self.lookup_rotations(positions)
        counted = routing.balance_mask if routing is not None else None
        routed: list[LayerRouting] = []
        for index, layer in enumerate(self.layers):
            cos, sin = rotation(index)
            if index in self._sparse_layers:  # not by type, because a layer may be wrapped
                given = experts[..., len(routed), :] if experts is not None else None
                hidden, layer_routing = layer(hidden, cos, sin, index, attention, given, counted)
                routed.append(layer_routing)
            else:
                hidden = layer(hidden, cos, sin, index, attention)
        if routing is not None and routed:
            routing.experts = torch.stack([layer_routing.experts for layer_routing in routed], -2)
            losses = torch.stack([layer_routing.balance_loss for layer_routing in routed])
            routing.balance_loss = losses.mean() * self.config.router_aux_loss_coef
        return self.pointwise.rms_norm(hidden, self.final_norm, self.config.norm_eps)

    def lookup_rotations(self, positions: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Return cosines and sines of rotary positions [..], each [.., 1, head_dim], by layer."""
        cos, sin = self.rope[positions].unsqueeze(-3).unbind(-2)
        still = torch.ones_like(cos), torch.zeros_like(sin)
        unrotated = self.config.no_rope_layers
        return lambda layer: still if layer in unrotated else (cos, sin)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [.., vocab_size] of hidden states [.., hidden_size].

        Ids without a token have minus infinity.
        """
        tied = self.config.tie_embeddings
        found = linear(hidden, self.embedding if tied else self.unembedding)
        return mask_absent_logits(found, self.config.absent_ids)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Initialise matrices from a normal distribution with std fan_in**-0.5.

        Matrices that add to the residual stream are scaled by 1/sqrt(2 layers).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                std = initial_std(self.config, name, parameter.shape)
                parameter.normal_(std=std, generator=generator)

    def reset_buffers(self) -> None:
        """Compute the buffers after memory is allocated for a model of the `meta` device."""
        table = build_rope_table(self.config, len(self.rope))
        self.rope.copy_(table)


def initial_std(config: ModelConfig, name: str, shape: torch.Size) -> float:
    """Return the initial standard deviation of a matrix."""
    if name.endswith("embedding"):
        return _EMBEDDING_STD
    std: float = shape[-1] ** -0.5
    return std / math.sqrt(2 * config.num_layers) if name.endswith(("output", "down")) else std


class DecoderLayer(nn.Module):
    """Layer of attention and SwiGLU, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.pointwise: PointwiseOps = TORCH_POINTWISE
        d, width = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * width, config.num_kv_heads * width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attention_norm = parameter(d)
        self.qkv = parameter(queries + 2 * keys, d)
        self.qkv_bias = parameter(queries + 2 * keys) if config.attention_bias else None
        self.query_norm = parameter(width) if config.qk_norm else None
        self.key_norm = parameter(width) if config.qk_norm else None
        self.output = parameter(d, queries)
        self.output_bias = parameter(d) if config.has_output_bias else None
        self.mlp_norm = parameter(d)
        self.adapters: ProjectionAdapters | None = None  # adapters of the projections
        self._allocate_feed_forward(dtype)

    def _allocate_feed_forward(self, dtype: torch.dtype) -> None:
        """Allocate the feed-forward part, after `mlp_norm`."""
        d, width = self.config.hidden_size, self.config.ffn_size
        self.gate_up = nn.Parameter(torch.empty(2 * width, d, dtype=dtype))
        self.down = nn.Parameter(torch.empty(d, width, dtype=dtype))

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, attention: AttentionFunction
    ) -> Tensor:
        """Return the residual stream [.., hidden] after layer `index`."""
        hidden = self.attend(hidden, cos, sin, index, attention)
        x = self.pointwise.rms_norm(hidden, self.mlp_norm, self.config.norm_eps)
        x = self.pointwise.swiglu(self._project("gate_up", x))
        return hidden + self._project("down", x)

    def attend(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, attention: AttentionFunction
    ) -> Tensor:
        """Return the residual stream after attention."""
        c, pointwise = self.config, self.pointwise
        x = pointwise.rms_norm(hidden, self.attention_norm, c.norm_eps)
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm, self.key_norm
        counts = c.num_heads, c.num_kv_heads
        q, k, v = pointwise.split_norm_rotate_heads(
            self._project("qkv", x), cos, sin, counts, norms, c.norm_eps
        )
        mixed = attention(index, q, k, v, c.get_window_tokens(index)).flatten(-2)
        return hidden + self._project("output", mixed)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """Apply one of the layer's matrices, its bias and its adapters to `x`."""
        y = linear(x, getattr(self, name), getattr(self, name + "_bias", None))
        return y if self.adapters is None else self.adapters.apply_lora(name, x, y)


class MoeDecoderLayer(DecoderLayer):
    """Layer with a mixture of experts as its feed-forward part."""

    def _allocate_feed_forward(self, dtype: torch.dtype) -> None:
        self.experts = MixtureOfExperts(self.config, dtype)

    def forward(  # type: ignore[override]  # it also tells where tokens went
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: int,
        attention: AttentionFunction,
        experts: Tensor | None = None,
        balance_mask: Tensor | None = None,
    ) -> tuple[Tensor, LayerRouting]:
        """Return the residual stream [.., hidden] after layer `index`, and each token's routing.

        `experts` repeats an earlier routing; `balance_mask` selects the tokens of the balancing
        loss.
        """
        hidden = self.attend(hidden, cos, sin, index, attention)
        x = self.pointwise.rms_norm(hidden, self.mlp_norm, self.config.norm_eps)
        added, routed = self.experts(x, experts, balance_mask)
        return hidden + added, routed
