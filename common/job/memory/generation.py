"""Bytes of the processes that generate or score: engines, and frozen models."""

from __future__ import annotations

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.activations import DTYPE_BYTES, FLOAT_BYTES
from meshrl.common.job.memory.model_sizes import ModelSizes
from meshrl.common.job.memory.process_memory import CONTEXT_BYTES, ProcessMemory
from meshrl.common.model.architecture.config import ModelConfig

# As in common/generation: tokens of a block of the cache, known tokens that a step computes, and
# tokens with logits while a model scores.
BLOCK_TOKENS, MAX_PREFILL_TOKENS, SCORE_CHUNK_TOKENS = 16, 512, 512
NATIVE_HEAD_WIDTHS = (32, 64, 128)  # of the C++ decoder, which pads other heads
LOGIT_COPIES = {"native": 1, "torch": 5}  # float32 rows of the vocabulary while a step samples


def plan_engine(config: JobConfig, shape: ModelConfig, count: int, degree: int) -> ProcessMemory:
    """Return the bytes of each of `count` engines' `degree` workers."""
    rollout, device = config.rollout, config.mesh.device
    width, tokens = DTYPE_BYTES[rollout.dtype], rollout.kv_tokens
    is_native = uses_native_backend(rollout.backend, device) and rollout.engine != "sglang"
    token_bytes = count_cache_bytes(shape, width, degree, is_native)
    least = (count_blocks(rollout.max_tokens) + 1) * BLOCK_TOKENS
    all_slots = max(least, rollout.slots * count_blocks(rollout.max_tokens) * BLOCK_TOKENS)
    if rollout.engine == "sglang":
        all_slots = least  # it takes what its GPU has free
    elif allowed := rollout.cache_memory.size_bytes // token_bytes:
        all_slots = max(least, min(all_slots, allowed))
    weights = count_weight_bytes(shape, width, is_native) // degree
    adapters = ModelSizes(shape).count_adapters(config.lora.rank, config.lora.targets)
    if config.lora.engine_mode != "merged":
        weights += width * adapters // degree
    activations = estimate_step_bytes(shape, rollout.slots, width, is_native) // degree
    return ProcessMemory(
        process="engine" if degree == 1 else f"engine, each of {degree} workers",
        count=count * degree,
        weights=weights,
        activations=activations,
        cache=token_bytes * (max(tokens, least) if tokens else all_slots),
        least_cache=token_bytes * max(tokens, least),
        context=CONTEXT_BYTES[device],
    )


def plan_frozen_model(config: JobConfig, role: str, shape: ModelConfig) -> ProcessMemory:
    """Return the bytes of a frozen model, which scores one sequence at a time."""
    frozen, device = config.models.models_by_role[role], config.mesh.device
    width, tokens = DTYPE_BYTES[frozen.dtype], frozen.max_tokens or config.rollout.max_tokens
    is_native = uses_native_backend(frozen.backend, device)
    cache = (count_blocks(tokens) + 1) * BLOCK_TOKENS
    cache *= count_cache_bytes(shape, width, 1, is_native)
    rows = min(tokens, SCORE_CHUNK_TOKENS)
    return ProcessMemory(
        process=f"frozen {role}",
        weights=count_weight_bytes(shape, width, is_native),
        activations=estimate_step_bytes(shape, rows, width, is_native),
        cache=cache,
        least_cache=cache,
        context=CONTEXT_BYTES[device],
    )


def uses_native_backend(backend: str, device: str) -> bool:
    """Return True if the C++ decoder computes."""
    return backend == "native" or (backend == "auto" and device == "cpu")


def count_blocks(tokens: int) -> int:
    """Return the blocks of the cache that these tokens take."""
    return -(-tokens // BLOCK_TOKENS)


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


def estimate_step_bytes(shape: ModelConfig, logit_rows: int, width: int, is_native: bool) -> int:
    """Return the buffers of a step, which computes known tokens beside each slot's next one."""
    tokens = MAX_PREFILL_TOKENS + logit_rows
    d, heads = shape.hidden_size, shape.num_heads + 2 * shape.num_kv_heads
    experts = shape.num_experts_per_token * (d + shape.expert_ffn_size)
    ffn = max(shape.ffn_size, experts + shape.shared_expert_ffn_size)
    features = 4 * d + 2 * heads * shape.head_dim + (1 if is_native else 4) * ffn
    copies = LOGIT_COPIES["native" if is_native else "torch"]
    return width * tokens * features + FLOAT_BYTES * copies * logit_rows * shape.vocab_size
