"""Rules about the updates: learning rate, gradient, entropy and divergences of the policy."""

from __future__ import annotations

import math
from statistics import fmean

from meshrl.common.base.errors import ConfigError
from meshrl.common.job import sampling_keys
from meshrl.common.job.config import JobConfig
from meshrl.common.job.learning_rates import describe_high_rates
from meshrl.view.health.case import (
    FINE,
    SHORT_WINDOW,
    Case,
    Severity,
    Verdict,
    format_steps,
    judge_limit,
)
from meshrl.view.health.run_figures import WINDOW

LOW_ENTROPY, LOW_ENTROPY_RATIO = 0.05, 0.1  # nats, and relative to the first steps
HIGH_ENTROPY_GAIN, HIGH_ENTROPY_RATIO = 1.0, 3.0  # nats, and relative to the first steps
HIGH_LOGPROB_GAP = 0.05  # nats: probabilities differ by 5 % on average
HIGH_KL, HIGH_REFERENCE_KL = 0.1, 1.0  # nats per token
DIVERGED_KL = 10.0  # nats per token: the policy was replaced, not improved
HIGH_CLIP_RATIO = 100.0  # gradient norm relative to optimizer.clip_norm
# At these rates one step outweighs what the weights were. AdamW moves a weight by up to its rate
# per step (Kingma and Ba 2015, section 2.1), and weights begin around 0.02. Muon adds a matrix
# whose singular values are its rate.
HIGH_RATES = {"adamw_lr": 1.0, "muon_lr": 1.0}


def judge_learning_rate(case: Case) -> Verdict | None:
    """Judge the job's rates, and the largest change of the policy in a step."""
    if not case.figures.steps:
        return None
    rates = {key: float(case.read_key("optimizer", key, 0.0)) for key in HIGH_RATES}
    high = [key for key, limit in HIGH_RATES.items() if not rates[key] < limit]
    if high:
        named = " and ".join(f"optimizer.{key} = {rates[key]:g}" for key in high)
        text = f"{named}: each step replaces the weights instead of improving them"
        return Verdict(Severity.FAILURE, text, keys=tuple(f"optimizer.{key}" for key in high))
    kl = case.figures.ranges.get("kl")
    # A low temperature multiplies differences of log-probabilities.
    limit = DIVERGED_KL / min(1.0, float(case.read_key("rollout", "temperature", 1.0)))
    if kl is None or kl.high < limit:
        return _judge_usual_rates(case)
    text = f"a step changed the policy by {kl.high:.3g} nats per token"
    return Verdict(Severity.WARNING if case.has_improved else Severity.FAILURE, text)


def _judge_usual_rates(case: Case) -> Verdict:
    """Judge if the job's rates are far above the usual, in a run that has not improved."""
    if case.has_improved or not case.is_long_enough(WINDOW):
        return FINE
    document = {name: table for name, table in case.document.items() if name != "bundle"}
    try:
        warnings = describe_high_rates(JobConfig.from_document(document))
    except ConfigError:  # a document of another version
        return FINE
    if not warnings:
        return FINE
    return Verdict(Severity.WARNING, "; ".join(warnings.values()), keys=tuple(warnings))


def judge_weights(case: Case) -> Verdict | None:
    """Judge if the steps change the weights."""
    unchanged = case.figures.ranges.get("is_unchanged")
    if unchanged is None or not case.is_long_enough(SHORT_WINDOW):
        return None
    if unchanged.low == 0 or unchanged.count < case.figures.steps - 1:
        return FINE
    return Verdict(
        Severity.FAILURE, f"the weights were the same in {format_steps(case.figures.steps)}"
    )


def judge_gradient(case: Case) -> Verdict | None:
    """Judge the gradient norm: not finite, zero, or far above the clip."""
    norm = case.figures.ranges.get("grad_norm")
    recent = case.find_recent("grad_norm", SHORT_WINDOW)
    if norm is None or not recent:
        return None
    if not math.isfinite(norm.total):
        return Verdict(Severity.FAILURE, "a gradient was not finite")
    clip = float(case.read_key("optimizer", "clip_norm", 1.0))
    text = f"the gradient norm was {fmean(recent):.3g} on average in the last steps"
    return judge_limit(fmean(recent), HIGH_CLIP_RATIO * clip, text)


def judge_low_entropy(case: Case) -> Verdict | None:
    """Judge if the policy has become deterministic before it has learned."""
    recent = case.find_recent("entropy", WINDOW)
    first = [row["entropy"] for row in case.figures.first if "entropy" in row]
    if not recent or not first:
        return None
    limit = min(LOW_ENTROPY, LOW_ENTROPY_RATIO * fmean(first))
    if fmean(recent) >= limit or case.has_improved:
        return FINE
    text = f"the entropy fell from {first[0]:.3g} to {fmean(recent):.3g} nats per token"
    return Verdict(Severity.WARNING, text)


def judge_high_entropy(case: Case) -> Verdict | None:
    """Judge if the policy has become random."""
    recent = case.find_recent("entropy", WINDOW)
    first = [row["entropy"] for row in case.figures.first if "entropy" in row]
    if not recent or not first:
        return None
    limit = max(HIGH_ENTROPY_RATIO * fmean(first), fmean(first) + HIGH_ENTROPY_GAIN)
    if fmean(recent) < limit or case.has_improved:
        return FINE
    text = f"the entropy rose from {first[0]:.3g} to {fmean(recent):.3g} nats per token"
    return Verdict(Severity.WARNING, text)


def judge_logprob_gap(case: Case) -> Verdict | None:
    """Judge the mean difference of log-probabilities between engine and trainer."""
    if _has_changed_sampling(case):
        return None
    measured = list(case.figures.occasional.get("logprob_gap_mean", ()))[-SHORT_WINDOW:]
    if len(measured) < (1 if case.is_over else SHORT_WINDOW):
        return None
    gap = fmean(measured)
    text = f"log-probabilities of engine and trainer differ by {gap:.3g} nats on average"
    return judge_limit(gap, HIGH_LOGPROB_GAP, text)


def judge_kl(case: Case) -> Verdict | None:
    """Judge the divergence of the policy from the sampling policy and from the reference."""
    recent, reference = (case.find_recent(name, WINDOW) for name in ("kl", "reference_kl"))
    recent = [] if _has_changed_sampling(case) else recent
    if not recent and not reference:
        return None
    if recent and fmean(recent) >= HIGH_KL:
        text = f"the policy is {fmean(recent):.3g} nats per token from the one that sampled"
        return Verdict(Severity.WARNING, text)
    if reference and fmean(reference) >= HIGH_REFERENCE_KL and not case.has_improved:
        text = f"the policy is {fmean(reference):.3g} nats per token from the reference"
        return Verdict(Severity.WARNING, text, keys=("algorithm.kl_coefficient",))
    return FINE


def _has_changed_sampling(case: Case) -> bool:
    """Return True if filters or penalties make the sampling policy another one than the trained."""
    return bool(sampling_keys.list_changed(case.document.get("rollout", {})))
