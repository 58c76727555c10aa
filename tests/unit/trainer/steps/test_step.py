"""Steps with every algorithm: scores before the step, updates, and replay."""

from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.common.api.rollout import HeldOutRequest, HeldOutRows
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.job.change_rules import restore_recorded, select_recorded
from meshrl.common.job.config import BudgetConfig, JobConfig, OptimizerConfig
from meshrl.common.job.constraints import AlgorithmName
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.bin_cost import BinCost, CostCalibration
from meshrl.services.trainer.algorithms import ALGORITHMS
from meshrl.services.trainer.bins.packing import TrainingSequence, make_bins
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.gradient_collector import GradientCollector
from meshrl.services.trainer.learner.aggregation import compute_denominator
from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from meshrl.services.trainer.learner.optimizers import compute_lr_factor
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.steps.batch import StepBatch
from meshrl.services.trainer.steps.held_out_loss import HeldOutLoss
from meshrl.services.trainer.steps.training_step import TrainingStep
from tests.meshes import alone
from tests.unit.trainer.steps.groups_under_test import group, job

VERSION = 3
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
    max_positions=64,
)


def learner(config: JobConfig) -> Learner:
    model = Decoder(MODEL)
    model.initialise(torch.Generator().manual_seed(0))
    return Learner(model, OptimizerConfig(muon_lr=0.02, adamw_lr=0.02), config.algorithm)


def groups(silent: Collection[int] = (), count: int = 4) -> list[TrajectoryGroup]:
    """Return groups with the data that any algorithm needs; those of `silent` have equal
    rewards.
    """
    found = []
    for number in range(count):
        rewards = [1.0, 1.0, 1.0] if number in silent else [1.0, 0.0, 0.5]
        one = group(rewards, number=number, reference=True, seed=number)
        one = replace(one, logprobs=np.where(one.versions < 0, 0, -3.4).astype(np.float32))
        found.append(replace(one, teacher_logprobs=one.reference_logprobs - np.float32(0.5)))
    return found


def step(learner: Learner, config: JobConfig) -> TrainingStep:
    clock = SystemClock()
    mesh = alone("trainer/job", clock, Random(0), SystemHost())
    compute = GangCompute(mesh, "job", Rank.for_single_rank(learner))
    gradients = GradientCollector(mesh, compute, "gang", 10.0, CostCalibration(BinCost(), 2560))
    return TrainingStep(
        mesh, config, compute, gradients, VERSION + 1, "manifest", lambda *phase: None
    )


async def stream_groups(**which: Any) -> AsyncIterator[TrajectoryGroup]:
    for one in groups(**which):
        yield one


@pytest.mark.rotating(3)
@pytest.mark.parametrize("keys", [{}, {"correction": "mis", "updates": 2, "kl_coefficient": 0.1}])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
async def test_recorded_step_replays_bit_by_bit_for_every_algorithm(
    name: AlgorithmName, keys: dict[str, Any]
) -> None:
    config = job(name, **keys)
    if keys:  # of several updates, some have an incomplete block
        config = replace(config, training=replace(config.training, block_rounds=2))
    first, second = learner(config), learner(config)
    before = first.copy_weights()
    done = await step(first, config).run(stream_groups())
    assert len(done.updates) == keys.get("updates", 1) and first.steps == len(done.updates)
    assert not all(torch.equal(tensor, before[n]) for n, tensor in first.get_weights().items())
    again = await step(second, config).replay(groups(), done.updates, done.block_rounds)
    own = dict(second.model.named_parameters())
    assert all(torch.equal(p, own[n]) for n, p in first.model.named_parameters())
    assert again.batch.build_metrics() == done.batch.build_metrics()
    assert again.stats == done.stats


