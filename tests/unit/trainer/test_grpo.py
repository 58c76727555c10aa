"""GRPO's two hooks, held to formulas written out plainly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import AlgorithmConfig
from common.errors import ConfigError
from services.trainer.algorithms import algorithm, grpo
from services.trainer.algorithms.terms import Terms

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def plain_loss(logprob, behaviour, advantage):
    """The loss of one token, and its slope with respect to `logprob`."""
    ratio = math.exp(logprob - behaviour)
    clipped = min(max(ratio, 0.8), 1.28)
    if ratio * advantage <= clipped * advantage:
        loss, slope = -ratio * advantage, -ratio * advantage
    else:
        loss, slope = -clipped * advantage, 0.0
    if advantage < 0 and loss > -3.0 * advantage:
        loss, slope = -3.0 * advantage, 0.0
    return loss, slope


def away_from_corners(token):
    logprob, behaviour, advantage = token
    ratio = math.exp(logprob - behaviour)
    return all(abs(ratio - corner) > 1e-3 for corner in (0.8, 1.28, 3.0)) and advantage != 0


tokens = st.tuples(
    st.floats(-8, 0, width=32), st.floats(-8, 0, width=32), st.floats(-3, 3, width=32)
).filter(away_from_corners)


def terms(logprobs, behaviour, advantage):
    one = torch.zeros(len(logprobs), dtype=torch.int64)
    return Terms(logprobs, behaviour, logprobs.detach(), advantage, one, 1)


@given(st.lists(tokens, min_size=1, max_size=40))
def test_loss_and_gradient_are_those_of_the_clipped_objective(sampled):
    logprobs, behaviour, advantage = torch.tensor(sampled, dtype=torch.float64).T
    logprobs.requires_grad_()
    losses = grpo.token_loss(terms(logprobs, behaviour, advantage), CONFIG)
    losses.sum().backward()
    expected = [plain_loss(*token) for token in sampled]
    assert losses.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-9)
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9)


def test_on_policy_tokens_have_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    made = terms(logprobs, logprobs.detach(), torch.tensor([1.5, -0.5]))
    grpo.token_loss(made, CONFIG).sum().backward()
    assert logprobs.grad.tolist() == [-1.5, 0.5]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20))
def test_advantages_are_relative_to_the_group(rewards):
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    found = grpo.advantages(np.array(rewards), CONFIG)
    if found is None:
        assert deviation < 2e-6
    else:
        expected = [(r - mean) / (deviation + 1e-4) for r in rewards]
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equal_rewards_teaches_nothing(reward):
    assert grpo.advantages(np.full(16, reward), CONFIG) is None
    kept = grpo.advantages(np.full(16, reward), AlgorithmConfig(filter_zero_variance=False))
    assert kept.tolist() == pytest.approx([0.0] * 16, abs=1e-9)


def test_an_unknown_algorithm_names_those_that_are_known():
    with pytest.raises(ConfigError, match="grpo"):
        algorithm("gpro")
