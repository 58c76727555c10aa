"""Gradients of the learner over bins and steps."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.encoding import blob
from meshrl.common.base.errors import MeshError, Refused
from meshrl.common.base.expert_routing import concatenate_experts
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder, MoeDecoderLayer
from meshrl.services.rollout.trajectories.trajectory import Trajectory
from meshrl.services.trainer.bins.packing import Bin, TrainingSequence, make_bins
from meshrl.services.trainer.learner.gradient_sum import GradientSum
from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.models.forward import run_forward
from meshrl.services.trainer.steps.batch import build_sequences
from tests.attention import causal_attention
from tests.unit.common.generation.engines_under_test import (
    VOCAB,
    Listener,
    built_in,
    request,
)
from tests.unit.common.generation.test_moe_engine import THREE, make_paired_experts_model
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
    tie_embeddings=True,
    max_positions=128,
)


def learner(seed: int = 0, **algorithm: Any) -> Learner:
    model = Decoder(MODEL)
    model.initialise(torch.Generator().manual_seed(seed))
    return Learner(model, OptimizerConfig(), AlgorithmConfig(**algorithm))


def sequences(count: int = 9, version: int = 0) -> list[TrainingSequence]:
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
        made.append(TrainingSequence(tokens, logprobs, mask, versions, advantage))
    return made


def plain_gradient(
    learner: Learner, made: list[TrainingSequence], entropy_coefficient: float = 0.0
) -> tuple[float, torch.Tensor]:
    """Compute the gradient sequence by sequence, without packing."""
    model = learner.model
    model.zero_grad()
    total = torch.zeros(())
    for one in made:
        tokens = torch.from_numpy(one.tokens).long()
        hidden = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], causal_attention)
        normal = model.compute_logits(hidden)[0].log_softmax(-1)
        logprobs = normal.gather(1, tokens[1:, None])[:, 0]
        advantage = float(one.advantages)
        ratio = (logprobs - torch.from_numpy(one.logprobs[1:])).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = -objective.clamp(min=3 * advantage) if advantage < 0 else -objective
        loss = loss + entropy_coefficient * (normal.exp() * normal).sum(-1)
        total = total + loss[torch.from_numpy(one.loss_mask[1:])].sum()
    total.backward()
    return float(total.detach()), torch.cat(
        [cast(torch.Tensor, p.grad).reshape(-1) for p in model.parameters()]
    )


@pytest.mark.parametrize(("budget", "coefficient"), [(64, 0.0), (200, 0.3), (2560, 0.0)])
def test_gradient_does_not_depend_on_the_packing(budget: int, coefficient: float) -> None:
    one, made = learner(entropy_coefficient=coefficient), sequences()
    gradient, stats = sum_gradients(one.compute_gradient(bin) for bin in make_bins(made, budget))
    loss, expected = plain_gradient(learner(), made, coefficient)
    assert stats.loss_sum == pytest.approx(loss, rel=1e-4)
    assert stats.tokens == sum(int(s.loss_mask[1:].sum()) for s in made)
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4)


def test_recomputed_bin_gives_equal_bits() -> None:
    torch.set_num_threads(1)
    bins = make_bins(sequences(), 200)
    first, second = learner(), learner(seed=5)
    second.load_weights(first.get_weights())
    for bin in bins:
        second.compute_gradient(bin)  # no effect remains
        assert torch.equal(first.compute_gradient(bin)[0], second.compute_gradient(bin)[0])


def test_scores_under_the_sampling_weights_have_no_logprob_gap() -> None:
    one, made = learner(), sequences(version=3)
    bins = make_bins(made, 2560, version=3)
    for bin in bins:
        bin.behaviour_logprobs[:] = one.score(bin)
    _, stats = sum_gradients(one.compute_gradient(bin) for bin in bins)
    assert stats.fresh_tokens == stats.tokens and stats.gap_max < 1e-5
    assert stats.kl_sum < 1e-6 * stats.tokens and stats.clipped_tokens == 0
    assert 0 < stats.entropy_sum / stats.tokens <= np.log(32)


def test_logprob_gap_excludes_tokens_of_other_versions() -> None:
    _, stats = sum_gradients(
        learner().compute_gradient(bin) for bin in make_bins(sequences(version=2), 2560, 3)
    )
    assert stats.fresh_tokens == 0 and stats.gap_max == 0.0 and stats.kl_sum > 0


def test_clipped_tokens_are_counted() -> None:
    one, made = learner(), sequences(count=1)
    made[0].advantages = np.ones((), np.float32)
    made[0].logprobs -= 9.0  # as if the engine had sampled very unlikely tokens
    _, stats = sum_gradients(one.compute_gradient(bin) for bin in make_bins(made, 2560))
    assert stats.clipped_tokens == stats.tokens


def test_gradient_sum_is_divided_by_the_token_count_once() -> None:
    first, second = learner(), learner()
    gradient, stats = sum_gradients(
        first.compute_gradient(bin) for bin in make_bins(sequences(), 2560)
    )
    four_times, expected = gradient * 4, float(gradient.norm()) / stats.tokens
    assert first.apply_gradient(gradient, stats.tokens, 1.0) == pytest.approx(expected, rel=1e-5)
    second.apply_gradient(four_times, stats.tokens * 4, 1.0)
    for name, tensor in second.get_weights().items():
        assert torch.allclose(tensor, first.get_weights()[name], atol=1e-7)


def test_steps_increase_the_probability_of_good_trajectories() -> None:
    one, made = learner(), sequences()
    for sequence in made:
        sequence.advantages = np.ones((), np.float32)
    bins = make_bins(made, 2560)
    before = sum(one.score(bin).sum() for bin in bins)
    for _ in range(5):
        for bin in bins:
            bin.behaviour_logprobs[:] = one.score(bin)
        gradient, stats = sum_gradients(one.compute_gradient(bin) for bin in bins)
        one.apply_gradient(gradient, stats.tokens, 1.0)
    assert sum(one.score(bin).sum() for bin in bins) > before + 1


def test_non_finite_gradient_is_skipped() -> None:
    one = learner()
    before = one.copy_weights() | one.copy_optimizer_state()
    gradient = torch.zeros(one.parameter_count)
    gradient[3] = torch.inf
    with pytest.raises(MeshError, match="not finite"):
        one.apply_gradient(gradient, 10, 1.0)
    after = one.copy_weights() | one.copy_optimizer_state()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_learner_resumes_from_its_saved_state(tmp_path: Path) -> None:
    first, second = learner(), learner(seed=7)
    bins = make_bins(sequences(), 200)
    for _ in range(2):
        gradient, stats = sum_gradients(first.compute_gradient(bin) for bin in bins)
        first.apply_gradient(gradient, stats.tokens, 1.0)
    transfer_state(first, second, tmp_path / "state")
    assert second.steps == 2
    for one in (first, second):
        gradient, stats = sum_gradients(one.compute_gradient(bin) for bin in bins)
        one.apply_gradient(gradient, stats.tokens, 0.7)
    expected = second.copy_weights() | second.copy_optimizer_state()
    found = first.copy_weights() | first.copy_optimizer_state()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_supervised_gradient_is_that_of_cross_entropy() -> None:
    one, made = learner(), sequences()
    for sequence in made:
        sequence.advantages = np.ones((), np.float32)
    bins = make_bins(made, 2560)
    for bin in bins:
        bin.behaviour_logprobs[:] = one.score(bin)  # the ratio is 1 everywhere
    taught = Learner(one.model, OptimizerConfig(), AlgorithmConfig(name="sft"))
    supervised, stats = taught.compute_round_gradient(bins)
    policy, _ = sum_gradients(one.compute_gradient(bin) for bin in bins)
    assert torch.allclose(supervised, policy, rtol=1e-3, atol=1e-4)
    assert stats.loss_sum == pytest.approx(-sum(one.score(bin).sum() for bin in bins), rel=1e-4)


def test_stats_of_bins_add_up() -> None:
    total = BinStats(tokens=2, gap_sum=1.0, gap_max=0.7) + BinStats(tokens=3, gap_max=0.2)
    assert total == BinStats(tokens=5, gap_sum=1.0, gap_max=0.7)


def test_gradient_addition_keeps_few_gradients_in_memory() -> None:
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

    total, stats = sum_gradients(results())
    assert total.tolist() == [10.0] * 3 and stats.tokens == 5
    assert most == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_release_a_gradient_before_the_next_one(dtype: torch.dtype) -> None:
    own = Learner(Decoder(MODEL), OptimizerConfig(), AlgorithmConfig(), dtype=dtype)
    (bin,) = make_bins(sequences(1), 2560)
    released = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.zeros and args == (own.parameter_count,):
                copy = own._working_copy
                released.append(
                    all(p.grad is None for p in own.model.parameters())
                    and (copy is None or not copy._sums)
                )
            return func(*args, **(kwargs or {}))

    with Watch():
        for _ in range(2):
            own.compute_gradient(bin)
    assert released == [True, True]


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1000, generator=generator) * 10.0**i for i in range(count)]


def test_gradient_sum_is_independent_of_arrival_order() -> None:
    expected = sum(gradients(4)[1:], gradients(4)[0].clone())
    for order in itertools.permutations(range(4)):
        gradient_sum, made = GradientSum(), gradients(4)
        for index in order:
            gradient_sum.add(index, made[index])
            gradient_sum.add(index, torch.full((1000,), torch.inf))  # again, and late
        assert torch.equal(gradient_sum.get_total(4), expected)


def test_missing_round_is_rejected() -> None:
    gradient_sum = GradientSum()
    gradient_sum.add(1, torch.ones(3))
    with pytest.raises(Refused, match="0 of 2"):
        gradient_sum.get_total(2)


def test_incomplete_block_is_rejected() -> None:
    gradient_sum = GradientSum(block_rounds=2)
    for index in (0, 1, 2):
        gradient_sum.add(index, torch.ones(3))
    with pytest.raises(Refused, match="2 of 4"):
        gradient_sum.get_total(4)
    assert torch.equal(gradient_sum.get_total(3), torch.full((3,), 3.0))


def test_sums_of_hybrids_take_no_memory_of_the_device_before_their_turn() -> None:
    gradient_sum = GradientSum(device="meta")
    for block in (2, 1):
        gradient_sum.add_block(block, torch.ones(3))
    assert {tensor.device.type for tensor in gradient_sum.get_tensors().values()} == {"cpu"}
    gradient_sum.add_block(0, torch.ones(3))
    assert list(gradient_sum.get_tensors()) == ["sum"]
    assert gradient_sum.get_total(3).device.type == "meta"


def test_threads_add_each_round_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            gradient_sum = GradientSum()
            ones = [(index, torch.ones(2000)) for index in range(16) for _ in range(2)]
            list(threads.map(lambda pair, gradient_sum=gradient_sum: gradient_sum.add(*pair), ones))
            assert torch.equal(gradient_sum.get_total(16), torch.full((2000,), 16.0))


paths = pytest.mark.parametrize(
    "path", [pytest.param("native", marks=pytest.mark.needs("compiler")), "eager", "graphs"]
)


def sampled(
    path: str, model: Decoder, prompts: list[list[int]], tokens: int = 90
) -> TrajectoryGroup:
    """Return a finished group as a shard stores it, with turns that the engine sampled."""
    engine = built_in(path, slots=8, config=THREE)
    engine.update_weights(model.state_dict(), 4)
    heard = Listener(engine).run(
        *(request(i, prompt, max_new=tokens - 7 * i) for i, prompt in enumerate(prompts))
    )
    members = []
    for i, prompt in enumerate(prompts):
        t = Trajectory(3, i, 0, 4, 0)
        t.set_prompt(prompt)
        columns: Any = (
            np.array(heard[i].tokens, np.int32),
            np.array(heard[i].logprobs, np.float32),
            np.array(heard[i].versions, np.int32),
            np.array(heard[i].experts, np.int16),
        )
        t.append_sampled(*columns)
        t.append([1, 2])  # a tool's answer, which the engine did not sample
        members.append(t)
    group = TrajectoryGroup(
        group=3,
        prompt=0,
        lengths=np.array([t.length for t in members], np.int32),
        tokens=np.concatenate([t.tokens for t in members]),
        logprobs=np.concatenate([t.logprobs for t in members]),
        versions=np.concatenate([t.versions for t in members]),
        rewards=np.arange(len(members), dtype=np.float32),
        expert_ids=concatenate_experts((t.experts, t.length) for t in members),
        expert_shape=list(THREE.routing_shape),
    )
    return blob.unpack(TrajectoryGroup, blob.pack(group))


def bins_of(group: TrajectoryGroup, *, replayed: bool) -> list[Bin]:
    sequences = build_sequences(group)
    assert all(s.expert_ids is not None for s in sequences)
    if not replayed:
        for sequence in sequences:
            sequence.expert_ids = None
    return [Bin.from_arrays(made.to_arrays()) for made in make_bins(sequences, 150)]


def gap(model: Decoder, bins: list[Bin]) -> float:
    """Return the largest difference to the engine's log-probabilities over all trained tokens."""
    worst = 0.0
    for made in bins:
        with torch.no_grad():
            out = run_forward(model, made)
        difference = out.logprobs.numpy() - made.behaviour_logprobs[out.loss_positions.numpy()]
        worst = max(worst, float(np.abs(difference).max()))
    return worst


