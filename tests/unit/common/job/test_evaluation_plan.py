"""Which versions are evaluated, and pass@k held to what it estimates."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.job.config import (
    BudgetConfig,
    DatasetConfig,
    EvaluationConfig,
    EvaluationDataset,
    JobConfig,
    RewardConfig,
)
from meshrl.common.job.evaluation_plan import bracket, due, estimates, figures, mean, pass_at

JOB = JobConfig(
    dataset=DatasetConfig(held_out="held_out.jsonl"),
    reward=RewardConfig(use="m:f"),
    evaluation=EvaluationConfig(every=4),
    budget=BudgetConfig(steps=12),
)


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_right_one(
    case: tuple[int, int, int],
) -> None:
    samples, right, k = case
    choices = list(combinations([i < right for i in range(samples)], k))
    assert pass_at(k, samples, right) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_estimate_does_not_depend_on_how_many_samples_there_are() -> None:
    """Over all outcomes of n samples that are right with probability p, it is 1 - (1 - p)^k."""
    p, k = 0.3, 2
    for n in (2, 3, 6):
        outcomes = [[bool(bits >> i & 1) for i in range(n)] for bits in range(2**n)]
        expected = sum(
            p ** sum(o) * (1 - p) ** (n - sum(o)) * pass_at(k, n, sum(o)) for o in outcomes
        )
        assert expected == pytest.approx(1 - (1 - p) ** k)


def test_figures_are_of_the_samples_that_there_are() -> None:
    dataset = EvaluationDataset("sums", "x", samples=4, pass_at=[1, 4], solved=0.5)
    found = estimates(dataset, [[1.0, 0.5, 0.0, 0.0], [0.25], []])
    assert found == pytest.approx(
        {"sums.mean": 1.75 / 5, "sums.pass@1": (0.5 + 0.0) / 2, "sums.pass@4": 1.0}
    )
    assert estimates(dataset, [[], []]) == {}


def test_a_reward_that_misses_a_threshold_by_rounding_reaches_it() -> None:
    dataset = EvaluationDataset("sums", "x", samples=1, pass_at=[1])
    assert estimates(dataset, [[0.7 + 0.2 + 0.1]]) == pytest.approx(
        {"sums.mean": 1.0, "sums.pass@1": 1.0}
    )
    assert estimates(dataset, [[0.999]])["sums.pass@1"] == 0.0


def test_a_mean_of_large_rewards_is_finite() -> None:
    assert mean([1.7e308] * 4) == pytest.approx(1.7e308)
    assert mean([0.7, 0.2, 0.1]) == pytest.approx(1 / 3)


def test_a_version_is_evaluated_every_so_many_steps_and_the_last_one_after_training() -> None:
    asked = [version for version in range(13) if due(JOB, version)]
    assert asked == [4, 8]
    plan = due(JOB, 4)
    assert plan is not None and (plan.tag, plan.version, plan.modes) == ("step-4", 4, ("sampled",))
    last = bracket(JOB, "after", 12)
    assert last is not None and last.modes == ("sampled", "greedy")


def test_what_the_best_version_is_chosen_by_is_measured_each_time() -> None:
    greedy = replace(JOB, evaluation=EvaluationConfig(every=4, best="held_out.greedy"))
    plan = due(greedy, 8)
    assert plan is not None and plan.modes == ("sampled", "greedy")


def test_nothing_is_evaluated_without_rows_or_without_a_reward() -> None:
    for job in (replace(JOB, dataset=DatasetConfig()), replace(JOB, reward=RewardConfig())):
        assert due(job, 4) is None and bracket(job, "before", 0) is None
    without = replace(JOB, evaluation=EvaluationConfig(every=0, before=False))
    assert due(without, 4) is None and bracket(without, "before", 0) is None


def test_figures_have_names() -> None:
    datasets = [EvaluationDataset("a", "x", samples=4, pass_at=[1, 4])]
    assert figures(EvaluationConfig(datasets=datasets), held_out=True) == [
        "held_out.sampled",
        "held_out.greedy",
        "a.mean",
        "a.pass@1",
        "a.pass@4",
    ]
