"""Bundle files, rules for key changes, and evaluation plans."""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.base.errors import CorruptData
from meshrl.common.job.bundle import bundle_files
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.change_rules import (
    RULES,
    ZERO_SWITCH_REASONS,
    apply_changes,
    diff_documents,
    explain_rejected_change,
    find_rule,
    restore_recorded,
    select_recorded,
)
from meshrl.common.job.config import (
    AlgorithmConfig,
    BudgetConfig,
    DatasetConfig,
    EvaluationConfig,
    EvaluationDataset,
    EvaluationSampling,
    JobConfig,
    RewardConfig,
)
from meshrl.common.job.evaluation_plan import (
    compute_figures,
    compute_mean,
    estimate_pass_at,
    is_loss_due,
    list_figures,
    plan_boundary_evaluation,
    plan_step_evaluation,
)
from meshrl.common.job.schema import JOB_SCHEMA

KEYS = [key for key, kind in JOB_SCHEMA.types_by_key.items() if not is_dataclass(kind)]
TABLES = [key for key, kind in JOB_SCHEMA.types_by_key.items() if is_dataclass(kind)]
PLANNED = JobConfig(
    dataset=DatasetConfig(held_out="held_out.jsonl"),
    reward=RewardConfig(use="m:f"),
    evaluation=EvaluationConfig(every=4),
    budget=BudgetConfig(steps=12),
)


def make_job_data(directory: Path) -> JobData:
    for name, content in {
        "data/train.jsonl": '{"prompt": "1"}\n',
        "modules/rewards.py": "x = 1\n",
        "tokenizer/tokenizer.json": "{}",
    }.items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(content)
    document = JobConfig(name="sum").to_document()
    document["dataset"]["train"] = "data/train.jsonl"
    document["model"]["tokenizer"] = "tokenizer/tokenizer.json"
    document["bundle"] = {"dir": str(directory), "files": bundle_files.list_files(directory)}
    return JobData.from_document("sum", document, str(directory))


@pytest.mark.parametrize(
    "name", ["data/train.jsonl", "modules/rewards.py", "tokenizer/tokenizer.json"]
)
@pytest.mark.parametrize("corruption", ["flipped", "empty", "deleted"])
def test_changed_bundle_file_is_named(tmp_path: Path, name: str, corruption: str) -> None:
    job = make_job_data(tmp_path)

    def read_all() -> None:
        assert job.read_rows("train") == [{"prompt": "1"}]
        assert job.modules_dir.is_dir() and job.tokenizer_file.is_file()

    read_all()
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    if corruption == "deleted":
        path.unlink()
    else:
        path.write_bytes(content if corruption == "flipped" else b"")
    with pytest.raises(CorruptData, match=str(path)) as raised:
        read_all()
    assert "copy of the run" in raised.value.fix


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_changeable_or_has_a_reason(key: str) -> None:
    rule = find_rule(key)
    assert not (rule.fixed_reason and rule.is_recorded)
    assert rule.fixed_reason == "" or rule.fixed_reason[0].islower()


def test_every_rule_matches_an_existing_key_or_table() -> None:
    assert set(RULES) <= {*KEYS, *TABLES} and set(ZERO_SWITCH_REASONS) <= set(KEYS)


def test_keys_used_by_replays_are_recorded() -> None:
    recorded = {key for key in KEYS if find_rule(key).is_recorded}
    assert {key for key in KEYS if key.startswith("optimizer.")} <= recorded
    assert {"budget.steps", "training.bin_tokens", "algorithm.mask_truncated"} <= recorded
    assert set(select_recorded(JobConfig())) == recorded


def test_recorded_values_restore_the_original_job() -> None:
    original = JobConfig()
    document = apply_changes(original.to_document(), {"optimizer.adamw_lr": 0.5, "budget.steps": 9})
    changed = JobConfig.from_document(document)
    assert restore_recorded(changed, select_recorded(original)) == original
    assert restore_recorded(changed, {}) is changed, (
        "a record from before settings stood in records"
    )
    assert diff_documents(original.to_document(), document) == {
        "optimizer.adamw_lr": (0.001, 0.5),
        "budget.steps": (48, 9),
    }


def test_some_values_cannot_change_from_or_to_zero() -> None:
    assert explain_rejected_change("optimizer.muon_lr", 0.003, 0.001) == ""
    assert "AdamW" in explain_rejected_change("optimizer.muon_lr", 0.003, 0.0)
    assert "reference" in explain_rejected_change("algorithm.kl_coefficient", 0.0, 0.1)
    assert explain_rejected_change("seed", 0, 1) and not explain_rejected_change(
        "training.checkpoint_every", 8, 2
    )


