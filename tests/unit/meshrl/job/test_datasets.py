"""Epochs of a job's datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

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
