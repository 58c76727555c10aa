"""Evaluation plan of a job: evaluations by version, and names of their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, fsum, isclose

from meshrl.common.job.config import EvaluationConfig, EvaluationSampling, JobConfig

HELD_OUT = "held_out"  # the set of dataset.held_out
SAMPLED, GREEDY = f"{HELD_OUT}.sampled", f"{HELD_OUT}.greedy"
LOSS = f"{HELD_OUT}.loss"  # lower is better
NAMED_APART = frozenset({SAMPLED, GREEDY, LOSS})  # figures that views show by short names
LOSS_METRIC = "held_out_loss"  # of a step
BEFORE, AFTER = "before", "after"
TOLERANCE = 1e-9  # for the rounding of sums of floats
MAX_MISSING_SHARE = 0.05  # maximum share of missing samples in a comparison of versions


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """One evaluation: the held-out set in `sampling_modes`, and each of the other datasets.

    A plan without modes is that of a job without a reward: the loss is its only figure.
    """

    tag: str  # of its one result
    version: int
    sampling_modes: tuple[str, ...]  # sampled | greedy


def plan_boundary_evaluation(config: JobConfig, tag: str, version: int) -> EvaluationPlan | None:
    """Return the evaluation before or after training, by `tag`; None if the job has none."""
    plan = config.evaluation
    is_enabled = plan.before if tag == BEFORE else plan.after
    if is_enabled and can_evaluate(config):
        return EvaluationPlan(tag, version, ("sampled", "greedy"))
    return EvaluationPlan(tag, version, ()) if is_loss_due(config, version) else None


def can_evaluate(config: JobConfig) -> bool:
    """Return True if the job has a dataset to evaluate on, and a reward."""
    return config.has_reward and bool(config.dataset.held_out or config.evaluation.datasets)


def has_held_out_loss(config: JobConfig) -> bool:
    """Return True if evaluations measure the loss of held-out answers."""
    return config.is_supervised and bool(config.dataset.held_out)


def is_loss_due(config: JobConfig, version: int) -> bool:
    """Return True if the core measures the held-out loss of a version, before its commit."""
    plan, last = config.evaluation, config.budget.steps
    is_due = plan.after if version >= last else plan.every and version % plan.every == 0
    return has_held_out_loss(config) and version > 0 and bool(is_due)


def plan_step_evaluation(config: JobConfig, version: int) -> EvaluationPlan | None:
    """Return the evaluation of a version during training; None if there is none.

    The last version is evaluated after training.
    """
    plan = config.evaluation
    last = version >= config.budget.steps
    if not plan.every or version < 1 or version % plan.every or last:
        return None
    if not can_evaluate(config):
        has_loss = has_held_out_loss(config)
        return EvaluationPlan(f"step-{version}", version, ()) if has_loss else None
    modes = ("sampled", "greedy") if plan.best == GREEDY else ("sampled",)
    return EvaluationPlan(f"step-{version}", version, modes)


def is_comparable(missing: int, samples: int) -> bool:
    """Return True if a figure of `samples` samples may make its version the best one.

    `missing` samples failed or are of several versions. With too many of them the rest is not
    representative.
    """
    return samples > 0 and missing <= MAX_MISSING_SHARE * samples


def list_figures(config: EvaluationConfig, held_out: bool) -> list[str]:
    """Return the names of all figures of a job; `held_out`: it has that set."""
    found = [SAMPLED, GREEDY, *_list_pass_figures(HELD_OUT, config)] if held_out else []
    for dataset in config.datasets:
        found += [f"{dataset.name}.mean", *_list_pass_figures(dataset.name, dataset)]
    return found


def _list_pass_figures(name: str, sampling: EvaluationSampling) -> list[str]:
    return [f"{name}.pass@{k}" for k in sampling.pass_at]


def estimate_pass_at(k: int, samples: int, solved: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is right.

    `solved` of `samples` are right, k <= samples (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def is_solved(reward: float, threshold: float) -> bool:
    """True if a reward reaches a threshold, but for rounding: 0.7 + 0.2 + 0.1 reaches 1."""
    return reward >= threshold or isclose(reward, threshold, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def compute_mean(rewards: Sequence[float]) -> float:
    """Return the mean of one reward or more, which is finite if they are."""
    try:
        return fsum(rewards) / len(rewards)
    except OverflowError:
        return fsum(reward / len(rewards) for reward in rewards)


def compute_figures(
    mean_name: str, sampling: EvaluationSampling, rewards: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the figures of a dataset from the rewards of each problem's samples.

    `mean_name` is the name of the mean, as in `NAME.mean`; the other names begin like it.
    Samples that failed by typed errors are not included. A problem with fewer than k samples does
    not count for pass@k. Figures without any problem are left out.
    """
    name = mean_name.rpartition(".")[0]
    every = [reward for problem in rewards for reward in problem]
    found = {mean_name: compute_mean(every)} if every else {}
    for k in sampling.pass_at:
        each = [
            estimate_pass_at(
                k, len(problem), sum(is_solved(reward, sampling.solved) for reward in problem)
            )
            for problem in rewards
            if len(problem) >= k
        ]
        if each:
            found[f"{name}.pass@{k}"] = compute_mean(each)
    return found
