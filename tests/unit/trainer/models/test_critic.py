"""Critic of PPO: its values and their loss, its checkpoints, and its training."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from meshrl.common.job.config import AlgorithmConfig, JobConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.packing import (
    Bin,
    TrainingSequence,
    build_bin,
    make_bins,
    pack_sequences,
)
from meshrl.services.trainer.learner.aggregation import compute_denominator
from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from meshrl.services.trainer.learner.stats import build_update_metrics
from meshrl.services.trainer.losses.terms import LossTerms
from meshrl.services.trainer.models import critic
from meshrl.services.trainer.models.forward import enable_activation_checkpointing
from tests.attention import causal_attention
from tests.unit.trainer.state_transfer import transfer_state

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=24,
    tie_embeddings=False,
    max_positions=64,
)
PPO = AlgorithmConfig("ppo", gae_lambda=0.95)
RATES = OptimizerConfig(muon_lr=0.01, adamw_lr=0.01)


def learner(seed: int = 0, config: AlgorithmConfig = PPO, checkpointed: bool = False) -> Learner:
    model = Decoder(MODEL)
    model.initialise(torch.Generator().manual_seed(seed))
    if checkpointed:
        enable_activation_checkpointing(model)
    return Learner(model, RATES, config)


def sequences(count: int = 6, seed: int = 4) -> list[TrainingSequence]:
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        n = int(draw.integers(4, 20))
        mask = draw.random(n) < 0.6
        mask[-1] = True
        logprobs = np.where(mask, draw.normal(-3.4, 0.1, n), 0).astype(np.float32)
        tokens, versions = draw.integers(0, 32, n).astype(np.int32), np.where(mask, 0, -1)
        reward = np.array(draw.normal(), np.float32)
        made.append(TrainingSequence(tokens, logprobs, mask, versions.astype(np.int32), reward))
    return made


def prepare_batch(
    one: Learner, made: list[TrainingSequence], budget: int = 64
) -> list[TrainingSequence]:
    """Return a batch prepared as in a step: scored by the critic, then given advantages and
    returns.
    """
    for members in pack_sequences(made, budget):
        scores, start = one.score(build_bin(members, 0), "values"), 0
        for sequence in members:
            values = np.zeros(len(sequence.tokens), np.float32)
            values[1:] = scores[start : start + sequence.position_count]
            sequence.extras["values"] = values
            start += sequence.position_count
    prepare = get_algorithm("ppo").prepare_advantages
    assert prepare is not None
    prepare(made, PPO)
    return made


def make_trained_critic(one: Learner, seed: int = 1) -> Learner:
    """Return the same learner with a critic that differs from its policy and predicts values other
    than 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in critic.get_critic(one.model).parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return one


def plain_values(one: Learner, sequence: TrainingSequence) -> torch.Tensor:
    """Compute the values of one sequence by itself."""
    found = critic.get_critic(one.model)
    tokens = torch.from_numpy(sequence.tokens[None, :-1]).long()
    hidden = found.trunk(tokens, torch.arange(tokens.shape[1])[None], causal_attention)
    values: torch.Tensor = (hidden[0] * found.head).sum(-1) + found.bias
    return values


@pytest.mark.parametrize("budget", [20, 64, 500])
def test_values_of_a_bin_equal_those_of_single_sequences(budget: int) -> None:
    one, made = make_trained_critic(learner()), sequences()
    for members in pack_sequences(made, budget):
        bin = build_bin(members, 0)
        scores = one.score(bin, "values")
        for sequence, (start, end) in zip(members, itertools.pairwise(bin.cu_seqlens), strict=True):
            own = plain_values(one, sequence).detach().numpy()
            expected = np.where(sequence.loss_mask[1:], own, 0)
            assert scores[start:end] == pytest.approx(expected, abs=1e-5)


def test_critic_starts_from_its_policy_and_predicts_zero() -> None:
    one = learner()
    trunk = dict(critic.get_critic(one.model).trunk.named_parameters())
    own = dict(one.model.named_parameters())
    assert "unembedding" not in trunk and "unembedding" in own
    assert all(torch.equal(tensor, own[name]) for name, tensor in trunk.items())
    assert not one.score(make_bins(sequences(), 500)[0], "values").any()


def test_critic_starts_from_the_warm_weights_of_its_policy() -> None:
    one, other = learner(), learner(seed=5)
    one.load_weights(other.get_weights())
    trunk = dict(critic.get_critic(one.model).trunk.named_parameters())
    assert all(torch.equal(tensor, other.get_weights()[name]) for name, tensor in trunk.items())


def test_scoring_does_not_change_the_critic() -> None:
    one = make_trained_critic(learner())
    before = [p.detach().clone() for p in critic.get_critic(one.model).parameters()]
    one.score(make_bins(sequences(), 500)[0], "values")
    now = critic.get_critic(one.model).parameters()
    assert all(torch.equal(p, was) for p, was in zip(now, before, strict=True))