@pytest.mark.parametrize("kind", ["tokens", "sequences", "constant"])
async def test_masked_trajectory_is_excluded_from_gradient_and_divisor(kind: str) -> None:
    """Check that a masked trajectory has no part in the step, whose advantages are those of the
    whole group.
    """
    config = job("grpo", mask_truncated=True, aggregation=kind)
    masked = [replace(one, truncated=np.array([False, True, False])) for one in groups()]
    found, expected = learner(config), learner(config)

    async def stream_masked_groups() -> AsyncIterator[TrajectoryGroup]:
        for one in masked:
            yield one

    done = await step(found, config).run(stream_masked_groups())
    whole = StepBatch(VERSION, config)
    unmasked = [s for one in groups() for s in whole.add(one) if s.member_index != 1]
    gradient, stats = sum_gradients(
        map(expected.compute_gradient, make_bins(unmasked, config.training.bin_tokens))
    )
    factor = compute_lr_factor(VERSION, config.budget.steps, config.optimizer)
    norm = expected.apply_gradient(gradient, compute_denominator(unmasked, config), factor)
    assert done.gradient_norm == pytest.approx(norm, rel=1e-5) and done.stats.tokens == stats.tokens
    own = expected.get_weights()
    for name, tensor in found.get_weights().items():
        torch.testing.assert_close(tensor, own[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("count", "updates", "silent", "dealt"),
    [
        (5, 4, (), [1, 1, 1, 2]),
        (9, 8, (), [1] * 7 + [2]),
        (6, 2, (0, 1, 2), [1, 2]),  # groups without training signal take no place in an update
        (4, 3, (0, 2, 3), [1]),
    ],
)
async def test_step_makes_the_configured_number_of_updates(
    count: int, updates: int, silent: tuple[int, ...], dealt: list[int]
) -> None:
    config = job("grpo", updates=updates)
    which: dict[str, Any] = {"count": count, "silent": silent}
    first, second = learner(config), learner(config)
    done = await step(first, config).run(stream_groups(**which))
    taught = [{group for one in plan for bin in one for group, _ in bin} for plan in done.updates]
    assert [len(groups) for groups in taught] == dealt
    assert sorted(set().union(*taught)) == [g for g in range(count) if g not in silent]
    await step(second, config).replay(groups(**which), done.updates, done.block_rounds)
    own = second.get_weights()
    assert all(torch.equal(tensor, own[name]) for name, tensor in first.get_weights().items())


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "gspo"])
async def test_step_records_the_divisors_of_its_sums(name: AlgorithmName, updates: int) -> None:
    config = job(name, updates=updates)
    done = await step(learner(config), config).run(stream_groups(silent=(3,)))
    trained = [s.loss_token_count for s in done.batch.sequences]
    assert len(trained) == 9
    assert done.denominator_sum == (sum(trained) if name == "grpo" else 9)


async def test_supervised_tokens_have_no_logprob_gap() -> None:
    config = job("sft")
    done = await step(learner(config), config).run(stream_groups())
    assert done.stats.tokens > 0 == done.stats.fresh_tokens == done.stats.sampled_tokens
    assert done.stats.gap_max == done.stats.kl_sum == 0.0


async def test_held_out_loss_is_the_mean_over_the_learned_tokens() -> None:
    config = job("sft")
    own = learner(config)
    mesh = alone("trainer/job", SystemClock(), Random(0), SystemHost())
    every = [
        TrainingSequence(tokens, np.zeros(n, np.float32), np.arange(n) >= prompt, tokens)
        for n, prompt in ((9, 3), (4, 1), (12, 10))
        for tokens in [np.random.default_rng(n).integers(0, 32, n, np.int32)]
    ]

    async def fetch_rows(request: HeldOutRequest) -> HeldOutRows:
        part = every[request.start : request.start + 2]
        following = request.start + 2
        return HeldOutRows(
            following if following < len(every) else -1,
            np.array([len(s.tokens) for s in part], np.int32),
            np.concatenate([s.tokens for s in part]),
            np.concatenate([s.loss_mask for s in part]),
        )

    compute = GangCompute(mesh, "job", Rank.for_single_rank(own))
    evaluation = HeldOutLoss(mesh, config, compute, fetch_rows)
    found = await evaluation.measure()
    (together,) = make_bins(every, 100)
    tokens = sum(s.loss_token_count for s in every)
    assert together.loss_token_count == tokens == 6 + 3 + 2
    assert found["held_out_loss"] == pytest.approx(-own.score(together).sum() / tokens, rel=1e-6)
    assert await evaluation.measure() == found


