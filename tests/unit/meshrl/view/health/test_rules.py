"""Rules of a run's health, on rows of real runs (`recorded/`) and on varied rows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.job.config import AlgorithmConfig, JobConfig, OptimizerConfig, RolloutConfig
from meshrl.view.health.case import Severity
from meshrl.view.health.findings import Finding, find_problems, judge_run, parse_findings
from meshrl.view.health.rules import RULES
from meshrl.view.health.run_figures import WINDOW, RunFigures, collect_figures, extend_figures

RECORDED = Path(__file__).parent / "recorded"
JOB = JobConfig()
Rows = list[dict[str, Any]]


def read_recorded(name: str) -> Rows:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def judge(rows: Rows, job: JobConfig = JOB, is_over: bool = True) -> tuple[Finding, ...]:
    return find_problems(collect_figures(rows), job.to_document(), is_over=is_over)


def list_rules(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.rule, finding.severity) for finding in findings]


def make_rows(count: int = 30, **changes: Any) -> Rows:
    """Return rows of a run whose reward rises unless `changes` differ; a callable gets the step."""
    rows = []
    for step in range(1, count + 1):
        row = {
            "step": step,
            "lineage": 0,
            "reward": 0.2 + 0.02 * step + 0.01 * (step % 2),
            "reward_spread": 0.3,
            "groups": 4,
            "filtered_share": 0.25,
            "sequences": 24,
            "tokens": 320,
            "length_mean": 10.0,
            "truncated": 1,
            "masked": 0,
            "turns": 1.0,
            "failed_share": 0.0,
            "loss": 0.1,
            "entropy": 0.8,
            "kl": 1e-4,
            "grad_norm": 0.5,
            "logprob_gap_mean": 1e-6,
            "masters": f"weights-{step}",
        }
        changed = {key: v(step) if callable(v) else v for key, v in changes.items()}
        rows.append({key: v for key, v in (row | changed).items() if v is not None})
    return rows


NOTHING_TRAINED: dict[str, Any] = {
    "sequences": 0,
    "reward_spread": 0.0,
    "masters": "same",
    "filtered_share": 1.0,
}
FLAT: dict[str, Any] = {"reward": lambda step: 0.3 + 0.05 * (step % 2)}


@pytest.mark.parametrize("name", ["game", "calculator", "chat"])
def test_runs_that_learn_raise_no_finding_at_any_step(name: str) -> None:
    figures = RunFigures()
    for row in read_recorded(name):
        figures.add(row)
        assert find_problems(figures, JOB.to_document()) == (), row["step"]
    assert find_problems(figures, JOB.to_document(), is_over=True) == ()


def test_run_with_a_constant_reward_cannot_have_learned() -> None:
    rows = read_recorded("filtered")
    (finding,) = judge(rows)
    assert (finding.rule, finding.severity, finding.step) == ("all_filtered", "failure", 4)
    assert "all 64 groups (512 trajectories) were filtered" in finding.line
    assert "the reward is 0.5 for every trajectory. Change reward.use" in finding.line
    assert "rollout.max_tokens" not in finding.keys
    assert judge(rows, is_over=False) == (), "the next steps may differ"


def test_run_without_stop_tokens_cannot_have_learned() -> None:
    first, second = judge(read_recorded("truncated"))
    assert (first.rule, first.is_failure) == ("no_end_token", True)
    assert "all 1024 trajectories were truncated" in first.line and "rollout.stop" in first.line
    assert (second.rule, second.is_failure) == ("all_filtered", True)
    assert "rollout.max_tokens" in second.keys


def test_run_with_a_rate_of_1000_cannot_have_learned() -> None:
    job = replace(JOB, optimizer=OptimizerConfig(adamw_lr=1000.0))
    rows = read_recorded("learning_rate")
    (finding,) = judge(rows, job)
    assert (finding.rule, finding.is_failure) == ("learning_rate", True)
    assert "optimizer.adamw_lr = 1000" in finding.text and finding.keys == ("optimizer.adamw_lr",)
    assert judge(rows[:1], job, is_over=False) == (replace(finding, step=1),)


def test_rate_far_above_the_usual_is_reported_until_the_run_improves() -> None:
    job = replace(JOB, optimizer=OptimizerConfig(muon_lr=0.05))
    (finding,) = judge(make_rows(reward=FLAT["reward"]), job)
    assert (finding.rule, finding.severity) == ("learning_rate", "warning")
    assert "optimizer.muon_lr = 0.05 is 17 times the usual rate" in finding.text
    assert judge(make_rows(), job) == ()
    assert judge(make_rows(WINDOW - 1, **FLAT), job, is_over=False) == ()
    of_other_version = collect_figures(make_rows(**FLAT)), {"unknown": {"key": 1}}
    assert find_problems(*of_other_version) == ()


@pytest.mark.parametrize(
    ("rule", "severity", "changes"),
    [
        ("learning_rate", "failure", {"kl": lambda step: 1e4 if step == 7 else 0.0} | FLAT),
        ("learning_rate", "warning", {"kl": lambda step: 50.0 if step == 7 else 0.0}),
        ("no_end_token", "warning", {"truncated": 32} | FLAT),
        ("no_end_token", "failure", {"truncated": 32} | NOTHING_TRAINED),
        ("truncated", "warning", {"truncated": 16} | FLAT),
        ("truncated", "failure", {"truncated": 32, "turns": 2.0} | NOTHING_TRAINED),
        ("failures", "warning", {"failed_share": 0.1}),
        ("all_filtered", "failure", NOTHING_TRAINED),
        ("all_filtered", "warning", {"sequences": lambda step: 24 * (step < 20)} | FLAT),
        ("filtered_share", "warning", {"filtered_share": 0.95} | FLAT),
        ("reward_spread", "failure", {"reward_spread": 0.0} | FLAT),
        ("reward_spread", "warning", {"reward_spread": lambda step: 0.3 * (step < 20)}),
        ("weights_unchanged", "failure", {"masters": "same"}),
        ("gradient_norm", "warning", {"grad_norm": 101.0}),
        ("gradient_norm", "failure", {"grad_norm": lambda step: math.nan if step == 7 else 0.5}),
        ("entropy_collapse", "warning", {"entropy": lambda step: 0.8 / step**2} | FLAT),
        ("entropy_explosion", "warning", {"entropy": lambda step: 0.2 * step} | FLAT),
        ("logprob_gap", "warning", {"logprob_gap_mean": lambda s: None if s % 3 else 0.06}),
        ("kl", "warning", {"kl": 0.11}),
        ("kl", "warning", {"reference_kl": 1.1} | FLAT),
    ],
)
def test_rule_finds_its_cause(rule: str, severity: str, changes: dict[str, Any]) -> None:
    found = judge(make_rows(**changes), is_over=False)
    assert (rule, severity) in list_rules(found)
    assert [finding.severity for finding in found] == sorted(
        finding.severity for finding in found
    ), "failures come first"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"truncated": 32},
        {"filtered_share": 0.95, "entropy": lambda step: 0.8 / step**2},
        {"entropy": lambda step: 0.2 * step, "reference_kl": 3.0},
        {"sequences": lambda step: 24 * (step < 20)},
        {"failed_share": lambda step: 0.5 if step == 30 else 0.0},
        {"logprob_gap_mean": None, "kl": None},
    ],
)
def test_run_that_improves_raises_no_finding(changes: dict[str, Any]) -> None:
    assert judge(make_rows(**changes), is_over=False) == ()


def test_rule_waits_for_its_window_while_a_run_continues() -> None:
    rows = make_rows(WINDOW - 1, failed_share=0.5)
    assert judge(rows, is_over=False) == ()
    assert list_rules(judge(rows)) == [("failures", "warning")]


@pytest.mark.parametrize(
    ("algorithm", "rules"),
    [
        ("grpo", [("reward_spread", "failure")]),
        ("ppo", [("reward_constant", "failure")]),
        ("sft", []),
        ("distill", []),
    ],
)
def test_equal_rewards_matter_to_algorithms_that_use_them(
    algorithm: Any, rules: list[tuple[str, str]]
) -> None:
    job = replace(JOB, algorithm=AlgorithmConfig(name=algorithm))
    rows = make_rows(reward=0.0, reward_spread=0.0)
    assert list_rules(judge(rows, job)) == rules


def test_falling_loss_is_an_improvement_without_rewards() -> None:
    job = replace(JOB, algorithm=AlgorithmConfig(name="sft"))
    changes: dict[str, Any] = {"reward": 0.0, "reward_spread": 0.0}
    changes |= {"entropy": lambda step: 0.8 / step**2}
    assert list_rules(judge(make_rows(**changes), job)) == [("entropy_collapse", "warning")]
    assert judge(make_rows(loss=lambda step: 1 / step, **changes), job) == ()


def test_low_temperature_raises_the_limit_of_a_diverged_policy() -> None:
    rows = make_rows(kl=lambda step: 11.0 if step == 7 else 0.0, **FLAT)
    for temperature, rules in ((1.0, ["learning_rate"]), (0.01, [])):
        job = replace(JOB, rollout=RolloutConfig(temperature=temperature))
        found = [finding.rule for finding in judge(rows, job) if finding.is_failure]
        assert found == rules


def test_stale_share_needs_enough_trajectories() -> None:
    figures = collect_figures(make_rows())
    for opened, rules in ((99, []), (100, [("staleness", "warning")])):
        counts = {"opened": opened, "stale_requeued": 40}
        assert list_rules(find_problems(figures, JOB.to_document(), counts)) == rules


def test_rows_without_numbers_are_not_judged() -> None:
    rows = [{"step": step, "reward": 0.5, "tokens": 9} for step in range(1, 31)]
    verdicts = judge_run(collect_figures(rows), {}, is_over=True)
    assert verdicts.keys() == {"learning_rate"}
    assert judge_run(RunFigures(), {}, is_over=True) == {}


def test_figures_hold_few_steps_of_a_long_run() -> None:
    figures = collect_figures(make_rows(2000))
    assert (figures.steps, len(figures.first), len(figures.recent)) == (2000, WINDOW, WINDOW)
    assert {len(values) for values in figures.occasional.values()} == {WINDOW}


def test_new_lineage_replaces_the_steps_that_it_abandons() -> None:
    rows = make_rows(20, **NOTHING_TRAINED)
    figures = extend_figures(RunFigures(), rows)
    figures = extend_figures(figures, rows)
    assert figures.steps == 20, "known rows count once"
    kept = [*takewhile(lambda row: row["step"] <= 8, rows)]
    again = [row | {"lineage": 1} for row in make_rows(22)[8:]]
    figures = extend_figures(figures, [*kept, *again])
    assert (figures.steps, figures.lineage) == (22, 1)
    assert "all_filtered" not in [f.rule for f in find_problems(figures, JOB.to_document())]


def test_findings_survive_a_summary() -> None:
    found = judge(read_recorded("truncated"))
    documents = json.loads(json.dumps([finding.to_document() for finding in found]))
    assert parse_findings(documents) == found


def test_rules_name_existing_keys() -> None:
    document = JOB.to_document()
    for rule in RULES:
        for key in rule.keys:
            table, _, name = key.partition(".")
            assert name in document[table], key
        assert {*rule.follows_from} <= {other.name for other in RULES}


def test_rules_are_documented() -> None:
    page = (Path(__file__).parents[5] / "docs/use/health.md").read_text()
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [name for name in named if name not in ("summary.json", "report.html")] == [
        *("meshrl run", "meshrl_job_health"),
        *(rule.name for rule in RULES),
    ]


def test_severities_are_those_of_the_gauge() -> None:
    assert [int(severity) for severity in Severity] == [0, 1, 2]
