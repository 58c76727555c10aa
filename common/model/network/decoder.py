"""The model definition for training and for generating: a Llama, Mistral, Qwen, SmolLM3 or Mixtral
decoder, dense or with a mixture of experts (`moe.py`).

It differs from the textbook in two ways. Attention is passed in, and what lies between products may
be, so the model knows nothing of packing, caches, parallelism or processors. Query, key and value
projections are one matrix, gate and up projections another (rows in that order), because a small
model spends its time in dispatch.
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
    """What adapters add to a layer's projections."""

    def apply_lora(self, fused_name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y` [.., rows], which is `x` [.., columns] through our matrix `fused`, and what is added
        to it."""


_EMBEDDING_STD = 0.02


class Decoder(nn.Module):
    """Parameters are allocated, not set: `initialise` them or load a state.

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
            for index in range(config.layers)
        )
        self.final_norm = nn.Parameter(torch.empty(d, dtype=dtype))
        if not config.tie_embeddings:
            self.unembedding = nn.Parameter(torch.empty(vocab, d, dtype=dtype))
        table = build_rope_table(config, max_positions or config.max_positions)
        self.register_buffer("rope", table.to(dtype), persistent=False)

    def set_pointwise(self, pointwise: PointwiseOps) -> None:
        """Makes all parts compute with these operators from now on."""
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
        """Hidden states [.., hidden_size], normalised, of `tokens` [..] at `positions` [..].

        Of a mixture of experts, `experts` [.., sparse layers, k] says where to send each token
        (`meshrl.common.base.expert_routing.UNKNOWN_EXPERT`: where the router does), and
        `routing` is told where each went.
        """
        hidden = embedding(tokens, self.embedding)
        rotation = self.lookup_rotations(positions)
        counted = routing.balance_mask if routing is not None else None
        routed: list[LayerRouting] = []
        for index, layer in enumerate(self.layers):
            cos, sin = rotation(index)
            if index in self._sparse_layers:  # not its type: a layer may be wrapped
                given = experts[..., len(routed), :] if experts is not None else None
                hidden, told = layer(hidden, cos, sin, index, attention, given, counted)
                routed.append(told)
            else:
                hidden = layer(hidden, cos, sin, index, attention)
        if routing is not None and routed:
            routing.experts = torch.stack([told.experts for told in routed], -2)
            losses = torch.stack([told.balance_loss for told in routed])
            routing.balance_loss = losses.mean() * self.config.balance_coefficient
        return self.pointwise.rms_norm(hidden, self.final_norm, self.config.norm_eps)

    def lookup_rotations(self, positions: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Cosines and sines of rotary positions [..], each [.., 1, head_dim], by layer."""
        cos, sin = self.rope[positions].unsqueeze(-3).unbind(-2)
        still = torch.ones_like(cos), torch.zeros_like(sin)
        unrotated = self.config.unrotated_layers
        return lambda layer: still if layer in unrotated else (cos, sin)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[.., vocab_size] of hidden states [.., hidden_size]; minus infinity for ids without a
        token."""
        tied = self.config.tie_embeddings
        found = linear(hidden, self.embedding if tied else self.unembedding)
        return mask_absent_logits(found, self.config.absent_ids)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal with std fan_in**-0.5; what adds to the residual stream by 1/sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                std = initial_std(self.config, name, parameter.shape)
                parameter.normal_(std=std, generator=generator)

    def reset_buffers(self) -> None:
        """Computes what is no parameter, once memory is there that a `meta` device had none of."""
        table = build_rope_table(self.config, len(self.rope))
        self.rope.copy_(table)


def initial_std(config: ModelConfig, name: str, shape: torch.Size) -> float:
    """The standard deviation that a matrix of a new model begins with."""
    if name.endswith("embedding"):
        return _EMBEDDING_STD
    std: float = shape[-1] ** -0.5
    return std / math.sqrt(2 * config.layers) if name.endswith(("output", "down")) else std


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm, each added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.pointwise: PointwiseOps = TORCH_POINTWISE
        d, width = config.hidden_size, config.head_dim
        queries, keys = config.heads * width, config.kv_heads * width

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
        self.adapters: ProjectionAdapters | None = None  # what is added to the projections
        self._allocate_feed_forward(dtype)

    def _allocate_feed_forward(self, dtype: torch.dtype) -> None:
        """Allocates what comes behind `mlp_norm`."""
        d, width = self.config.hidden_size, self.config.ffn_size
        self.gate_up = nn.Parameter(torch.empty(2 * width, d, dtype=dtype))
        self.down = nn.Parameter(torch.empty(d, width, dtype=dtype))

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, attention: AttentionFunction
    ) -> Tensor:
        """The residual stream [.., hidden] after attention and the feed-forward part of layer
        `index`.
        """
        hidden = self.attend(hidden, cos, sin, index, attention)
        x = self.pointwise.rms_norm(hidden, self.mlp_norm, self.config.norm_eps)
        x = self.pointwise.swiglu(self._project("gate_up", x))
        return hidden + self._project("down", x)

    def attend(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, attention: AttentionFunction
    ) -> Tensor:
        """The residual stream with what attention adds."""
        c, pointwise = self.config, self.pointwise
        x = pointwise.rms_norm(hidden, self.attention_norm, c.norm_eps)
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm, self.key_norm
        counts = c.heads, c.kv_heads
        q, k, v = pointwise.split_norm_rotate_heads(
            self._project("qkv", x), cos, sin, counts, norms, c.norm_eps
        )
        mixed = attention(index, q, k, v, c.get_window_tokens(index)).flatten(-2)
        return hidden + self._project("output", mixed)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """`x` through one of the layer's matrices, its bias and its adapters."""
        y = linear(x, getattr(self, name), getattr(self, name + "_bias", None))
        return y if self.adapters is None else self.adapters.apply_lora(name, x, y)


class MoeDecoderLayer(DecoderLayer):
    """A layer whose feed-forward part is a mixture of experts."""

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
        """The residual stream [.., hidden] after attention and the experts of layer `index`, and
        where each token was sent. `experts` repeats an earlier routing; `counted` says which tokens
        count for the balance.
        """
        hidden = self.attend(hidden, cos, sin, index, attention)
        x = self.pointwise.rms_norm(hidden, self.mlp_norm, self.config.norm_eps)
        added, routed = self.experts(x, experts, balance_mask)
        return hidden + added, routed
