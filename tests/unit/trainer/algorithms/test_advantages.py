"""Advantages of trajectories in a group and of tokens in a step, and reward shaping."""

import math
import random
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import AlgorithmConfig, JobConfig, RolloutConfig
from meshrl.common.job.constraints import AlgorithmName
from meshrl.services.trainer.algorithms import ALGORITHMS, get_algorithm
from meshrl.services.trainer.bins.packing import TrainingSequence
from meshrl.services.trainer.learner.aggregation import compute_denominator, compute_token_weight
from meshrl.services.trainer.losses.kl import estimate_kl_numpy
from meshrl.services.trainer.losses.returns import compute_gae, discount_rewards
from meshrl.services.trainer.losses.shaping import compute_overlong_penalty

COMPARED = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")  # within a group
rewards_of_a_group = st.lists(st.floats(-10, 10), min_size=2, max_size=20)


def plain_advantages(name: str, rewards: list[float]) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    if name == "rloo":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    if name == "dr_grpo":
        return [r - mean for r in rewards]
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / n)
    return [(r - mean) / (deviation + 1e-4) for r in rewards]


def advantages(name: AlgorithmName, rewards: list[float]) -> NDArray[np.float64]:
    config = AlgorithmConfig(name, filter_zero_variance=False)
    found = get_algorithm(name).compute_advantages(np.array(rewards, np.float64), config)
    assert found is not None
    return found


def prepare(name: AlgorithmName, made: list[TrainingSequence], config: AlgorithmConfig) -> None:
    hook = get_algorithm(name).prepare_advantages
    assert hook is not None
    hook(made, config)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", COMPARED)
@given(rewards=rewards_of_a_group)
def test_group_advantages_match_the_formula(name: AlgorithmName, rewards: list[float]) -> None:
    expected = plain_advantages(name, rewards)
    assert advantages(name, rewards).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", COMPARED)
@given(rewards=rewards_of_a_group, constant=st.floats(-5, 5))
def test_constant_added_to_all_rewards_changes_no_advantage(
    name: AlgorithmName, rewards: list[float], constant: float
) -> None:
    moved = advantages(name, [r + constant for r in rewards])
    assert moved.tolist() == pytest.approx(advantages(name, rewards).tolist(), abs=1e-7)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", COMPARED)
@given(rewards=rewards_of_a_group, order=st.randoms())
def test_member_order_changes_no_advantage(
    name: AlgorithmName, rewards: list[float], order: random.Random
) -> None:
    places = list(range(len(rewards)))
    order.shuffle(places)
    moved = advantages(name, [rewards[i] for i in places])
    expected = advantages(name, rewards)[places]
    assert moved.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("name", COMPARED)
def test_equal_rewards_are_filtered_by_group_algorithms(name: AlgorithmName) -> None:
    hooks = ALGORITHMS[name]
    assert hooks.compute_advantages(np.full(8, 0.1), AlgorithmConfig(name)) is None


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(COMPARED)))
def test_equal_rewards_are_trained_by_other_algorithms(name: AlgorithmName) -> None:
    assert ALGORITHMS[name].compute_advantages(np.full(8, 0.1), AlgorithmConfig(name)) is not None


# -- advantages of tokens
# ---------------------------------------------------------------------------


def sequence(seed: int, reward: float, values: bool = False) -> TrainingSequence:
    """Return a sequence of a prompt, then turns of the model and of an environment."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(4, 14))
    mask = draw.random(n) < 0.6
    mask[0], mask[-1] = False, True
    made = TrainingSequence(
        tokens=draw.integers(0, 9, n).astype(np.int32),
        logprobs=np.where(mask, draw.uniform(-3, 0, n), 0).astype(np.float32),
        loss_mask=mask,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.array(reward, np.float32),
    )
    made.extras["reference"] = draw.uniform(-3, 0, n).astype(np.float32)
    if values:
        made.extras["values"] = draw.normal(size=n).astype(np.float32)
    return made


def plain_rewards(one: TrainingSequence, config: AlgorithmConfig) -> list[list[Any]]:
    """Return [[place, reward]] of the model's own tokens."""
    places = [i for i in range(1, len(one.tokens)) if one.loss_mask[i]]
    found: list[list[Any]] = []
    for i in places:
        log_ratio = float(one.logprobs[i]) - float(one.extras["reference"][i])
        estimate = {
            "k1": log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": math.exp(-log_ratio) - 1 + log_ratio,
        }[config.kl]
        paid = config.kl_coefficient * estimate if config.kl_in == "reward" else 0.0
        found.append([i, -paid])
    found[-1][1] += float(one.advantages)
    return found


def plain_normalised(lists: list[list[float]]) -> list[list[float]]:
    every = [x for one in lists for x in one]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every))
    return [[(x - mean) / deviation for x in one] for one in lists]


