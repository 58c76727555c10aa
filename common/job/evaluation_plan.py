"""The evaluation plan of a job: what is evaluated at which version, and what its figures are
called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, fsum, isclose

from meshrl.common.job.config import EvaluationConfig, EvaluationDataset, JobConfig

HELD_OUT = "held_out"  # the set of dataset.held_out
SAMPLED, GREEDY = f"{HELD_OUT}.sampled", f"{HELD_OUT}.greedy"
BEFORE, AFTER = "before", "after"
TOLERANCE = 1e-9  # by which a sum of floats may miss the threshold that it stands for
MAX_MISSING_SHARE = (
    0.05  # share of a set's samples without a say above which versions are not compared by it
)


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """One evaluation: the held-out set in `modes`, and each of the other datasets."""

    tag: str  # one result each
    version: int
    sampling_modes: tuple[str, ...]  # sampled | greedy


def plan_boundary_evaluation(config: JobConfig, tag: str, version: int) -> EvaluationPlan | None:
    """The evaluation before or after training, as `tag` says; None: the job wants none."""
    plan = config.evaluation
    wanted = plan.before if tag == BEFORE else plan.after
    if not wanted or not can_evaluate(config):
        return None
    return EvaluationPlan(tag, version, ("sampled", "greedy"))


def can_evaluate(config: JobConfig) -> bool:
    """Whether there is something to evaluate on, and a reward to evaluate by."""
    rewarded = config.reward.reward_parts or config.reward.judge.use
    rewarded = rewarded or config.environment.use or config.environment.verifiers
    return bool(rewarded and (config.dataset.held_out or config.evaluation.datasets))


def plan_step_evaluation(config: JobConfig, version: int) -> EvaluationPlan | None:
    """The evaluation that a version asks for while training goes on; None: it asks for none.

    The last one is evaluated after training.
    """
    plan = config.evaluation
    last = version >= config.budget.steps
    if not plan.every or version < 1 or version % plan.every or last or not can_evaluate(config):
        return None
    modes = ("sampled", "greedy") if plan.best == GREEDY else ("sampled",)
    return EvaluationPlan(f"step-{version}", version, modes)


def is_comparable(missing: int, samples: int) -> bool:
    """Whether a figure of so many samples, `missing` of which failed or are of several versions,
    may make its version the best one: what a few are left to say is not what all would have said.
    """
    return samples > 0 and missing <= MAX_MISSING_SHARE * samples


def list_figures(config: EvaluationConfig, held_out: bool) -> list[str]:
    """The names of all figures of a job; `held_out`: it has that set."""
    found = [SAMPLED, GREEDY] if held_out else []
    for dataset in config.datasets:
        found += [f"{dataset.name}.mean", *(f"{dataset.name}.pass@{k}" for k in dataset.pass_at)]
    return found


def estimate_pass_at(k: int, samples: int, solved: int) -> float:
    """The unbiased estimate of the chance that one of k samples is right, from `solved` of
    `samples`, k <= samples (Chen et al. 2021, arXiv 2107.03374, equation 1)."""
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
    dataset: EvaluationDataset, rewards: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The figures of a dataset from the rewards of each problem's samples.

    Samples that failed by type are not among them; a problem with fewer than k samples left says
    nothing of pass@k. What no problem says is left out.
    """
    name = dataset.name
    every = [reward for problem in rewards for reward in problem]
    found = {f"{name}.mean": compute_mean(every)} if every else {}
    for k in dataset.pass_at:
        each = [
            estimate_pass_at(
                k, len(problem), sum(is_solved(reward, dataset.solved) for reward in problem)
            )
            for problem in rewards
            if len(problem) >= k
        ]
        if each:
            found[f"{name}.pass@{k}"] = compute_mean(each)
    return found
