"""Rows of a job's datasets: epochs and dotted keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshrl.common.grading.golds import parse_math_gold
from meshrl.common.grading.row_values import find_value, format_keys
from meshrl.job import bundle
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
    config = tiny.load("algorithm.groups_per_step=4", *settings)
    assert config.budget.steps == steps


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
