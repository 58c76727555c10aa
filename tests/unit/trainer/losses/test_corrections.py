"""Off-policy corrections and KL terms, compared with their formulas written as loops."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import AlgorithmConfig, JobConfig
from meshrl.common.job.constraints import AlgorithmName
from meshrl.services.trainer.algorithms import (
    ALGORITHMS,
    get_algorithm,
    has_refill,
    list_scoring_passes,
)
from meshrl.services.trainer.learner.objective import compute_objective
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
    """Return the proximal over the behaviour probability of a token, or of its sequence."""
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
    """Build the loss of AReaL, equation 5: ratio and clips are relative to the proximal policy."""

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
def test_loss_and_slope_match_the_corrected_objective(
    correction: str, level: str, seed: int
) -> None:
    tokens = plain.batch(seed, 0.5)
    config = plain.job("dapo", correction=correction, correction_level=level)
    loss = decoupled(correction, level)
    found, slope = plain.ours(tokens, config)
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)
    assert plain.is_close(slope, plain.slope(loss, tokens))


@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_correction_bounds_are_configurable(correction: str) -> None:
    tokens = plain.batch(11, 0.5)
    keys = {"correction_low": 0.9, "correction_high": 1.1}
    config = plain.job("dapo", correction=correction, **keys)
    loss = decoupled(correction, "token", low=0.9, high=1.1)
    found, slope = plain.ours(tokens, config)
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)
    assert plain.is_close(slope, plain.slope(loss, tokens))


def test_uncorrected_ratio_is_relative_to_the_behaviour_policy() -> None:
    tokens = plain.batch(4)
    before = plain.ours(tokens, plain.job("dapo"))
    tokens.proximal = [[-9.0] * len(one) for one in tokens.now]
    after = plain.ours(tokens, plain.job("dapo"))
    assert before[0] == after[0] and torch.equal(before[1], after[1])


@pytest.mark.parametrize("correction", ALL)
def test_corrected_gradient_is_unbiased(correction: str) -> None:
    """Check the expected gradient of a policy over four tokens that an older policy sampled. It is
    the policy gradient while no bound is met.
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
    slope = compute_objective(plain.terms(tokens), older.exp(), config).logprob_gradient
    (found,) = torch.autograd.grad(logprobs, logits, slope)
    assert torch.allclose(found, exact, rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_loss_is_unclipped_and_uncorrected(kind: str, seed: int) -> None:
    def loss(now: plain.Lists, held: plain.Lists, tokens: plain.Tokens) -> float:
        def term(i: int, t: int) -> float:
            log_ratio = now[i][t] - tokens.reference[i][t]
            return {
                "k1": log_ratio,
                "k2": log_ratio * log_ratio / 2,
                "k3": math.exp(-log_ratio) - 1 + log_ratio,
            }[kind]

        inside = decoupled("mis", "token")(now, held, tokens)
        return inside + 0.3 * plain.mean_over_tokens(term, tokens)

    tokens = plain.batch(seed, 0.5)
    config = plain.job("dapo", correction="mis", kl=kind, kl_coefficient=0.3)
    found, slope = plain.ours(tokens, config)
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)
    assert plain.is_close(slope, plain.slope(loss, tokens))


def k3(difference: float) -> tuple[float, float]:
    """Compute the k3 estimate and its slope at d = log-probability under the policy - the
    reference.
    """
    logprob = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    found = kl.estimate_kl("k3", logprob, torch.zeros_like(logprob))
    (slope,) = torch.autograd.grad(found.sum(), logprob)
    return found.item(), slope.item()


@given(st.floats(-300.0, 300.0))
def test_k3_matches_its_formula_and_keeps_its_sign_beyond_20_nats(difference: float) -> None:
    value, slope = k3(difference)
    assert math.isfinite(value) and math.isfinite(slope)
    assert value == pytest.approx(
        float(kl.estimate_kl_numpy("k3", np.array([difference]), np.zeros(1))[0]), rel=1e-12
    )
    if difference >= -20:
        exact = math.exp(-difference)
        assert value == pytest.approx(exact - 1 + difference, rel=1e-12, abs=1e-12)
        assert slope == pytest.approx(1 - exact, rel=1e-12, abs=1e-12)
    else:
        nearer, gentler = k3(difference + 1)
        assert value > nearer and slope <= gentler < 0


