"""Health statistics of a step, compared with their definitions, and sums over bins."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from meshrl.common.job.constraints import AlgorithmName
from meshrl.services.trainer.learner.objective import compute_objective
from meshrl.services.trainer.learner.stats import (
    BinStats,
    build_update_metrics,
    measure_bin,
    measure_values,
)
from tests.unit.trainer.losses import published_formulas as plain

EVERY = torch.ones(0, dtype=torch.bool)  # represents all tokens


def compute_metrics(
    tokens: plain.Tokens,
    name: AlgorithmName = "dapo",
    fresh: torch.Tensor | None = EVERY,
    **keys: Any,
) -> BinStats:
    terms = plain.terms(tokens)
    one = torch.ones_like(terms.logprobs)
    config = plain.job(name, **keys)
    found = compute_objective(terms, plain.weights(tokens, config), config.algorithm)
    fresh = torch.ones_like(one, dtype=torch.bool) if fresh is EVERY else fresh
    return measure_bin(terms, found, 2 * one, fresh)


def every(tokens: plain.Tokens, of: plain.Term) -> list[float]:
    return [of(i, t) for i, t in plain.every(tokens)]


def test_metrics_match_their_definitions() -> None:
    tokens = plain.batch(3, 0.4, count=8)
    ratios = every(tokens, lambda i, t: math.exp(tokens.now[i][t] - tokens.behaviour[i][t]))
    worth = every(tokens, lambda i, t: tokens.advantage[i][t])
    n = tokens.count
    high = sum(r > 1.28 and a > 0 for r, a in zip(ratios, worth, strict=True))
    low = sum(r < 0.8 and a < 0 for r, a in zip(ratios, worth, strict=True))
    found = build_update_metrics(1, 0.5, compute_metrics(tokens), n)
    assert high and low
    assert found["clipped_high"] == high / n and found["clipped_low"] == low / n
    assert found["clipped"] == (high + low) / n
    assert found["ratio_max"] == pytest.approx(max(ratios))
    assert found["ratio_min"] == pytest.approx(min(ratios))
    assert found["effective_sample_size"] == pytest.approx(
        sum(ratios) ** 2 / (n * sum(r * r for r in ratios))
    )
    assert found["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / n)
    assert found["entropy"] == 2.0 and found["grad_norm"] == 0.5
    log_ratio = every(tokens, lambda i, t: tokens.reference[i][t] - tokens.now[i][t])
    assert found["reference_kl"] == pytest.approx(sum(math.exp(g) - 1 - g for g in log_ratio) / n)
    log_ratio = every(tokens, lambda i, t: tokens.now[i][t] - tokens.teacher[i][t])
    assert found["teacher_kl"] == pytest.approx(sum(log_ratio) / n)


def test_logprob_gap_covers_only_fresh_tokens() -> None:
    tokens = plain.batch(4, 0.4)
    fresh = torch.arange(tokens.count) % 3 == 0
    gaps = every(tokens, lambda i, t: tokens.now[i][t] - tokens.behaviour[i][t])[::3]
    found = build_update_metrics(1, 0.0, compute_metrics(tokens, fresh=fresh), tokens.count)
    assert found["fresh_tokens"] == len(gaps)
    assert found["logprob_gap"] == pytest.approx(max(map(abs, gaps)))
    assert found["logprob_gap_mean"] == pytest.approx(sum(map(abs, gaps)) / len(gaps))
    exact = sum(math.exp(g) - 1 - g for g in gaps) / len(gaps)
    assert found["logprob_kl"] == pytest.approx(exact)


def test_supervised_tokens_are_excluded_from_policy_metrics() -> None:
    stats = compute_metrics(plain.batch(4), "sft", fresh=None)
    found = build_update_metrics(1, 0.0, stats, stats.tokens)
    compared: tuple[str, ...] = ("kl", "ratio_max", "ratio_min", "effective_sample_size")
    compared += ("logprob_gap", "logprob_gap_mean", "logprob_kl")
    assert [found[name] for name in compared] == [None] * 7
    assert found["fresh_tokens"] == 0 and found["model_tokens"] == stats.tokens > 0
    assert found["loss"] > 0 and found["entropy"] == 2.0


@pytest.mark.parametrize(
    ("name", "keys", "loss"),
    [
        ("dapo", {}, plain.dapo),
        ("dr_grpo", {}, plain.dr_grpo),
        ("gspo", {}, plain.gspo),
        (
            "grpo",
            {"aggregation": "sequences", "clip_high": 0.2, "dual_clip": 0, "kl_coefficient": 0.04},
            plain.grpo_published,
        ),
    ],
)
def test_loss_is_the_objective_for_every_aggregation(
    name: AlgorithmName, keys: dict[str, Any], loss: plain.Loss
) -> None:
    tokens = plain.batch(3, 0.3)
    by_tokens = name == "dapo"
    counted = tokens.count if by_tokens else len(tokens.now)
    found = build_update_metrics(1, 0.0, compute_metrics(tokens, name, **keys), counted)
    assert found["loss"] == pytest.approx(loss(tokens.now, tokens.now, tokens), rel=1e-10)


def test_on_policy_tokens_have_ratio_one() -> None:
    tokens = plain.batch(4)
    tokens.behaviour = tokens.now
    found = build_update_metrics(1, 0.0, compute_metrics(tokens), tokens.count)
    assert found["effective_sample_size"] == pytest.approx(1.0)
    assert found["ratio_max"] == found["ratio_min"] == 1.0
    assert found["clipped"] == found["logprob_gap"] == 0.0


def test_correction_bounds_and_clips_are_counted_separately() -> None:
    tokens = plain.batch(6, 0.8, count=12)
    ratios = every(tokens, lambda i, t: math.exp(tokens.proximal[i][t] - tokens.behaviour[i][t]))
    masked = compute_metrics(tokens, correction="mis")
    assert masked.corrected_tokens == sum(not 0.5 <= r <= 5.0 for r in ratios) > 0
    assert (
        compute_metrics(tokens, correction="tis").corrected_tokens
        == sum(r > 2.0 for r in ratios)
        > 0
    )
    assert compute_metrics(tokens).corrected_tokens == 0


def test_gspo_clips_whole_sequences_on_one_side() -> None:
    tokens = plain.batch(2, 1e-2, count=9)
    total, high = 0, 0
    for now, before, worth in zip(tokens.now, tokens.behaviour, tokens.advantage, strict=True):
        log_ratio = sum(a - b for a, b in zip(now, before, strict=True)) / len(now)
        above = math.exp(log_ratio) > 1 + 4e-4 and worth[0] > 0
        below = math.exp(log_ratio) < 1 - 3e-4 and worth[0] < 0
        total, high = total + len(now) * (above or below), high + len(now) * above
    found = compute_metrics(tokens, "gspo")
    assert 0 < high < total and (found.clipped_tokens, found.clipped_high_tokens) == (total, high)


def test_sums_over_bins_equal_those_of_the_batch() -> None:
    tokens = plain.batch(5, 0.4, count=7)
    parts = [
        plain.Tokens(*[getattr(tokens, f)[cut] for f in tokens.__slots__])
        for cut in (slice(0, 2), slice(2, 3), slice(3, 7))
    ]
    added = asdict(sum((compute_metrics(part) for part in parts), BinStats()))
    assert added == pytest.approx(asdict(compute_metrics(tokens)), rel=1e-12)


def test_empty_bin_changes_no_metric() -> None:
    some = compute_metrics(plain.batch(5, 0.4))
    assert some + BinStats() == some
    assert BinStats(**asdict(some)) == some


def test_step_without_trained_tokens_has_no_ratios() -> None:
    found = build_update_metrics(0, 0.0, BinStats(), 0.0)
    assert found["ratio_min"] is None and found["effective_sample_size"] is None
    assert found["loss"] == 0.0 and found["kl"] is None and found["logprob_gap_mean"] is None
    assert "reference_kl" not in found and "value_loss" not in found
    assert all(not isinstance(x, float) or math.isfinite(x) for x in found.values())


def test_explained_variance_of_a_critic() -> None:
    terms = plain.terms(plain.batch(1))
    n = len(terms.logprobs)
    returns = torch.linspace(-1, 1, n, dtype=torch.float64)
    for values, explained in ((returns + 3, 1.0), (torch.zeros_like(returns), 0.0)):
        stats = BinStats()
        valued = replace(terms, extras={"returns": returns, "values": values})
        measure_values(stats, valued, torch.full_like(returns, 0.5))
        found = build_update_metrics(1, 0.0, stats, n)
        assert found["explained_variance"] == pytest.approx(explained, abs=1e-9)
        assert found["value_loss"] == pytest.approx(0.5)
