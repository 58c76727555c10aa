"""Bytes that a training pass takes beside the model: saved activations, logits and slopes.

Numbers of a layer are counted for each token. Kernels differ in the tensors that they save:

- fused kernels of a CPU (float32): inputs of norms, projections and SwiGLU once each;
- PyTorch on a GPU: also the gate's activation, and projections beside the rotated heads;
- PyTorch on a CPU (bfloat16): norms and attention work on float32 copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.job.memory.model_sizes import ModelSizes
from meshrl.common.model.architecture.config import ModelConfig

FLOAT_BYTES = 4
DTYPE_BYTES = {"float32": FLOAT_BYTES, "bfloat16": 2}
INDEX_BYTES = 8
# As in kernels/ops/linear_logprob.py: logits in memory at a time, and the smallest chunk.
MAX_LOGITS, MIN_CHUNK_IDS = {"cpu": 1 << 20, "cuda": 1 << 27}, 512
LOGIT_COPIES = 3  # float32 tensors of the size of a chunk's logits


@dataclass(frozen=True)
class PassSettings:
    """Settings of a pass over one bin."""

    tokens: int
    dtype: str
    device: str  # cpu | cuda
    recompute: bool  # each layer saves its input only
    trains_matrices: bool = True  # false: adapters are trained
    is_sharded: bool = False  # gradients of a part of the model stay until they are reduced

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_fused(self) -> bool:
        """True if fused kernels compute."""
        return self.device == "cpu" and self.dtype == "float32"

    @property
    def widens(self) -> bool:
        """True if norms and attention compute on float32 copies."""
        return self.device == "cpu" and self.dtype != "float32"


def estimate_pass_bytes(shape: ModelConfig, settings: PassSettings, part_bytes: int = 0) -> int:
    """Return the peak of a forward and backward pass, without parameters and their gradients.

    `part_bytes`: gradients of a part, which take the place of a layer's activations.
    """
    d, token_bytes = shape.hidden_size, settings.width * settings.tokens
    sizes = ModelSizes(shape)
    layers = [(_count_layer(shape, settings, kind), n) for kind, n in sizes.layer_kinds.items()]
    largest = max(numbers for numbers, _ in layers)
    saved = sum(numbers * count for numbers, count in layers)
    if settings.recompute:
        saved = d * shape.num_layers + largest
    saved += 3 * d  # input and output of the final norm, and outputs of trained positions
    slopes = d + max(_count_slopes(shape, settings, kind) for kind in sizes.layer_kinds)
    layer_bytes = token_bytes * slopes
    head_bytes = _estimate_logit_bytes(shape, settings)
    embedding_bytes = 0
    if settings.trains_matrices:
        layer_bytes += settings.width * sizes.largest_matrix
        embedding_bytes = settings.width * sizes.embedding
        if not (shape.tie_embeddings or settings.is_sharded):
            head_bytes += embedding_bytes  # added to its sum at once
            embedding_bytes = 0
    part_bytes -= token_bytes * largest
    return token_bytes * saved + embedding_bytes + max(layer_bytes, head_bytes, part_bytes)


def estimate_attention_rank_bytes(shape: ModelConfig, settings: PassSettings, bins: int) -> int:
    """Return the same for a rank whose experts are on other ranks, with `bins` bins at a time."""
    d, k = shape.hidden_size, shape.num_experts_per_token
    each = d + k * d  # residual stream, and outputs of experts
    layer = _count_attention(shape, settings) + _count_norm(shape, settings)
    layer += _count_routing(shape, settings) + k * d + _count_shared_expert(shape, settings)
    saved = shape.num_layers * (each + d if settings.recompute else layer + each)
    head_bytes = _estimate_logit_bytes(shape, settings)
    head_bytes += settings.width * ModelSizes(shape).embedding
    return settings.width * settings.tokens * (bins * saved + layer + 3 * d) + head_bytes


def estimate_expert_rank_bytes(shape: ModelConfig, settings: PassSettings, rows: float) -> int:
    """Return the same for a rank with experts only that receives `rows` rows in each layer."""
    d, copies = shape.hidden_size, 3 if settings.is_fused else 4
    row = d if settings.recompute else 2 * d + copies * shape.expert_ffn_size
    slopes = 2 * d + 4 * shape.expert_ffn_size
    matrix = ModelSizes(shape).largest_matrix * settings.width
    return round(settings.width * rows * (len(shape.sparse_layers) * row + slopes)) + matrix


def _count_layer(shape: ModelConfig, settings: PassSettings, is_sparse: bool) -> int:
    """Return the numbers of a token that a layer saves."""
    d = shape.hidden_size
    found = _count_attention(shape, settings) + _count_norm(shape, settings)
    copies = 3 if settings.is_fused else 4
    if not is_sparse:
        return found + copies * shape.ffn_size
    # rows in the order of experts, and outputs in the order of tokens
    k = shape.num_experts_per_token
    found += k * (2 * d + copies * shape.expert_ffn_size)
    return found + _count_routing(shape, settings) + _count_shared_expert(shape, settings)


def _count_norm(shape: ModelConfig, settings: PassSettings) -> int:
    """Return the numbers of a norm: its input, which is the residual stream, and its output."""
    return (4 if settings.widens else 2) * shape.hidden_size


def _count_attention(shape: ModelConfig, settings: PassSettings) -> int:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    projected = queries + 2 * keys
    found = _count_norm(shape, settings)
    if settings.is_fused:
        return found + projected * (1 + shape.qk_norm) + queries
    if settings.widens:
        normed = 3 * (queries + keys) * shape.qk_norm
        return found + normed + 2 * projected + 3 * queries
    return found + projected + 2 * queries + keys


def _count_routing(shape: ModelConfig, settings: PassSettings) -> int:
    """Return the router's probabilities, and the indices of the order by expert."""
    indices = 3 * INDEX_BYTES * shape.num_experts_per_token
    return (FLOAT_BYTES * shape.num_experts + indices) // settings.width


def _count_shared_expert(shape: ModelConfig, settings: PassSettings) -> int:
    if not (wide := shape.shared_expert_ffn_size):
        return 0
    return (3 if settings.is_fused else 4) * wide + shape.hidden_size


def _count_slopes(shape: ModelConfig, settings: PassSettings, is_sparse: bool) -> int:
    """Return the numbers of a token of the gradients that a feed-forward part has at a time."""
    copies = 2 if settings.is_fused else 4
    if not is_sparse:
        return copies * shape.ffn_size
    k, d = shape.num_experts_per_token, shape.hidden_size
    return k * (2 * d + copies * shape.expert_ffn_size)


def _estimate_logit_bytes(shape: ModelConfig, settings: PassSettings) -> int:
    """Return the bytes of a chunk's logits, and of the slope of the hidden states."""
    tokens = settings.tokens
    ids = min(shape.vocab_size, max(MIN_CHUNK_IDS, MAX_LOGITS[settings.device] // tokens))
    return FLOAT_BYTES * tokens * (LOGIT_COPIES * ids + shape.hidden_size)
