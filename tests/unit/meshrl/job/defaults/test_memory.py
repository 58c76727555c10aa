"""Estimated memory of a job's processes, against the tensors that a learner and a pass hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from meshrl.common.job.config import (
    AlgorithmConfig,
    JobConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainingConfig,
)
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.job.defaults.memory import estimate_activations, estimate_core, estimate_memory
from meshrl.kernels.ops.varlen import VarlenAttention
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.models.forward import enable_activation_checkpointing

SHAPE = ModelConfig("qwen3", 64, 64, 6, 4, 2, 16, 128, qk_norm=True, tie_embeddings=True)
TOKENS = 256


def count_bytes(tensors: dict[str, Tensor], prefix: str) -> int:
    return sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(prefix))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": OptimizerConfig(muon_lr=0.0)},
        {"optimizer": OptimizerConfig(muon_lr=0.003)},
        {"lora": LoraConfig(rank=4), "training": TrainingConfig(dtype="bfloat16")},
    ],
)
def test_core_is_estimated_as_its_learner_is(algorithm: str, changes: dict[str, object]) -> None:
    config = replace(JobConfig(algorithm=AlgorithmConfig(name=algorithm)), **changes)  # type: ignore[arg-type]
    dtype = getattr(torch, config.training.dtype)
    learner = Learner(Decoder(SHAPE), config.optimizer, config.algorithm, dtype=dtype)
    if config.lora.rank:
        learner.add_adapters(config.lora, 0)
    estimate = estimate_core(config, SHAPE)
    held = learner.get_tensors()
    weights = count_bytes(held, "model.") + count_bytes(learner.get_derived_tensors(), "")
    assert estimate.weights == pytest.approx(weights, rel=0.01)
    assert estimate.optimizer == pytest.approx(count_bytes(held, "optimizer."), rel=0.02)
    assert estimate.gradients == pytest.approx(4 * learner.parameter_count, rel=0.01)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, num_heads=8, ffn_size=64)])
def test_activations_are_estimated_as_a_pass_saves_them(
    shape: ModelConfig, recomputes: bool
) -> None:
    model = Decoder(shape)
    model.initialise(torch.Generator().manual_seed(0))
    if recomputes:
        enable_activation_checkpointing(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in own:
            saved[address] = tensor
        return tensor

    attention = VarlenAttention(np.array([0, TOKENS], np.int32), TOKENS, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        hidden = model(torch.zeros(TOKENS, dtype=torch.int32), torch.arange(TOKENS), attention)
    assert hidden.requires_grad
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    training = TrainingConfig(bin_tokens=TOKENS, activation_checkpointing=recomputes)
    job = JobConfig(training=training, rollout=RolloutConfig(max_tokens=TOKENS))
    per_layer = 4 * TOKENS * (6 * 64 + 4 * 16 * (shape.num_heads + 2) + 4 * shape.ffn_size)
    logits = 3 * 4 * TOKENS * shape.vocab_size
    found = estimate_activations(job, shape) - logits - per_layer * recomputes
    assert found == pytest.approx(measured, rel=0.1)


def test_engine_and_core_are_counted_by_worker() -> None:
    model = replace(JobConfig().model, config=SHAPE.to_hf())
    rollout = RolloutConfig(slots=8, max_tokens=64, dtype="bfloat16")
    job = JobConfig(model=model, rollout=rollout, mesh=MeshConfig(workers=4))
    core, engine = estimate_memory(job)
    assert (core.process, core.count, engine.process, engine.count) == ("core", 1, "engine", 3)
    assert engine.weights == 2 * SHAPE.num_parameters
    assert engine.kv_cache == 8 * 64 * 6 * 2 * 2 * 16 * 2
    ranks = estimate_memory(replace(job, training=TrainingConfig(ranks=2)))[0]
    assert ranks.count == 2 and ranks.optimizer == core.optimizer // 2
