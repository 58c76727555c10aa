"""Tiny model and seeded batches, which any number of ranks must train equally."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshrl.common.job.config import AlgorithmConfig, LoraConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.packing import Bin, TrainingSequence, make_bins
from meshrl.services.trainer.learner.learner import Learner

STEPS = 3
MODEL_SEED = 7
BINS = 5  # of each step: no multiple of two or three ranks
VOCABULARY = 37
OPTIMIZER = OptimizerConfig(muon_lr=0.003, adamw_lr=0.001, weight_decay=0.01)
MODEL = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


MIXTURE = MODEL | {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,  # its gate is one row, of which two ranks have none
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.01,
}


@dataclass(frozen=True)
class Variant:
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    adapters: LoraConfig = field(default_factory=LoraConfig)
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    dtype: torch.dtype = torch.float32
    expert_parallel: int = 1
    large: bool = False  # replicated parameters are freed after use


VARIANTS = {
    "plain": Variant(),
    "critic": Variant(AlgorithmConfig(name="ppo")),
    "adapters": Variant(adapters=LoraConfig(rank=2)),
    "mixture": Variant(AlgorithmConfig(entropy_coefficient=0.05), model=MIXTURE),
    "bfloat16": Variant(AlgorithmConfig(entropy_coefficient=0.05), dtype=torch.bfloat16),
    "mixed": Variant(model=MIXTURE, dtype=torch.bfloat16),
    "split": Variant(model=MIXTURE | {"num_experts": 6}, expert_parallel=3),
}
# On four ranks, of which two have the same experts: three each, which they cannot share evenly.
SHARED = {
    "shared": Variant(
        AlgorithmConfig(name="ppo"),
        model=MIXTURE | {"num_experts": 6, "num_experts_per_tok": 1},
        expert_parallel=2,
    ),
    "large": Variant(model=MIXTURE | {"num_experts": 6}, expert_parallel=2, large=True),
    # Experts see the tokens of all ranks at once, so their gradients are rounded differently.
    "narrow": Variant(model=MIXTURE, dtype=torch.bfloat16, expert_parallel=2),
}


def variant_of(name: str) -> Variant:
    return (VARIANTS | SHARED)[name]


def has_critic(variant: str) -> bool:
    return variant_of(variant).algorithm.name == "ppo"


def fresh_model(variant: str = "plain") -> Decoder:
    model = Decoder(ModelConfig.from_hf(variant_of(variant).model))
    generator = torch.Generator()
    generator.manual_seed(MODEL_SEED)
    model.initialise(generator)
    return model


def fresh_learner(variant: str) -> Learner:
    chosen = variant_of(variant)
    learner = Learner(fresh_model(variant), OPTIMIZER, chosen.algorithm, dtype=chosen.dtype)
    if chosen.adapters.rank:
        learner.add_adapters(chosen.adapters, seed=3)
    return learner


def given_weights(variant: str) -> dict[str, Tensor]:
    """Return the weights that training starts from in place of the model's own."""
    return {name: 0.9 * tensor for name, tensor in fresh_learner(variant).get_weights().items()}


def bins_of_step(step: int) -> list[Bin]:
    """Build BINS bins of one or two sequences."""
    random = np.random.default_rng(step)
    return [
        make_bins([sequence(random, step) for _ in range(1 + number % 2)], 80, step)[0]
        for number in range(BINS)
    ]


def sequence(random: np.random.Generator, step: int) -> TrainingSequence:
    length = int(random.integers(8, 40))
    mask = np.arange(length) >= 3
    return TrainingSequence(
        tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
        logprobs=np.where(mask, -3.6 + 0.1 * random.standard_normal(length), 0).astype(np.float32),
        loss_mask=mask,
        versions=np.where(mask, step, -1).astype(np.int32),
        advantages=np.array(random.standard_normal(), np.float32),
        extras={
            name: random.standard_normal(length).astype(np.float32)
            for name in ("values", "returns")  # compared by a critic's losses
        },
    )