def count_saved_numbers(one: Learner, bin: Bin) -> int:
    """Return how many numbers a pass of the critic saves for the backward pass."""
    saved_counts = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved_counts[tensor.data_ptr()] = tensor.numel()
        return tensor

    own = {p.data_ptr() for p in one.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert critic.compute_values(one.model, bin).requires_grad
    return sum(count for at, count in saved_counts.items() if at not in own)


def test_critic_recomputes_activations_like_its_policy() -> None:
    plain, again = make_trained_critic(learner()), make_trained_critic(learner(checkpointed=True))
    made = prepare_batch(plain, sequences(20))
    (bin,) = make_bins(made, 500)
    assert torch.equal(plain.compute_gradient(bin)[0], again.compute_gradient(bin)[0])
    assert count_saved_numbers(again, bin) < 0.6 * count_saved_numbers(plain, bin)


def test_critic_weights_are_not_published() -> None:
    weights = learner().get_weights()
    assert set(weights) == set(dict(Decoder(MODEL).named_parameters()))


@pytest.mark.parametrize("seed", range(4))
def test_value_loss_matches_the_clipped_formula(seed: int) -> None:
    draw = np.random.default_rng(seed)
    found, before, returns = (torch.from_numpy(draw.normal(size=9)) for _ in range(3))
    found.requires_grad_()
    nothing = torch.zeros(9)
    extras = {"values": before, "returns": returns}
    one = torch.zeros(9, dtype=torch.int64)
    terms = LossTerms(nothing, nothing, nothing, nothing, one, 1, extras)
    losses = critic.compute_value_losses(
        found, terms, torch.ones(9), AlgorithmConfig(value_clip=0.3)
    )
    losses.sum().backward()
    assert found.grad is not None
    for v, old, target, loss, slope in zip(
        found.tolist(), before.tolist(), returns.tolist(), losses.tolist(), found.grad, strict=True
    ):
        near = old + min(max(v - old, -0.3), 0.3)
        whole, bounded = (v - target) ** 2 / 2, (near - target) ** 2 / 2
        assert loss == pytest.approx(max(whole, bounded))
        inside = near == v
        expected = v - target if inside or whole > bounded else 0.0
        assert float(slope) == pytest.approx(expected)


def plain_gradient(one: Learner, made: list[TrainingSequence]) -> torch.Tensor:
    """Compute the gradient of both losses, sequence by sequence, in the order of the parameters."""
    one.model.zero_grad()
    total = torch.zeros(())
    for s in made:
        own = torch.from_numpy(s.loss_mask[1:])
        tokens = torch.from_numpy(s.tokens).long()
        places = torch.arange(len(tokens) - 1)[None]
        hidden = one.model(tokens[None, :-1], places, causal_attention)
        logprobs = (
            one.model.compute_logits(hidden)[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        )
        ratio = (logprobs - torch.from_numpy(s.logprobs[1:])).exp()
        worth = torch.from_numpy(s.advantages[1:])
        policy = -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth)
        values, before = plain_values(one, s), torch.from_numpy(s.extras["values"][1:])
        returns = torch.from_numpy(s.extras["returns"][1:])
        near = before + (values - before).clamp(-0.2, 0.2)
        value = torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
        total = total + (policy + PPO.value_coefficient * value)[own].sum()
    total.backward()
    return torch.cat([cast(torch.Tensor, p.grad).reshape(-1) for p in one.model.parameters()])


@pytest.mark.parametrize("budget", [40, 500])
def test_gradient_sums_both_losses_for_any_packing(budget: int) -> None:
    one = make_trained_critic(learner())
    made = prepare_batch(one, sequences())
    gradient, stats = sum_gradients(one.compute_gradient(bin) for bin in make_bins(made, budget))
    assert torch.allclose(gradient, plain_gradient(one, made), rtol=1e-3, atol=1e-4)
    assert stats.value_tokens == stats.tokens and stats.value_loss_sum > 0


def test_bin_without_weight_changes_neither_model() -> None:
    one = make_trained_critic(learner())
    (bin,) = make_bins(sequences(), 500)
    bin.weight[:] = 0
    gradient, _ = one.compute_gradient(bin)
    assert not gradient.any()


def test_critic_resumes_from_its_saved_state(tmp_path: Path) -> None:
    first, second = learner(), learner(seed=7)
    job = JobConfig(algorithm=PPO)

    def step(one: Learner, seed: int) -> None:
        made = prepare_batch(one, sequences(seed=seed))
        gradient, _ = sum_gradients(one.compute_gradient(bin) for bin in make_bins(made, 64))
        one.apply_gradient(gradient, compute_denominator(made, job), 1.0)

    step(first, 1)
    transfer_state(first, second, tmp_path / "state")
    for one in (first, second):
        step(one, 2)
    own = dict(second.model.named_parameters())
    assert all(torch.equal(p, own[name]) for name, p in first.model.named_parameters())


def own(made: list[TrainingSequence], name: str) -> np.ndarray:
    """Return an extra of all tokens that carry loss, sequence by sequence."""
    return np.concatenate(
        [s.extras[name][s.loss_mask & (np.arange(len(s.loss_mask)) > 0)] for s in made]
    )


@pytest.mark.parametrize("clip_norm", [1e-3, 1e3])
def test_critic_bias_moves_to_the_mean_return(clip_norm: float) -> None:
    """Check that one update sets the critic's bias to the mean return, however far the gradient is
    clipped. Later updates follow by fifths.
    """
    one, job = learner(), JobConfig(algorithm=PPO)
    one._optimizer_config = replace(RATES, clip_norm=clip_norm)
    bias = critic.get_critic(one.model).bias.detach()
    for update in range(7):
        made = prepare_batch(one, sequences(seed=update))
        residual = (own(made, "returns") - own(made, "values")).mean()
        expected = float(bias) + residual * max(1 / (update + 1), 0.2)
        gradient, _ = sum_gradients(one.compute_gradient(bin) for bin in make_bins(made, 64))
        one.apply_gradient(gradient, compute_denominator(made, job), 1.0)
        assert float(bias) == pytest.approx(expected, abs=1e-4)


def test_explained_variance_covers_tokens_with_loss() -> None:
    one = make_trained_critic(learner())
    made = prepare_batch(one, sequences(20))
    for s in made:
        s.extras["values"][~s.loss_mask], s.extras["returns"][~s.loss_mask] = 1e3, -1e3
    _, stats = sum_gradients(one.compute_gradient(bin) for bin in make_bins(made, 40))
    returns, values = own(made, "returns").astype(float), own(made, "values").astype(float)
    found = build_update_metrics(1, 0.0, stats, 1.0)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert found["explained_variance"] == pytest.approx(expected, abs=1e-5)
    assert found["value_loss"] == pytest.approx(np.mean((returns - values) ** 2) / 2, rel=1e-4)


def sample_trajectories(
    one: Learner, draw: np.random.Generator, count: int = 32, length: int = 5
) -> list[TrainingSequence]:
    """Return trajectories of the learner's own policy after a prompt of one token, 0 to 3."""
    tokens = np.zeros((count, length + 1), np.int32)
    tokens[:, 0] = draw.integers(0, 4, count)
    logprobs = np.zeros((count, length + 1), np.float32)
    for t in range(length):
        with torch.no_grad():
            places = torch.arange(t + 1)[None].expand(count, -1)
            hidden = one.model(torch.from_numpy(tokens[:, : t + 1]), places, causal_attention)
            table = one.model.compute_logits(hidden[:, -1]).log_softmax(-1).numpy()
        tokens[:, t + 1] = (table + draw.gumbel(size=table.shape)).argmax(-1)
        logprobs[:, t + 1] = np.take_along_axis(table, tokens[:, t + 1, None], 1)[:, 0]
    mask, nothing = np.arange(length + 1) > 0, np.zeros(length + 1, np.int32)
    worth = (tokens[:, 1:] == 5).sum(1) + 3.0 * tokens[:, 0]
    return [
        TrainingSequence(row, now, mask, nothing, np.array(reward, np.float32))
        for row, now, reward in zip(tokens, logprobs, worth, strict=True)
    ]


@pytest.mark.rotating(3)
def test_ppo_learns_the_rewarded_token_and_its_value() -> None:
    """Check that PPO learns the rewarded token and its value. Token 5 is worth 1, from 1 in 32 to
    most tokens; the critic predicts a prompt's value.
    """
    one, job, draw = learner(), JobConfig(algorithm=PPO), np.random.default_rng(0)
    shares, explained = [], []
    for _ in range(40):
        made = sample_trajectories(one, draw)
        shares.append(np.mean([s.tokens[1:] == 5 for s in made]))
        bins = make_bins(prepare_batch(one, made), 256)
        for _update in range(2):
            gradient, stats = sum_gradients(one.compute_gradient(bin) for bin in bins)
            one.apply_gradient(gradient, compute_denominator(made, job), 1.0)
        explained.append(
            build_update_metrics(len(bins), 0.0, stats, stats.tokens)["explained_variance"]
        )
    assert np.mean(shares[:3]) < 0.1 < 0.6 < np.mean(shares[-3:])
    assert explained[0] == pytest.approx(0.0, abs=1e-6) and np.mean(explained[-5:]) > 0.8
