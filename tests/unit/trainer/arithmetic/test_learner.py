"""Gradients of bins and steps of the learner."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from meshrl.common.base.errors import MeshError
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.arithmetic.learner import Learner, add
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.packing import Sequence, make_bins
from tests.attention import causal_attention
from tests.unit.trainer.handing_over import handed_over

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=32,
    hidden_size=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn_size=24,
    tie_embeddings=True,
    max_positions=128,
)


def learner(seed: int = 0) -> Learner:
    model = Decoder(MODEL)
    model.initialise(torch.Generator().manual_seed(seed))
    return Learner(model, OptimizerConfig(), AlgorithmConfig())


def sequences(count: int = 9, version: int = 0) -> list[Sequence]:
    random = np.random.default_rng(4)
    made = []
    for _ in range(count):
        n = int(random.integers(4, 60))
        mask = random.random(n) < 0.6
        mask[-1] = True
        logprobs = np.where(mask, random.normal(-3.4, 0.3, n), 0).astype(np.float32)
        tokens = random.integers(0, 32, n).astype(np.int32)
        versions = np.where(mask, version, -1).astype(np.int32)
        advantage = np.array(random.normal(), np.float32)
        made.append(Sequence(tokens, logprobs, mask, versions, advantage))
    return made


def plain_gradient(learner: Learner, made: list[Sequence]) -> tuple[float, torch.Tensor]:
    """Sequence by sequence, without packing."""
    model = learner.model
    model.zero_grad()
    total = torch.zeros(())
    for one in made:
        tokens = torch.from_numpy(one.tokens).long()
        hidden = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], causal_attention)
        logprobs = model.logits(hidden)[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        advantage = float(one.advantages)
        ratio = (logprobs - torch.from_numpy(one.logprobs[1:])).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = -objective.clamp(min=3 * advantage) if advantage < 0 else -objective
        total = total + loss[torch.from_numpy(one.mask[1:])].sum()
    total.backward()
    return float(total.detach()), torch.cat(
        [cast(torch.Tensor, p.grad).reshape(-1) for p in model.parameters()]
    )


@pytest.mark.parametrize("budget", [64, 200, 2560])
def test_the_gradient_does_not_depend_on_the_packing(budget: int) -> None:
    one, made = learner(), sequences()
    gradient, stats = add(one.gradient(bin) for bin in make_bins(made, budget))
    loss, expected = plain_gradient(learner(), made)
    assert stats.loss_sum == pytest.approx(loss, rel=1e-4)
    assert stats.tokens == sum(int(s.mask[1:].sum()) for s in made)
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4)


def test_a_bin_computed_again_elsewhere_gives_the_same_bits() -> None:
    torch.set_num_threads(1)
    bins = make_bins(sequences(), 200)
    first, second = learner(), learner(seed=5)
    second.load_weights(first.weights())
    for bin in bins:
        second.gradient(bin)  # leaves nothing behind
        assert torch.equal(first.gradient(bin)[0], second.gradient(bin)[0])


def test_scores_under_the_sampling_weights_leave_no_gap() -> None:
    one, made = learner(), sequences(version=3)
    bins = make_bins(made, 2560, version=3)
    for bin in bins:
        bin.behaviour[:] = one.score(bin)
    _, stats = add(one.gradient(bin) for bin in bins)
    assert stats.fresh_tokens == stats.tokens and stats.gap_max < 1e-5
    assert stats.kl_sum < 1e-6 * stats.tokens and stats.clipped == 0
    assert 0 < stats.entropy_sum / stats.tokens <= np.log(32)


def test_tokens_of_other_versions_are_left_out_of_the_gap() -> None:
    _, stats = add(learner().gradient(bin) for bin in make_bins(sequences(version=2), 2560, 3))
    assert stats.fresh_tokens == 0 and stats.gap_max == 0.0 and stats.kl_sum > 0


def test_clipped_tokens_are_counted() -> None:
    one, made = learner(), sequences(count=1)
    made[0].advantages = np.ones((), np.float32)
    made[0].logprobs -= 9.0  # sampled, it says, as something very unlikely
    _, stats = add(one.gradient(bin) for bin in make_bins(made, 2560))
    assert stats.clipped == stats.tokens


def test_the_sum_is_divided_by_the_tokens_once() -> None:
    first, second = learner(), learner()
    gradient, stats = add(first.gradient(bin) for bin in make_bins(sequences(), 2560))
    four_times, expected = gradient * 4, float(gradient.norm()) / stats.tokens
    assert first.apply(gradient, stats.tokens, 1.0) == pytest.approx(expected, rel=1e-5)
    second.apply(four_times, stats.tokens * 4, 1.0)
    for name, tensor in second.weights().items():
        assert torch.allclose(tensor, first.weights()[name], atol=1e-7)


def test_steps_on_good_trajectories_make_them_likelier() -> None:
    one, made = learner(), sequences()
    for sequence in made:
        sequence.advantages = np.ones((), np.float32)
    bins = make_bins(made, 2560)
    before = sum(one.score(bin).sum() for bin in bins)
    for _ in range(5):
        for bin in bins:
            bin.behaviour[:] = one.score(bin)
        gradient, stats = add(one.gradient(bin) for bin in bins)
        one.apply(gradient, stats.tokens, 1.0)
    assert sum(one.score(bin).sum() for bin in bins) > before + 1


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    one = learner()
    before = one.copied_weights() | one.optimizer_state()
    gradient = torch.zeros(one.size)
    gradient[3] = torch.inf
    with pytest.raises(MeshError, match="not finite"):
        one.apply(gradient, 10, 1.0)
    after = one.copied_weights() | one.optimizer_state()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_learner_goes_on_where_its_state_was_taken(tmp_path: Path) -> None:
    first, second = learner(), learner(seed=7)
    bins = make_bins(sequences(), 200)
    for _ in range(2):
        gradient, stats = add(first.gradient(bin) for bin in bins)
        first.apply(gradient, stats.tokens, 1.0)
    handed_over(first, second, tmp_path / "state")
    assert second.steps == 2
    for one in (first, second):
        gradient, stats = add(one.gradient(bin) for bin in bins)
        one.apply(gradient, stats.tokens, 0.7)
    expected = second.copied_weights() | second.optimizer_state()
    found = first.copied_weights() | first.optimizer_state()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_the_supervised_gradient_is_that_of_the_cross_entropy() -> None:
    one, made = learner(), sequences()
    for sequence in made:
        sequence.advantages = np.ones((), np.float32)
    bins = make_bins(made, 2560)
    for bin in bins:
        bin.behaviour[:] = one.score(bin)  # the ratio is 1 everywhere
    taught = Learner(one.model, OptimizerConfig(), AlgorithmConfig(name="sft"))
    supervised, stats = taught.round_gradient(bins)
    policy, _ = add(one.gradient(bin) for bin in bins)
    assert torch.allclose(supervised, policy, rtol=1e-3, atol=1e-4)
    assert stats.loss_sum == pytest.approx(-sum(one.score(bin).sum() for bin in bins), rel=1e-4)


def test_stats_add_up() -> None:
    total = BinStats(tokens=2, gap_sum=1.0, gap_max=0.7) + BinStats(tokens=3, gap_max=0.2)
    assert total == BinStats(tokens=5, gap_sum=1.0, gap_max=0.7)


def test_of_all_gradients_that_are_added_few_are_there_at_once() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def results() -> Iterator[tuple[torch.Tensor, BinStats]]:
        nonlocal most
        for number in range(5):
            gradient = torch.full((3,), float(number))
            alive.add(gradient)
            most = max(most, len(alive))
            yield gradient, BinStats(tokens=1)
            del gradient

    total, stats = add(results())
    assert total.tolist() == [10.0] * 3 and stats.tokens == 5
    assert most == 2