async def test_updates_of_a_step_share_its_initial_policy() -> None:
    config = job("dapo", correction="tis", updates=2)
    one, plain = learner(config), learner(config)
    batch = StepBatch(VERSION, config)
    by_group = [batch.add(g) for g in groups()]
    for sequence in batch.sequences:
        (bin,) = make_bins([sequence], 100)
        sequence.extras["proximal"] = np.append(0, plain.score(bin)).astype(np.float32)
    factor = compute_lr_factor(VERSION, config.budget.steps, OptimizerConfig())
    for part in (by_group[:2], by_group[2:]):
        members = [s for one_group in part for s in one_group]
        gradient, _ = sum_gradients(plain.compute_gradient(bin) for bin in make_bins(members, 60))
        plain.apply_gradient(gradient, compute_denominator(members, config), factor)
    await step(one, config).run(stream_groups())
    for name, tensor in one.get_weights().items():
        assert torch.allclose(tensor, plain.get_weights()[name], atol=2e-5), name


async def test_logprob_gap_uses_the_sampling_weights() -> None:
    """Exclude the change by later updates of a step from the gap."""
    config = job("dapo", updates=2)
    one = learner(config)
    done = await step(one, config).run(stream_groups())
    first = sum(s.loss_token_count for s in done.batch.sequences if s.group_id < 2)
    assert 0 < done.stats.fresh_tokens == first < done.stats.tokens


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"ppo", "reinforce_pp"}))
def test_gradient_does_not_depend_on_packing(name: AlgorithmName) -> None:
    config = job(name, correction="tis", correction_level="sequence", kl_coefficient=0.05)
    one, batch = learner(config), StepBatch(VERSION, config)
    for given in groups():
        batch.add(given)
    whole, stats = sum_gradients(
        one.compute_gradient(bin) for bin in make_bins(batch.sequences, 10_000, VERSION)
    )
    for budget in (8, 20, 40):
        bins = make_bins(batch.sequences, budget, VERSION)
        gradient, again = sum_gradients(one.compute_gradient(bin) for bin in bins)
        assert len(bins) > 1 and torch.allclose(gradient, whole, rtol=1e-3, atol=1e-5)
        assert again.loss_sum == pytest.approx(stats.loss_sum, rel=1e-4)
        assert (again.tokens, again.clipped_tokens) == (stats.tokens, stats.clipped_tokens)


CHANGES: dict[str, dict[str, Any]] = {
    "learning rates": {"optimizer": OptimizerConfig(muon_lr=0.3, adamw_lr=0.1, clip_norm=0.5)},
    "schedule": {"budget": BudgetConfig(steps=7)},
    "clips": {"algorithm": job(clip_high=0.01, clip_low=0.0).algorithm},
    "aggregation": {"algorithm": job(aggregation="constant", loss_constant=9).algorithm},
}


def get_weights(one: Learner) -> dict[str, torch.Tensor]:
    return dict(one.copy_weights())


@pytest.mark.parametrize("change", CHANGES)
async def test_replay_uses_the_recorded_settings(change: str) -> None:
    was = replace(job(), optimizer=OptimizerConfig(muon_lr=0.02, adamw_lr=0.02))
    now = replace(was, **CHANGES[change])
    first = learner(was)
    done = await step(first, was).run(stream_groups())
    record = select_recorded(was)

    resumed = learner(was)
    resumed.update_settings(
        now.algorithm, now.optimizer
    )  # like a trainer that starts with the changed job
    then = restore_recorded(now, record)
    assert then == was
    resumed.update_settings(then.algorithm, then.optimizer)
    await step(resumed, then).replay(groups(), done.updates, done.block_rounds)
    expected = get_weights(first)
    assert all(torch.equal(t, expected[name]) for name, t in get_weights(resumed).items())

    other = learner(was)
    other.update_settings(now.algorithm, now.optimizer)
    await step(other, now).replay(groups(), done.updates, done.block_rounds)
    assert not all(torch.equal(t, expected[name]) for name, t in get_weights(other).items())


def test_record_contains_the_settings_of_the_step() -> None:
    recorded = select_recorded(job())
    assert {"optimizer.muon_lr", "optimizer.final_lr", "budget.steps", "algorithm.clip_high"} <= (
        set(recorded)
    )
    assert not {"training.checkpoint_every", "algorithm.name", "rollout.slots"} & set(recorded)