@pytest.mark.rotating(3)
@paths
def test_replayed_routing_reproduces_the_engines_logprobs(path: str) -> None:
    group = sampled(path, make_paired_experts_model(1e-6, seed=1), [[first] for first in range(5)])
    later = make_paired_experts_model(1e-6, seed=2)
    assert gap(later, bins_of(group, replayed=False)) > 0.1
    assert gap(later, bins_of(group, replayed=True)) < 1e-4


@pytest.mark.rotating(3)
@paths
def test_logprobs_match_the_engines_after_any_prompt(path: str) -> None:
    prompts = [np.random.default_rng(n).integers(0, VOCAB, 1 + 9 * n).tolist() for n in range(4)]
    model = make_paired_experts_model(0.5, seed=1)  # no pair is near a tie
    group = sampled(path, model, prompts, tokens=60)
    assert gap(model, bins_of(group, replayed=True)) < 1e-4
    assert gap(model, bins_of(group, replayed=False)) < 1e-4


def test_balance_loss_sums_over_trained_positions_and_trains_the_router() -> None:
    model = make_paired_experts_model(0.5, seed=1)
    model.config = THREE
    group = sampled("eager", model, [[first] for first in range(5)])
    total, trained = torch.zeros(()), 0
    for made in bins_of(group, replayed=True):
        out = run_forward(model, made)
        assert out.aux_loss is not None
        total, trained = total + out.aux_loss, trained + len(out.loss_positions)
    each = total.item() / trained / THREE.router_aux_loss_coef
    assert THREE.num_experts_per_token <= each < 2 * THREE.num_experts_per_token
    total.backward()
    gradient = cast(MoeDecoderLayer, model.layers[0]).experts.router.grad
    assert gradient is not None and gradient.abs().max() > 0
