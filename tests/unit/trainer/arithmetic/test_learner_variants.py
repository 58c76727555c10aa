"""Learner variants compared with plain float32: adapters, reduced precision, experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.job.config import AlgorithmConfig, LoraConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.lora import is_adapter_tensor
from meshrl.services.trainer.bins.packing import Bin, make_bins
from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from tests.unit.trainer.arithmetic.test_learner import MODEL, sequences
from tests.unit.trainer.state_transfer import transfer_state

RATES = OptimizerConfig(muon_lr=0.0, adamw_lr=0.01)


def learner(config: ModelConfig = MODEL, **options: Any) -> Learner:
    model = Decoder(config)
    model.initialise(torch.Generator().manual_seed(3))
    return Learner(model, RATES, AlgorithmConfig(), **options)


def good_bins(one: Learner, count: int = 12) -> list[Bin]:
    made = sequences(count)
    for sequence in made:
        sequence.advantages = np.ones((), np.float32)
    bins = make_bins(made, 2560)
    for bin in bins:
        bin.behaviour_logprobs[:] = one.score(bin)
    return bins


def train_steps(one: Learner, steps: int = 4) -> tuple[float, float]:
    """Return the log-probability of good trajectories before and after some steps on them."""
    bins = good_bins(one)
    before = sum(float(one.score(bin).sum()) for bin in bins)
    for _ in range(steps):
        for bin in bins:
            bin.behaviour_logprobs[:] = one.score(bin)
        gradient, stats = sum_gradients(one.compute_gradient(bin) for bin in bins)
        assert gradient.dtype == torch.float32 and gradient.numel() == one.parameter_count
        one.apply_gradient(gradient, stats.tokens, 1.0)
    return before, sum(float(one.score(bin).sum()) for bin in bins)


def test_adapters_are_trained_and_the_base_is_fixed() -> None:
    one = learner()
    base = one.copy_weights()
    one.add_adapters(LoraConfig(rank=4), seed=1)
    assert one.parameter_count < sum(tensor.numel() for tensor in base.values()) / 2
    before, after = train_steps(one)
    assert after > before + 1
    now = one.get_weights()
    assert all(torch.equal(tensor, now[name]) for name, tensor in base.items())
    assert any(
        is_adapter_tensor(name) and name.endswith(".b") and bool(t.any()) for name, t in now.items()
    )


def test_adapters_resume_from_their_saved_state(tmp_path: Path) -> None:

    first, second = learner(), learner()
    for one in (first, second):
        one.add_adapters(LoraConfig(rank=4), seed=1)
    train_steps(first, steps=2)
    transfer_state(first, second, tmp_path / "state")
    assert train_steps(first, steps=1) == train_steps(second, steps=1)


def test_bfloat16_passes_train_float32_masters() -> None:
    wide, narrow = learner(), learner(dtype=torch.bfloat16)
    for one in (wide, narrow):
        before, after = train_steps(one)
        assert after > before + 1
    assert all(tensor.dtype == torch.float32 for tensor in narrow.get_weights().values())
    bins = good_bins(narrow)
    for name, tensor in narrow.get_weights().items():
        assert torch.allclose(tensor, wide.get_weights()[name], atol=0.1), name
    exact = learner()
    exact.load_weights(narrow.copy_weights())
    gap = max(float(np.abs(exact.score(bin) - narrow.score(bin)).max()) for bin in bins)
    assert 0 < gap < 0.1


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_balance_loss_balances_the_experts(coefficient: float) -> None:
    config = replace(
        MODEL,
        architecture="qwen3_moe",
        qk_norm=True,
        num_experts=4,
        num_experts_per_token=2,
        expert_ffn_size=16,
        router_aux_loss_coef=coefficient,
    )
    one = learner(config)
    (bin,) = make_bins(sequences(), 2560)
    bin.advantages[:] = 0.0  # only the balance is left to learn
    gradient, _ = one.compute_gradient(bin)
    assert bool(gradient.any()) == (coefficient > 0)