def plain_returns(one: TrainingSequence, config: AlgorithmConfig) -> list[float]:
    rewards = [r for _, r in plain_rewards(one, config)]
    return [
        sum(config.discount ** (later - t) * rewards[later] for later in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def plain_gae(one: TrainingSequence, config: AlgorithmConfig) -> list[float]:
    """Compute GAE as the sum over later steps of (discount lambda)^l times their temporal
    differences.
    """
    steps = plain_rewards(one, config)
    values = [float(one.extras["values"][i]) for i, _ in steps] + [0.0]
    deltas = [r + config.discount * values[t + 1] - values[t] for t, (_, r) in enumerate(steps)]
    decay = config.discount * config.gae_lambda
    return [
        sum(decay ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_token_advantages_match_the_formula(
    name: AlgorithmName, kl: Literal["k1", "k2", "k3"], seed: int
) -> None:
    config = AlgorithmConfig(
        name, kl=kl, kl_in="reward", kl_coefficient=0.1, discount=0.95, gae_lambda=0.9
    )
    given_ = [sequence(10 * seed + i, reward, True) for i, reward in enumerate((1.0, 0.0, -0.5))]
    plain = plain_gae if name == "ppo" else plain_returns
    raw = [plain(one, config) for one in given_]
    prepare(name, given_, config)
    for one, expected, plain_one in zip(given_, plain_normalised(raw), raw, strict=True):
        own = np.flatnonzero(one.loss_mask)
        assert one.advantages[own].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert not one.advantages[~one.loss_mask].any()
        if name == "ppo":
            targets = np.array(plain_one) + one.extras["values"][own]
            assert one.extras["returns"][own] == pytest.approx(targets, rel=1e-4, abs=1e-5)


def test_token_advantages_without_kl_equal_the_final_reward() -> None:
    given_ = [sequence(i, reward) for i, reward in enumerate((1.0, 0.0, 3.0))]
    prepare("reinforce_pp", given_, AlgorithmConfig("reinforce_pp"))
    worth = [one.advantages[one.loss_mask] for one in given_]
    assert all((own == own[0]).all() for own in worth)
    assert worth[1][0] < worth[0][0] < worth[2][0]


def test_step_of_equal_rewards_has_zero_advantages() -> None:
    given_ = [sequence(i, 1.0) for i in range(3)]
    prepare("reinforce_pp", given_, AlgorithmConfig("reinforce_pp"))
    assert not any(one.advantages.any() for one in given_)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0, 1))
def test_gae_limits_are_one_step_and_the_whole_trajectory(
    rewards: list[float], discount: float
) -> None:
    values = np.linspace(-1, 1, len(rewards))
    worth = np.array(rewards)
    one_step = worth + discount * np.append(values[1:], 0) - values
    assert compute_gae(worth, values, discount, 0.0) == pytest.approx(one_step, abs=1e-9)
    whole = discount_rewards(worth, discount) - values
    assert compute_gae(worth, values, discount, 1.0) == pytest.approx(whole, abs=1e-9)


def test_kl_without_a_reference_names_the_missing_table() -> None:
    one = sequence(0, 1.0)
    one.extras.clear()
    config = AlgorithmConfig("reinforce_pp", kl_in="reward", kl_coefficient=0.1)
    with pytest.raises(ConfigError, match=r"models\.reference"):
        prepare("reinforce_pp", [one], config)


# -- reward shaping and aggregation
# ------------------------------------------------------------------


def job(name: AlgorithmName, longest: int = 100, **keys: Any) -> JobConfig:
    return JobConfig(
        rollout=RolloutConfig(max_tokens=longest), algorithm=AlgorithmConfig(name=name, **keys)
    )


@given(st.lists(st.integers(2, 100), min_size=1, max_size=8), st.integers(1, 60))
def test_overlong_penalty_grows_over_the_last_tokens(lengths: list[int], buffer: int) -> None:
    def plain(length: int) -> float:  # DAPO, equation 13
        if length <= 100 - buffer:
            return 0.0
        return ((100 - buffer) - length) / buffer if length <= 100 else -1.0

    config = job("grpo", overlong_buffer=buffer, overlong_penalty=0.5)
    found = compute_overlong_penalty(np.array(lengths), 0.0, config)
    assert found.tolist() == pytest.approx([0.5 * plain(length) for length in lengths])


def test_dapo_penalizes_the_last_fifth_and_others_nothing() -> None:
    lengths = np.array([80, 90, 100])
    assert compute_overlong_penalty(
        lengths, ALGORITHMS["dapo"].overlong_share, job("dapo")
    ).tolist() == [
        0.0,
        -0.5,
        -1.0,
    ]
    assert not compute_overlong_penalty(
        lengths, ALGORITHMS["grpo"].overlong_share, job("grpo")
    ).any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_agree_with_the_exact_kl(kind: str) -> None:
    """Check that k1 and k3 are unbiased, and that k2 is close for close policies."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=6)
    policy = np.exp(logits) / np.exp(logits).sum()
    moved = logits + draw.normal(size=6) * 0.05
    reference = np.exp(moved) / np.exp(moved).sum()
    exact = float((policy * np.log(policy / reference)).sum())
    mean = float((policy * estimate_kl_numpy(kind, np.log(policy), np.log(reference))).sum())
    assert mean == pytest.approx(exact, rel=0.05 if kind == "k2" else 1e-9)


@pytest.mark.parametrize(
    ("kind", "weight", "counts"), [("tokens", 1, 7), ("sequences", 1 / 4, 2), ("constant", 0.01, 2)]
)
def test_weights_and_counts_follow_the_aggregation(kind: str, weight: float, counts: int) -> None:
    config = job("grpo", aggregation=kind)
    made = []
    for n in (4, 3):
        mask = np.array([False] + [True] * n)
        nothing = np.zeros(n + 1, np.int32)
        made.append(TrainingSequence(nothing, nothing.astype(np.float32), mask, nothing))
    assert compute_token_weight(4, config) == pytest.approx(weight)
    assert compute_denominator(made, config) == counts
