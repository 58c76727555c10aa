"""Off-policy corrections and KL terms, held to their formulas written as loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.services.trainer.arithmetic.objective import objective
from meshrl.services.trainer.losses import kl
from tests.unit.trainer.losses import published_formulas as plain

ALL = ("decoupled", "tis", "mis")


def weight_of(
    tokens: plain.Tokens,
    correction: str,
    level: str,
    i: int,
    t: int,
    low: float = 0.5,
    high: float | None = None,
) -> float:
    """Proximal over behaviour probability of a token, or of its sequence."""
    places = [t] if level == "token" else range(len(tokens.now[i]))
    weight = 1.0
    for u in places:
        weight *= math.exp(tokens.proximal[i][u]) / math.exp(tokens.behaviour[i][u])
    if correction == "tis":
        return min(weight, 2.0 if high is None else high)
    if correction == "mis":
        return weight if low <= weight <= (5.0 if high is None else high) else 0.0
    return weight


def decoupled(correction: str, level: str, **limits: Any) -> plain.Loss:
    """AReaL, equation 5: the ratio, and its clips, are to the proximal policy."""

    def loss(now: plain.Lists, held: plain.Lists, tokens: plain.Tokens) -> float:
        def term(i: int, t: int) -> float:
            ratio = math.exp(now[i][t] - tokens.proximal[i][t])
            value = plain.clipped(ratio, tokens.advantage[i][t], 0.2, 0.28)
            return weight_of(tokens, correction, level, i, t, **limits) * value

        return plain.mean_over_tokens(term, tokens)

    return loss


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ALL)
def test_loss_and_slope_are_those_of_the_corrected_objective(
    correction: str, level: str, seed: int
) -> None:
    tokens = plain.batch(seed, 0.5)
    config = plain.job("dapo", correction=correction, correction_level=level)
    loss = decoupled(correction, level)
    found, slope = plain.ours(tokens, config)
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)
    assert plain.alike(slope, plain.slope(loss, tokens))


@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_bounds_are_the_jobs_to_choose(correction: str) -> None:
    tokens = plain.batch(11, 0.5)
    keys = {"correction_low": 0.9, "correction_high": 1.1}
    config = plain.job("dapo", correction=correction, **keys)
    loss = decoupled(correction, "token", low=0.9, high=1.1)
    found, slope = plain.ours(tokens, config)
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)
    assert plain.alike(slope, plain.slope(loss, tokens))


def test_without_a_correction_the_ratio_is_to_the_policy_that_sampled() -> None:
    tokens = plain.batch(4)
    before = plain.ours(tokens, plain.job("dapo"))
    tokens.proximal = [[-9.0] * len(one) for one in tokens.now]
    after = plain.ours(tokens, plain.job("dapo"))
    assert before[0] == after[0] and torch.equal(before[1], after[1])


@pytest.mark.parametrize("correction", ALL)
def test_the_corrected_gradient_is_right_in_expectation_over_what_was_sampled(
    correction: str,
) -> None:
    """Of a policy over four tokens that an older one sampled: the policy gradient, while no bound
    is met.
    """
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    older = torch.tensor([0.2, 0.0, 0.3, 0.3], dtype=torch.float64).log_softmax(0)
    worth = torch.tensor([1.0, -1.0, 0.5, 0.2], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(-(logprobs.exp() * worth).sum(), logits, retain_graph=True)

    def column(values: torch.Tensor) -> plain.Lists:
        return [[x] for x in values.tolist()]

    now, sampled = column(logprobs.detach()), column(older)
    tokens = plain.Tokens(now, sampled, now, now, now, column(worth))
    config = plain.job("grpo", correction=correction).algorithm
    slope = objective(plain.terms(tokens), older.exp(), config).slope
    (found,) = torch.autograd.grad(logprobs, logits, slope)
    assert torch.allclose(found, exact, rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_divergence_joins_the_loss_unclipped_and_uncorrected(kind: str, seed: int) -> None:
    def loss(now: plain.Lists, held: plain.Lists, tokens: plain.Tokens) -> float:
        def term(i: int, t: int) -> float:
            gone = now[i][t] - tokens.reference[i][t]
            return {"k1": gone, "k2": gone * gone / 2, "k3": math.exp(-gone) - 1 + gone}[kind]

        inside = decoupled("mis", "token")(now, held, tokens)
        return inside + 0.3 * plain.mean_over_tokens(term, tokens)

    tokens = plain.batch(seed, 0.5)
    config = plain.job("dapo", correction="mis", kl=kind, kl_coefficient=0.3)
    found, slope = plain.ours(tokens, config)
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)
    assert plain.alike(slope, plain.slope(loss, tokens))


def k3(difference: float) -> tuple[float, float]:
    """The estimate and its slope, of d = log-probability under the policy - the reference."""
    logprob = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    found = kl.estimate("k3", logprob, torch.zeros_like(logprob))
    (slope,) = torch.autograd.grad(found.sum(), logprob)
    return found.item(), slope.item()


@given(st.floats(-300.0, 300.0))
def test_k3_is_its_formula_and_beyond_20_nats_still_leads_back_to_the_reference(
    difference: float,
) -> None:
    value, slope = k3(difference)
    assert math.isfinite(value) and math.isfinite(slope)
    assert value == pytest.approx(
        float(kl.sampled("k3", np.array([difference]), np.zeros(1))[0]), rel=1e-12
    )
    if difference >= -20:
        exact = math.exp(-difference)
        assert value == pytest.approx(exact - 1 + difference, rel=1e-12, abs=1e-12)
        assert slope == pytest.approx(1 - exact, rel=1e-12, abs=1e-12)
    else:
        nearer, gentler = k3(difference + 1)
        assert value > nearer and slope <= gentler < 0


def test_a_divergence_that_the_reward_pays_is_not_in_the_loss() -> None:
    tokens = plain.batch(0)
    keys = {"kl_coefficient": 0.3, "kl_in": "reward"}
    assert (
        plain.ours(tokens, plain.job("dapo", **keys))[0]
        == (plain.ours(tokens, plain.job("dapo"))[0])
    )


def test_what_a_bound_cut_is_told_apart_from_what_a_clip_cut() -> None:
    tokens = plain.batch(6, 0.8, count=12)
    config = plain.job("dapo", correction="mis").algorithm
    one = torch.ones(tokens.count, dtype=torch.float64)
    found = objective(plain.terms(tokens), one, config)
    assert found.corrected.any() and found.clipped.any()
    assert not (found.corrected & found.clipped).any()
    assert (found.slope[found.corrected | found.clipped] == 0).all()
