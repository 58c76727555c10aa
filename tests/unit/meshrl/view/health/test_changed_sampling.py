"""Health rules of jobs that do not sample from the trained policy itself."""

from __future__ import annotations

from typing import Any

import pytest

from meshrl.view.health.findings import find_problems
from meshrl.view.health.run_figures import collect_figures

ROW: dict[str, Any] = {"reward": 0.5, "reward_spread": 0.2, "groups": 4, "sequences": 16}
ROWS = [
    ROW | {"step": step, "logprob_gap_mean": 0.3, "kl": 0.4, "reference_kl": 0.1, "masters": step}
    for step in range(1, 13)
]


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({}, {"logprob_gap", "kl"}),
        ({"repetition_penalty": 1.0, "logit_bias": {}}, {"logprob_gap", "kl"}),
        ({"repetition_penalty": 1.1}, set()),
        ({"logit_bias": {"a": -1.0}}, set()),
        ({"top_p": 0.9}, set()),
    ],
    ids=str,
)
def test_differences_from_the_sampling_policy_are_judged_where_it_is_the_models(
    rollout: dict[str, Any], expected: set[str]
) -> None:
    problems = find_problems(collect_figures(ROWS), {"rollout": rollout}, {}, is_over=True)
    assert {finding.rule for finding in problems} & {"logprob_gap", "kl"} == expected
