"""Bytes of the processes that train: ranks of the core, and hybrids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.activations import (
    DTYPE_BYTES,
    FLOAT_BYTES,
    PassSettings,
    estimate_attention_rank_bytes,
    estimate_expert_rank_bytes,
    estimate_pass_bytes,
)
from meshrl.common.job.memory.model_sizes import ModelSizes
from meshrl.common.job.memory.process_memory import CONTEXT_BYTES, ProcessMemory
from meshrl.common.model.architecture.config import ModelConfig

# As in services/trainer: float32 bytes of a model that each rank gathers as a whole, and the
# numbers that the optimizer updates at a time.
MAX_UNSHARDED_BYTES, MAX_UPDATE_NUMBERS = 2 << 30, 1 << 24
# Tensors of that size while AdamW updates; while Muon does; and while ranks exchange rows for Muon.
ADAMW_COPIES, MUON_COPIES, SHARDED_MUON_COPIES = 3, 5, 10


@dataclass(frozen=True)
class TrainedModel:
    """Model that a job trains, with its critic and adapters, in numbers of parameters."""

    config: JobConfig
    shape: ModelConfig

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the policy."""
        return ModelSizes(self.shape)

    @cached_property
    def critic(self) -> int:
        """Trunk with tied embeddings, and a head."""
        if self.config.algorithm.name != "ppo":
            return 0
        return self.sizes.layers + self.sizes.embedding + self.shape.hidden_size

    @cached_property
    def adapters(self) -> int:
        """Adapters; 0 if the model itself is trained."""
        return self.sizes.count_adapters(self.config.lora.rank, self.config.lora.targets)

    @property
    def total(self) -> int:
        """All parameters, frozen ones included."""
        return self.sizes.total + self.critic + self.adapters

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return (self.adapters or self.sizes.total) + self.critic

    @property
    def rotary_tables(self) -> int:
        """Tables of rotary embeddings."""
        return self.sizes.rotary_table * (2 if self.critic else 1)

    @cached_property
    def muon_matrices(self) -> Counter[tuple[int, ...]]:
        """Shapes of the matrices that Muon updates, with their numbers."""
        if not self.config.optimizer.muon_lr:
            return Counter()
        models = (not self.adapters) + bool(self.critic)
        return Counter({shape: models * n for shape, n in self.sizes.matrices.items() if models})

    @property
    def moments(self) -> int:
        """Numbers of the optimizer: one for each of Muon's parameters, else two."""
        muon = sum(count * prod(shape) for shape, count in self.muon_matrices.items())
        return 2 * self.trained - muon

    @property
    def pass_settings(self) -> PassSettings:
        """Settings of a pass over one full bin."""
        training = self.config.training
        return PassSettings(
            min(max(training.bin_tokens, self.config.rollout.max_tokens), self.update_tokens),
            training.dtype,
            self.config.mesh.device,
            training.activation_checkpointing,
            not self.adapters,
            training.ranks > 1,
        )

    @property
    def pass_width(self) -> int:
        """Bytes of a number in passes."""
        return DTYPE_BYTES[self.config.training.dtype]

    def estimate_pass_bytes(self, part_bytes: int = 0) -> int:
        """Return the peak of a bin's pass; the critic's is saved beside the policy's."""
        found = estimate_pass_bytes(self.shape, self.pass_settings, part_bytes)
        return found * (2 if self.critic else 1)

    def estimate_update_bytes(self, ranks: int) -> int:
        """Return the buffers of an optimizer update of a rank's rows."""
        muon = sum(count * prod(shape) for shape, count in self.muon_matrices.items())
        rest = min((self.trained - muon) // ranks, MAX_UPDATE_NUMBERS)
        found = [ADAMW_COPIES * rest]
        for shape, count in self.muon_matrices.items():
            at_once = max(1, MAX_UPDATE_NUMBERS // (prod(shape) * ranks)) * ranks
            batch = min(count, at_once) * prod(shape) // ranks
            grams = 3 * batch * min(shape[-2:]) // max(shape[-2:])
            found.append((MUON_COPIES if ranks == 1 else SHARDED_MUON_COPIES) * batch + grams)
        return FLOAT_BYTES * max(found)

    @property
    def update_tokens(self) -> int:
        """Maximum tokens of an update."""
        algorithm = self.config.algorithm
        groups = -(-algorithm.groups_per_step // algorithm.updates)
        return groups * algorithm.group_size * self.config.rollout.max_tokens

    def has_several_rounds(self, bins_per_round: int) -> bool:
        """Return True if an update may have more than one round, whose gradients are summed."""
        return self.update_tokens > bins_per_round * self.config.training.bin_tokens

    def count_sums(self, bins_per_round: int) -> int:
        """Return the sums of gradients beside that of a round: of the step, and of a block."""
        block_rounds = self.config.training.block_rounds  # 0: more than 1 only beside hybrids
        has_blocks = block_rounds > 1 and self.has_several_rounds(block_rounds * bins_per_round)
        return self.has_several_rounds(bins_per_round) + has_blocks


def plan_core(
    config: JobConfig, shape: ModelConfig, max_unsharded_bytes: int = MAX_UNSHARDED_BYTES
) -> list[ProcessMemory]:
    """Return the bytes of the core's ranks: one kind, or ranks with attention and with experts."""
    model, ranks = TrainedModel(config, shape), config.training.ranks
    if ranks == 1:
        return [_plan_single_rank(model)]
    if config.training.zebra.attention:
        return _plan_expert_split(model)
    return [_plan_sharded_rank(model, max_unsharded_bytes)]


def plan_hybrid(config: JobConfig, shape: ModelConfig, count: int) -> ProcessMemory:
    """Return the bytes of a hybrid: a core of one rank without moments and updates."""
    model, training = TrainedModel(config, shape), config.training
    # Of a bin, of the round's bins (one for each rank of the core), and of the block's rounds.
    gradients = 1 + (training.ranks > 1) + (training.block_rounds != 1)
    return ProcessMemory(
        process="hybrid",
        count=count,
        **_hold_model(model),
        gradients=gradients * FLOAT_BYTES * model.trained,
        activations=model.estimate_pass_bytes(),
        context=CONTEXT_BYTES[config.mesh.device],
    )


def _hold_model(model: TrainedModel) -> dict[str, int]:
    """Return the masters of a process with all parameters, and its copy for narrower passes."""
    masters = FLOAT_BYTES * (model.total + model.rotary_tables)
    copy = model.pass_width * (model.total + model.rotary_tables)
    return {"masters": masters, "weights": copy if model.pass_width < FLOAT_BYTES else 0}


def _plan_single_rank(model: TrainedModel) -> ProcessMemory:
    gradients = 1 + model.count_sums(1)
    passes, update = model.estimate_pass_bytes(), model.estimate_update_bytes(1)
    return ProcessMemory(
        process="core",
        **_hold_model(model),
        moments=FLOAT_BYTES * model.moments,
        gradients=gradients * FLOAT_BYTES * model.trained,
        activations=max(passes, update),
        forward_backward=passes,
        optim_step=update,
        context=CONTEXT_BYTES[model.config.mesh.device],
    )


def _plan_sharded_rank(model: TrainedModel, max_unsharded_bytes: int) -> ProcessMemory:
    """Return the bytes of a rank with rows of the parameters, which gathers them for passes.

    A small model is gathered as a whole. Of a large one these are: the root (embeddings), a critic,
    the current layer and the next. The gradient of a part is whole until it is summed over ranks.
    """
    ranks, width, sizes = model.config.training.ranks, model.pass_width, model.sizes
    split = model.config.training.expert_parallel
    apart = sizes.experts if split > 1 else 0
    whole = model.total - apart
    is_whole = FLOAT_BYTES * whole <= max_unsharded_bytes
    layer = sizes.largest_layer
    if apart:
        layer -= sizes.experts // len(model.shape.sparse_layers)
    gathered = whole if is_whole else sizes.embeddings + 2 * layer + model.critic
    gathered += apart // split if split < ranks or width < FLOAT_BYTES else 0
    part = max(layer, sizes.embeddings, model.critic) if not model.adapters else 0
    # A narrower gradient has a float32 copy that is reduced.
    part_bytes = part * (FLOAT_BYTES + (width if width < FLOAT_BYTES else FLOAT_BYTES))
    row = FLOAT_BYTES * model.trained // ranks
    sums = row * model.count_sums(ranks)
    weights = width * gathered
    # A gradient's rows are collected in the course of a pass, and then copied into one tensor.
    during_pass = weights + sums + model.estimate_pass_bytes(part_bytes)
    after_pass = weights + sums + 2 * row
    update = model.estimate_update_bytes(ranks)
    during_update = row + update  # parameters are rows again
    peak = max(during_pass, after_pass, during_update)
    return ProcessMemory(
        process="core, each rank",
        count=ranks,
        masters=FLOAT_BYTES * (model.total // ranks + model.rotary_tables),
        weights=weights,
        moments=FLOAT_BYTES * model.moments // ranks,
        gradients=sums + row,
        activations=max(0, peak - weights - sums - row),
        forward_backward=max(0, max(during_pass, after_pass) - weights - sums - row),
        optim_step=update,
        context=CONTEXT_BYTES[model.config.mesh.device],
    )


def _plan_expert_split(model: TrainedModel) -> list[ProcessMemory]:
    """Return the bytes of ranks with attention and of ranks with experts.

    Each has a copy for passes and a float32 gradient of all that it computes with: everything but
    the experts on an attention rank, its own experts on an expert rank.
    """
    training, sizes, shape = model.config.training, model.sizes, model.shape
    zebra = training.zebra
    attention, experts = zebra.attention, training.ranks - zebra.attention
    layers = len(shape.sparse_layers)
    hosted = zebra.hosted or [0]
    each = hosted * layers if len(hosted) == 1 else hosted
    expert = sizes.experts // (layers * shape.num_experts)
    own = sum(each) * expert
    remote = (sizes.experts - attention * own) // experts
    rest = sizes.total - sizes.experts
    share = sizes.experts and 1 - attention * own / sizes.experts
    bins, k = zebra.micro_batches, shape.num_experts_per_token
    settings = model.pass_settings
    rows = settings.tokens * bins * attention * k * share / experts
    hosted_rows = settings.tokens * bins * k * own / max(1, sizes.experts)
    passes = estimate_attention_rank_bytes(shape, settings, bins)
    if own:
        passes += estimate_expert_rank_bytes(shape, settings, hosted_rows)
    return [
        _plan_split_rank(
            model, "attention", attention, rest // attention + own, rest + own, passes
        ),
        _plan_split_rank(
            model,
            "expert",
            experts,
            remote,
            remote,
            estimate_expert_rank_bytes(shape, settings, rows),
        ),
    ]


def _plan_split_rank(
    model: TrainedModel, kind: str, count: int, rows: int, computed: int, activations: int
) -> ProcessMemory:
    """Return the bytes of a rank that owns `rows` parameters and computes with `computed`."""
    moments = model.moments * rows // model.trained
    sums = FLOAT_BYTES * (computed + rows * model.has_several_rounds(count))
    tables = model.rotary_tables
    return ProcessMemory(
        process=f"core, each {kind} rank",
        count=count,
        masters=FLOAT_BYTES * (rows + tables),
        weights=model.pass_width * (computed + tables),
        moments=FLOAT_BYTES * moments,
        gradients=sums,
        activations=max(activations, FLOAT_BYTES * rows),  # or the gradient of its rows
        context=CONTEXT_BYTES[model.config.mesh.device],
    )
