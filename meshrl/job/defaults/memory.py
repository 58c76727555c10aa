"""Estimate of the memory that each process with a model takes, from the job and the model's shape.

Workspaces, fragmentation and CUDA's context (about 0.5 GiB a process) come on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.config import INITIAL, JobConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import build_projections, resolve_targets
from meshrl.common.state.pool.demand.requirements import derive_requirements, shares_core_worker
from meshrl.job.model_files import load_shape, load_shape_from

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 4  # of a trained parameter, its gradient and each moment
# Logits in memory at a time, and float32 copies of them, as in kernels/ops/linear_logprob.py.
MAX_LOGITS, LOGIT_COPIES = {"cpu": 1 << 20, "cuda": 1 << 27}, 3
UNSHARDED_BYTES = 2 << 30  # a core of several ranks gathers a model of this size as a whole


@dataclass(frozen=True)
class ProcessMemory:
    """Estimated bytes of each of `count` processes, on the worker's device."""

    process: str
    count: int
    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    kv_cache: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.kv_cache


def estimate_memory(config: JobConfig) -> list[ProcessMemory]:
    """Return the estimate of each process with a model; ConfigError for an unreadable model."""
    shape, requirements = load_shape(config), derive_requirements(config.to_document())
    found = [estimate_core(config, shape)]
    hybrids = config.planner.training - 1
    others = requirements.ranks + hybrids + requirements.needs_scoring
    if requirements.needs_rollout:
        degree = requirements.smallest_engine
        count = max(1, (config.mesh.workers - others) // degree)
        if shares_core_worker(config):
            count = requirements.ranks
        found.append(_estimate_engine(config, shape, count, degree))
    if hybrids and requirements.allows_hybrids:
        found.append(_estimate_hybrid(config, shape, hybrids))
    for role, frozen in config.models.models_by_role.items():
        own = shape if frozen.path == INITIAL else load_shape_from(frozen.path, {})
        width, tokens = DTYPE_BYTES[frozen.dtype], frozen.max_tokens or config.rollout.max_tokens
        kv_cache = tokens * _count_kv_bytes(own, width)
        found.append(
            ProcessMemory(
                f"frozen {role}", 1, weights=width * own.num_parameters, kv_cache=kv_cache
            )
        )
    return found


def estimate_core(config: JobConfig, shape: ModelConfig) -> ProcessMemory:
    """Return the estimate of each rank of the core."""
    ranks, adapters = config.training.ranks, _count_adapter_parameters(config, shape)
    embedding = shape.vocab_size * shape.hidden_size
    matrices = shape.num_parameters - embedding * (1 if shape.tie_embeddings else 2)
    critic = matrices + embedding if config.algorithm.name == "ppo" else 0
    parameters = shape.num_parameters + critic + adapters
    trained = (adapters or shape.num_parameters) + critic
    moments = 2 * trained
    if config.optimizer.muon_lr:  # which has one moment, of matrices
        moments -= (0 if adapters else matrices) + (matrices if critic else 0)
    width = DTYPE_BYTES[config.training.dtype]
    weights = MASTER_BYTES * parameters // ranks
    if ranks == 1:
        weights += width * parameters if width != MASTER_BYTES else 0
    else:
        is_whole = MASTER_BYTES * parameters <= UNSHARDED_BYTES
        weights += width * parameters // (1 if is_whole else shape.num_layers)
    return ProcessMemory(
        "core" if ranks == 1 else "core, each rank",
        ranks,
        weights=weights,
        optimizer=MASTER_BYTES * moments // ranks,
        gradients=MASTER_BYTES * trained // ranks,
        activations=estimate_activations(config, shape) * (2 if critic else 1),
    )


def _estimate_hybrid(config: JobConfig, shape: ModelConfig, count: int) -> ProcessMemory:
    adapters = _count_adapter_parameters(config, shape)
    trained = adapters if config.lora.rank else shape.num_parameters
    return ProcessMemory(
        "hybrid",
        count,
        weights=DTYPE_BYTES[config.training.dtype] * (shape.num_parameters + adapters),
        gradients=MASTER_BYTES * trained,
        activations=estimate_activations(config, shape),
    )


def _estimate_engine(
    config: JobConfig, shape: ModelConfig, count: int, degree: int
) -> ProcessMemory:
    rollout = config.rollout
    width, tokens = DTYPE_BYTES[rollout.dtype], rollout.kv_tokens
    if not tokens and rollout.engine != "sglang":  # which takes what its GPU has free
        tokens = rollout.slots * rollout.max_tokens
    return ProcessMemory(
        "engine" if degree == 1 else f"engine, each of {degree} workers",
        count * degree,
        weights=width * shape.num_parameters // degree,
        kv_cache=tokens * _count_kv_bytes(shape, width, degree),
    )


def estimate_activations(config: JobConfig, shape: ModelConfig) -> int:
    """Return the bytes that a bin's forward pass saves for its backward pass, with its logits.

    A layer saves, for each token, 6 numbers of each feature of the residual stream and 4 of each
    feature of queries, keys and values' heads, and of the feed-forward part. With activation
    checkpointing each layer saves its input, and one layer at a time the rest.
    """
    tokens = max(config.training.bin_tokens, config.rollout.max_tokens)
    width, d = DTYPE_BYTES[config.training.dtype], shape.hidden_size
    heads = shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    sparse = set(shape.sparse_layers)
    expert = shape.num_experts_per_token * shape.expert_ffn_size + shape.shared_expert_ffn_size
    layers = [
        6 * d + 4 * heads + 4 * (expert if layer in sparse else shape.ffn_size)
        for layer in range(shape.num_layers)
    ]
    saved = sum(layers)
    if config.training.activation_checkpointing:
        saved = d * shape.num_layers + max(layers)
    logits = min(tokens * shape.vocab_size, MAX_LOGITS[config.mesh.device])
    return width * tokens * (saved + 2 * d) + MASTER_BYTES * LOGIT_COPIES * logits


def _count_kv_bytes(shape: ModelConfig, dtype_bytes: int, degree: int = 1) -> int:
    return int(ModelShape.from_config(shape, dtype_bytes).compute_kv_bytes_per_token(degree))


def _count_adapter_parameters(config: JobConfig, shape: ModelConfig) -> int:
    return config.lora.rank * shape.num_layers * sum(_list_adapted_widths(config, shape))


def _list_adapted_widths(config: JobConfig, shape: ModelConfig) -> Iterator[int]:
    """Yield rows plus columns of each projection of a layer that takes adapters."""
    if config.lora.rank:
        parts = build_projections(shape)
        for name in resolve_targets(shape, config.lora.targets):
            yield parts[name].rows + parts[name].columns