def test_kl_in_the_reward_is_not_in_the_loss() -> None:
    tokens = plain.batch(0)
    keys = {"kl_coefficient": 0.3, "kl_in": "reward"}
    assert (
        plain.ours(tokens, plain.job("dapo", **keys))[0]
        == (plain.ours(tokens, plain.job("dapo"))[0])
    )


def test_bounded_and_clipped_tokens_are_counted_separately() -> None:
    tokens = plain.batch(6, 0.8, count=12)
    config = plain.job("dapo", correction="mis").algorithm
    one = torch.ones(tokens.count, dtype=torch.float64)
    found = compute_objective(plain.terms(tokens), one, config)
    assert found.corrected_mask.any() and found.clipped_mask.any()
    assert not (found.corrected_mask & found.clipped_mask).any()
    assert (found.logprob_gradient[found.corrected_mask | found.clipped_mask] == 0).all()


# Algorithm, its keys, the plain loss, and how far the other policies are from the one trained.
PUBLISHED: dict[str, tuple[AlgorithmName, dict[str, Any], plain.Loss, float]] = {
    "grpo": ("grpo", {}, plain.grpo, 0.5),
    "grpo as published": (
        "grpo",
        {"aggregation": "sequences", "clip_high": 0.2, "dual_clip": 0.0, "kl_coefficient": 0.04},
        plain.grpo_published,
        0.3,
    ),
    "dr_grpo": ("dr_grpo", {}, plain.dr_grpo, 0.3),
    "dapo": ("dapo", {}, plain.dapo, 0.3),
    "rloo": ("rloo", {}, plain.rloo, 0.3),
    "reinforce_pp": ("reinforce_pp", {}, plain.reinforce_pp, 0.3),
    "gspo": ("gspo", {}, plain.gspo, 1e-3),
    "cispo": ("cispo", {}, plain.cispo, 0.3),
    "ppo": ("ppo", {}, plain.ppo, 0.3),
    "sft": ("sft", {}, plain.sft, 0.3),
    "distill": ("distill", {}, plain.distill, 0.5),
}
OF_TOKENS = ("reinforce_pp", "ppo")  # advantages differ within a trajectory


def test_every_algorithm_has_a_published_formula() -> None:
    assert {name for name, *_ in PUBLISHED.values()} == set(ALGORITHMS)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", PUBLISHED)
def test_loss_and_slope_match_the_published_formula(case: str, seed: int) -> None:
    name, keys, loss, spread = PUBLISHED[case]
    tokens = plain.batch(seed, spread, of_tokens=name in OF_TOKENS)
    found, slope = plain.ours(tokens, plain.job(name, **keys))
    assert found == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-12)
    assert plain.is_close(slope, plain.slope(loss, tokens))


@pytest.mark.parametrize("case", [c for c in PUBLISHED if c not in ("sft", "cispo")])
def test_batches_reach_both_sides_of_the_clips(case: str) -> None:
    name, keys, _, spread = PUBLISHED[case]
    config = plain.job(name, **keys)
    slopes = torch.cat(
        [plain.ours(plain.batch(s, spread), replace_kl(config))[1] for s in range(6)]
    )
    assert 0.05 < (slopes == 0).double().mean() < 0.95


def replace_kl(config: JobConfig) -> JobConfig:
    return replace(config, algorithm=replace(config.algorithm, kl_coefficient=0.0))


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"distill", "sft"}))
def test_on_policy_gradient_is_the_policy_gradient(name: AlgorithmName) -> None:
    """Check that every algorithm's on-policy gradient is A / denominator for each token, as in
    REINFORCE (Williams 1992) and the RLOO paper.
    """
    tokens = plain.batch(3)
    tokens.behaviour = tokens.proximal = tokens.now
    config = plain.job(name)
    _, slope = plain.ours(tokens, config)
    by_tokens = ALGORITHMS[name].aggregation == "tokens"
    share = plain.weights(tokens, config) / (tokens.count if by_tokens else len(tokens.now))
    assert torch.allclose(slope, -plain.flat(tokens.advantage) * share, rtol=1e-12)


