"""Bytes of the processes that generate or score: engines, and frozen models."""

from __future__ import annotations

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.activations import DTYPE_BYTES, FLOAT_BYTES
from meshrl.common.job.memory.cache_blocks import (
    BLOCK_TOKENS,
    MAX_PREFILL_TOKENS,
    count_blocks,
    count_full_blocks,
    count_least_blocks,
)
from meshrl.common.job.memory.model_sizes import ModelSizes
from meshrl.common.job.memory.process_memory import CONTEXT_BYTES, ProcessMemory
from meshrl.common.model.architecture.config import ModelConfig

SCORE_CHUNK_TOKENS = 512  # with logits while a model scores, as in common/generation
NATIVE_HEAD_WIDTHS = (32, 64, 128)  # of the C++ decoder, which pads other heads
# Float32 rows of the vocabulary while a step samples; CUDA sorts with buffers of its own.
LOGIT_COPIES = {"native": 1, "torch": 5, "cuda": 8}
SCORE_COPIES = 2  # of attention scores and their softmax, on a GPU
GRAPH_BYTES = 256 << 20  # private memory of captured graphs, and of cuBLAS


def plan_engine(config: JobConfig, shape: ModelConfig, count: int, degree: int) -> ProcessMemory:
    """Return the bytes of each of `count` engines' `degree` workers."""
    rollout, device = config.rollout, config.mesh.device
    width, tokens = DTYPE_BYTES[rollout.dtype], rollout.kv_tokens
    is_sglang = rollout.engine == "sglang"
    kind = "torch" if is_sglang else choose_compute_kind(rollout.backend, device)
    is_native = kind == "native"
    token_bytes = count_cache_bytes(shape, width, degree, is_native)
    least = BLOCK_TOKENS * count_least_blocks(rollout.max_tokens)
    all_slots = BLOCK_TOKENS * count_full_blocks(rollout.slots, rollout.max_tokens)
    if is_sglang:
        all_slots = least  # it takes what its GPU has free
    elif allowed := rollout.cache_memory.size_bytes // token_bytes:
        all_slots = max(least, min(all_slots, allowed))
    weights = count_weight_bytes(shape, width, is_native) // degree
    adapters = ModelSizes(shape).count_adapters(config.lora.rank, config.lora.targets)
    if config.lora.engine_mode != "merged":
        weights += width * adapters // degree
    activations = estimate_step_bytes(shape, rollout.slots, rollout.max_tokens, width, kind)
    activations //= degree
    return ProcessMemory(
        process="engine" if degree == 1 else f"engine, each of {degree} workers",
        count=count * degree,
        weights=weights,
        activations=activations,
        reserved=0 if is_sglang else activations,
        cache=token_bytes * (max(tokens, least) if tokens else all_slots),
        least_cache=token_bytes * max(tokens, least),
        context=CONTEXT_BYTES[device],
    )


def plan_frozen_model(config: JobConfig, role: str, shape: ModelConfig) -> ProcessMemory:
    """Return the bytes of a frozen model, which scores one sequence at a time."""
    frozen, device = config.models.models_by_role[role], config.mesh.device
    width, tokens = DTYPE_BYTES[frozen.dtype], frozen.max_tokens or config.rollout.max_tokens
    kind = choose_compute_kind(frozen.backend, device)
    is_native = kind == "native"
    cache = BLOCK_TOKENS * count_least_blocks(tokens)
    cache *= count_cache_bytes(shape, width, 1, is_native)
    # Its engine reserves the bytes of a step of one slot, though it only scores.
    reserved = estimate_step_bytes(shape, 1, tokens, width, kind)
    scoring = "native" if is_native else "torch"
    rows = min(tokens, SCORE_CHUNK_TOKENS)
    return ProcessMemory(
        process=f"frozen {role}",
        weights=count_weight_bytes(shape, width, is_native),
        activations=max(reserved, estimate_step_bytes(shape, rows, tokens, width, scoring)),
        reserved=reserved,
        cache=cache,
        least_cache=cache,
        context=CONTEXT_BYTES[device],
    )


def choose_compute_kind(backend: str, device: str) -> str:
    """Return what computes: the C++ decoder (`native`), or PyTorch on a CPU or a GPU."""
    if backend == "native" or (backend == "auto" and device == "cpu"):
        return "native"
    return "cuda" if device == "cuda" and backend != "eager" else "torch"


def count_cache_bytes(shape: ModelConfig, width: int, degree: int, is_native: bool) -> int:
    """Return the bytes of a token's keys and values."""
    found = int(ModelShape.from_config(shape, width).compute_kv_bytes_per_token(degree))
    if is_native:
        padded = next((w for w in NATIVE_HEAD_WIDTHS if w >= shape.head_dim), shape.head_dim)
        return found * padded // shape.head_dim
    return found


def count_weight_bytes(shape: ModelConfig, width: int, is_native: bool) -> int:
    """Return the bytes of an engine's weights.

    The C++ decoder has embeddings in float32, beside an unembedding in the type of its weights.
    """
    sizes = ModelSizes(shape)
    if not is_native:
        return width * (sizes.total + sizes.rotary_table)
    return width * (sizes.layers + sizes.embedding) + FLOAT_BYTES * sizes.embedding


def estimate_step_bytes(
    shape: ModelConfig, logit_rows: int, max_tokens: int, width: int, kind: str
) -> int:
    """Estimate the memory of a step beside weights and cache: activations, logits, graphs.

    A step computes known tokens beside each slot's next one. On a GPU a prefill over cached tokens
    has its attention scores in memory, and their keys and values once for each head.

    Args:
        shape: Shape of the model.
        logit_rows: Rows of logits that a step computes at once.
        max_tokens: Tokens of the longest sequence.
        width: Bytes of a number of the weights.
        kind: Result of `choose_compute_kind`.
    """
    tokens = MAX_PREFILL_TOKENS + logit_rows
    d, heads = shape.hidden_size, shape.num_heads + 2 * shape.num_kv_heads
    experts = shape.num_experts_per_token * (d + shape.expert_ffn_size)
    ffn = max(shape.ffn_size, experts + shape.shared_expert_ffn_size)
    features = 4 * d + 2 * heads * shape.head_dim + (1 if kind == "native" else 4) * ffn
    found = width * tokens * features
    found += FLOAT_BYTES * LOGIT_COPIES[kind] * logit_rows * shape.vocab_size
    if kind == "cuda":
        context = count_blocks(max_tokens) * BLOCK_TOKENS
        scores = SCORE_COPIES * MAX_PREFILL_TOKENS * context * FLOAT_BYTES
        copies = 2 * 2 * context * shape.head_dim * width
        found += shape.num_heads * (scores + copies) + GRAPH_BYTES
    return found