def test_documented_table_matches_the_change_rules() -> None:
    text = (Path(__file__).parents[4] / "docs/operate/jobs.md").read_text()
    [section] = re.findall(r"## Change a run\n(.*?)\n## ", text, re.DOTALL)
    documented: dict[str, str] = {}
    for line in section.splitlines():
        if cells := re.match(r"\| (`.*`) \| (.*) \|$", line):
            documented |= dict.fromkeys(re.findall(r"`([a-z_.]+)`", cells[1]), cells[2])
    assert set(documented) == set(RULES)
    for key, rule in RULES.items():
        expected = rule.fixed_reason or (
            "at once" if not rule.is_recorded else "from the next step on"
        )
        assert documented[key].startswith(("no: " if rule.fixed_reason else "yes, ") + expected), (
            key
        )


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_sample(
    case: tuple[int, int, int],
) -> None:
    samples, right_count, k = case
    choices = list(combinations([i < right_count for i in range(samples)], k))
    assert estimate_pass_at(k, samples, right_count) == pytest.approx(
        sum(map(any, choices)) / len(choices)
    )


def test_pass_at_k_estimate_is_unbiased() -> None:
    """Check that the mean over all outcomes of n samples, each right with probability p, is 1 - (1
    - p)^k.
    """
    p, k = 0.3, 2
    for n in (2, 3, 6):
        outcomes = [[bool(bits >> i & 1) for i in range(n)] for bits in range(2**n)]
        expected = sum(
            p ** sum(o) * (1 - p) ** (n - sum(o)) * estimate_pass_at(k, n, sum(o)) for o in outcomes
        )
        assert expected == pytest.approx(1 - (1 - p) ** k)


def test_figures_use_only_the_existing_samples() -> None:
    dataset = EvaluationSampling(samples=4, pass_at=[1, 4], solved=0.5)
    figures = compute_figures("sums.mean", dataset, [[1.0, 0.5, 0.0, 0.0], [0.25], []])
    assert figures == pytest.approx(
        {"sums.mean": 1.75 / 5, "sums.pass@1": (0.5 + 0.0) / 2, "sums.pass@4": 1.0}
    )
    assert compute_figures("sums.mean", dataset, [[], []]) == {}


def test_reward_below_the_threshold_by_rounding_counts_as_solved() -> None:
    dataset = EvaluationSampling(samples=1, pass_at=[1])
    assert compute_figures("sums.mean", dataset, [[0.7 + 0.2 + 0.1]]) == pytest.approx(
        {"sums.mean": 1.0, "sums.pass@1": 1.0}
    )
    assert compute_figures("sums.mean", dataset, [[0.999]])["sums.pass@1"] == 0.0


def test_mean_of_large_rewards_is_finite() -> None:
    assert compute_mean([1.7e308] * 4) == pytest.approx(1.7e308)
    assert compute_mean([0.7, 0.2, 0.1]) == pytest.approx(1 / 3)


def test_versions_are_evaluated_at_the_interval_and_after_training() -> None:
    planned_versions = [version for version in range(13) if plan_step_evaluation(PLANNED, version)]
    assert planned_versions == [4, 8]
    plan = plan_step_evaluation(PLANNED, 4)
    assert plan is not None and (plan.tag, plan.version, plan.sampling_modes) == (
        "step-4",
        4,
        ("sampled",),
    )
    last = plan_boundary_evaluation(PLANNED, "after", 12)
    assert last is not None and last.sampling_modes == ("sampled", "greedy")
    greedy = replace(PLANNED, evaluation=EvaluationConfig(every=4, best="held_out.greedy"))
    plan = plan_step_evaluation(greedy, 8)
    assert plan is not None and plan.sampling_modes == ("sampled", "greedy")


def test_no_evaluation_is_planned_without_rows_or_reward() -> None:
    for job in (replace(PLANNED, dataset=DatasetConfig()), replace(PLANNED, reward=RewardConfig())):
        assert (
            plan_step_evaluation(job, 4) is None
            and plan_boundary_evaluation(job, "before", 0) is None
        )
    without_evaluation = replace(PLANNED, evaluation=EvaluationConfig(every=0, before=False))
    assert (
        plan_step_evaluation(without_evaluation, 4) is None
        and plan_boundary_evaluation(without_evaluation, "before", 0) is None
    )


def test_held_out_loss_of_a_supervised_job_is_planned_without_a_reward() -> None:
    job = replace(PLANNED, reward=RewardConfig(), algorithm=AlgorithmConfig(name="sft"))
    assert [version for version in range(13) if is_loss_due(job, version)] == [4, 8, 12]
    plans = [plan_step_evaluation(job, 4), plan_boundary_evaluation(job, "after", 12)]
    assert [plan and plan.sampling_modes for plan in plans] == [(), ()]
    assert plan_boundary_evaluation(job, "before", 0) is None
    without_rows = replace(job, dataset=DatasetConfig())
    assert not is_loss_due(without_rows, 4) and plan_step_evaluation(without_rows, 4) is None


def test_figures_are_listed_by_name() -> None:
    datasets = [EvaluationDataset(name="a", path="x", samples=4, pass_at=[1, 4])]
    evaluation = EvaluationConfig(samples=2, pass_at=[2], datasets=datasets)
    assert list_figures(evaluation, held_out=True) == [
        "held_out.sampled",
        "held_out.greedy",
        "held_out.pass@2",
        "a.mean",
        "a.pass@1",
        "a.pass@4",
    ]