def test_on_policy_distillation_has_the_reverse_kl_gradient() -> None:
    """Check the gradient of a policy over four tokens by its exact expectation over samples."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.5, -0.3, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True
    )
    tokens = plain.Tokens(*[[[x] for x in logprobs.tolist()] for _ in range(6)])
    tokens.teacher = [[x] for x in teacher.tolist()]
    found = compute_objective(
        plain.terms(tokens), logprobs.detach().exp(), AlgorithmConfig("distill")
    )
    (expected,) = torch.autograd.grad(logprobs, logits, found.logprob_gradient)
    assert torch.allclose(expected, exact, rtol=1e-12)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("correction", ["none", "tis", "mis"])
def test_loss_does_not_depend_on_the_split_into_bins(
    name: AlgorithmName, correction: str, seed: int
) -> None:
    tokens = plain.batch(seed, 0.05, of_tokens=name in OF_TOKENS)
    keys = {"correction_level": "sequence", "kl_coefficient": 0.1}
    config = plain.job(name, correction=correction, **keys)
    whole = compute_objective(plain.terms(tokens), plain.weights(tokens, config), config.algorithm)
    for cut in itertools.pairwise([0, 1, 3, 4, 5]):
        part = plain.Tokens(*[getattr(tokens, f)[slice(*cut)] for f in tokens.__slots__])
        found = compute_objective(plain.terms(part), plain.weights(part, config), config.algorithm)
        before = sum(len(one) for one in tokens.now[: cut[0]])
        inside = slice(before, before + part.count)
        assert torch.allclose(found.losses, whole.losses[inside], rtol=1e-12)
        assert torch.allclose(found.logprob_gradient, whole.logprob_gradient[inside], rtol=1e-12)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_extreme_ratio_gives_a_finite_loss(name: AlgorithmName) -> None:
    tokens = plain.batch(1)
    tokens.behaviour[0][0], tokens.teacher[0][0] = -800.0, -800.0
    tokens.reference[1][0] = -800.0
    config = plain.job(name, kl_coefficient=0.1, correction="tis")
    loss, slope = plain.ours(tokens, config)
    assert math.isfinite(loss) and slope.isfinite().all()


def test_job_overrides_clips_and_aggregation_of_the_algorithm() -> None:
    tokens = plain.batch(2)
    chosen = plain.job("dr_grpo", clip_high=0.28, aggregation="tokens")
    assert plain.ours(tokens, chosen)[0] == plain.ours(tokens, plain.job("dapo"))[0]
    whole = plain.ours(tokens, plain.job("dr_grpo"))[0]
    assert plain.ours(tokens, plain.job("dr_grpo", loss_constant=1))[0] == pytest.approx(
        whole * plain.LONGEST
    )


def test_loss_without_its_model_names_the_missing_table() -> None:
    terms = replace(plain.terms(plain.batch(0)), extras={})
    one = torch.ones_like(terms.logprobs)
    for config, table in [
        (AlgorithmConfig("distill"), "models.teacher"),
        (AlgorithmConfig("grpo", kl_coefficient=0.1), "models.reference"),
    ]:
        with pytest.raises(ConfigError, match=table):
            compute_objective(terms, one, config)


def test_step_computes_only_scores_of_its_losses() -> None:
    assert list_scoring_passes(AlgorithmConfig("grpo", correction="tis")) == ()
    assert list_scoring_passes(AlgorithmConfig("grpo", updates=4)) == ()
    assert list_scoring_passes(AlgorithmConfig("grpo", correction="tis", updates=4)) == (
        "proximal",
    )
    assert list_scoring_passes(AlgorithmConfig("ppo", correction="mis", updates=2)) == (
        "values",
        "proximal",
    )


def test_dynamic_sampling_is_on_for_dapo_or_by_option() -> None:
    assert has_refill(AlgorithmConfig("dapo")) and not has_refill(AlgorithmConfig("grpo"))
    assert has_refill(AlgorithmConfig("grpo", refill_filtered=True))


def test_unknown_algorithm_error_lists_known_ones() -> None:
    with pytest.raises(ConfigError, match="reinforce_pp"):
        get_algorithm("gpro")
