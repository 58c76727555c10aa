"""Rows of a job's datasets: epochs, mixes and dotted keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrl.common.grading.golds import parse_math_gold
from meshrl.common.grading.row_values import find_value, format_keys
from meshrl.common.job.bundle.bundle_upload import check_config_paths
from meshrl.common.job.bundle.job_data import JobData
from meshrl.job import bundle
from meshrl.job.bundle import pack_bundle
from tests.unit.meshrl.job.conftest import JobVariant


def write_rows(path: Path, count: int) -> None:
    path.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(count)))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ((), 48),
        (("dataset.epochs=3",), 8),  # 30 prompts, of which a step takes 4
        (("dataset.epochs=3", "budget.steps=100"), 8),
        (("dataset.epochs=3", "budget.steps=5"), 5),
        (("dataset.epochs=100",), 250),
    ],
)
def test_epochs_give_the_steps_of_a_job(
    tiny: JobVariant, settings: tuple[str, ...], steps: int
) -> None:
    write_rows(tiny.path.parent / "train.jsonl", 10)
    job = tiny.read("algorithm.groups_per_step=4", *settings)
    assert job.config.budget.steps == steps
    reasons = {choice.key: choice.reason for choice in job.choices}
    is_chosen = steps not in (48, 5)
    assert ("10 rows, 4 prompts in a step" in reasons.get("budget.steps", "")) is is_chosen


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("dataset.epochs=1.5", "dataset.epochs"),
        ("dataset.epochs=-1", "dataset.epochs"),
        ("dataset.shuffle=1", "dataset.shuffle"),
    ],
)
def test_wrong_order_keys_are_rejected(tiny: JobVariant, setting: str, error: str) -> None:
    assert error in tiny.get_error(setting)


ROW = {"a": {"b": {"c": 1}}, "a.b": {"c": 2}, "d": None}


@pytest.mark.parametrize(
    ("key", "value"),
    [("a", ROW["a"]), ("a.b", {"c": 2}), ("a.b.c", 1), ("d", None), ("d.e", None), ("a.c", None)],
)
def test_dotted_keys_name_values_of_inner_tables(key: str, value: object) -> None:
    assert find_value(ROW, key) == value
    assert format_keys(ROW) == "'a.b', 'a.b.c', 'd'"


def test_rows_with_inner_tables_are_accepted_with_dotted_keys(tiny: JobVariant) -> None:
    row = '{"extra": {"question": "%s"}, "reward_model": {"ground_truth": "#### 7"}}\n'
    for name, question in (("train", "1"), ("held", "2")):
        (tiny.path.parent / f"{name}.jsonl").write_text(row % question)
    settings = (
        "reward.use=math",
        "reward.options.answer=reward_model.ground_truth",
        "dataset.prompt=extra.question",
    )
    config = tiny.load(*settings)
    gold = {"reward_model": {"ground_truth": "#### 7"}}
    assert parse_math_gold(gold, config.reward.options) == "7"


def test_epochs_of_a_supervised_job_are_over_its_usable_rows(small: JobVariant) -> None:
    rows = [{"prompt": f"{i}=", "response": "" if i % 2 else "1"} for i in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (small.path.parent / "train.jsonl").write_text(text)
    settings = ["algorithm.name=sft", "algorithm.group_size=1", "reward.use="]
    settings += ["algorithm.groups_per_step=4", "dataset.epochs=2"]
    config = small.load(*settings)
    assert config.budget.steps == 5
    packed, _ = bundle.pack_bundle(config, small.path.parent, small.path.parent / "run")
    lines = (packed / "data" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows[::2]


MIX = """
[[dataset.mix]]
path = "sums.jsonl"
weight = 3

[[dataset.mix]]
path = "more.csv"
prompt = "question"
"""


@pytest.fixture
def mixed(tiny: JobVariant) -> JobVariant:
    """Make a job that mixes three rows of JSONL and two of CSV."""
    write_rows(tiny.path.parent / "sums.jsonl", 3)
    (tiny.path.parent / "more.csv").write_text("question,level\n1+1?,1\n1+2?,2\n")
    text = tiny.path.read_text().replace('train = "train.jsonl"\n', "")
    tiny.path.write_text(f"{text}\n{MIX}")
    return tiny


def test_mixed_rows_are_bundled_with_one_key_of_the_prompt(
    mixed: JobVariant, tmp_path: Path
) -> None:
    config = mixed.load("dataset.epochs=4", "algorithm.groups_per_step=2")
    assert config.budget.steps == 10, "an epoch has five prompts"
    _, document = pack_bundle(config, mixed.path.parent, tmp_path / "run")
    data = JobData.from_document("tiny", document, str(tmp_path))
    assert [source.path for source in data.config.dataset.mix] == [
        "data/mix-0-sums.jsonl",
        "data/mix-1-more.jsonl",
    ]
    assert [row["prompt"] for row in data.read_rows("train")] == ["0", "1", "2", "1+1?", "1+2?"]
    check_config_paths(data.config, document["bundle"]["files"])  # so it can be uploaded


def test_prompt_of_a_mixed_source_that_is_evaluated_is_found(mixed: JobVariant) -> None:
    (mixed.path.parent / "held.jsonl").write_text('{"prompt": "1+2?"}\n')
    error = mixed.get_error()
    assert "held.jsonl, line 1: its prompt is also in dataset.mix (" in error
    assert "more.csv, line 3)" in error


def test_trained_prompt_may_be_evaluated_with_a_notice(
    mixed: JobVariant, capsys: pytest.CaptureFixture[str]
) -> None:
    (mixed.path.parent / "held.jsonl").write_text('{"prompt": "1+2?"}\n')
    mixed.load("dataset.overlap=report")
    assert "line 1: its prompt is also in dataset.mix (" in capsys.readouterr().err
