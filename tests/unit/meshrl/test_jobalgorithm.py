"""What is refused of an algorithm's keys before a job starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import AlgorithmConfig
from common.errors import ConfigError
from meshrl import jobfile
from services.trainer.algorithms import ALGORITHMS, aggregation, corrections, kl

EXAMPLE = Path(__file__).parents[3] / "examples/calculator.toml"


def test_the_choices_of_a_job_file_are_those_of_the_trainer() -> None:
    choices = jobfile.CHOICES
    assert sorted(choices["algorithm.name"]) == sorted(ALGORITHMS)
    assert choices["algorithm.aggregation"] == ("", *aggregation.NAMES)
    assert choices["algorithm.kl"] == kl.ESTIMATES
    assert choices["algorithm.correction"] == corrections.NAMES
    assert choices["algorithm.correction_level"] == corrections.LEVELS
    assert AlgorithmConfig().name in ALGORITHMS


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["name=gpro"], "must be one of grpo"),
        (["kl=k4"], "must be one of k1"),
        (["updates=0"], "at least 1"),
        (["updates=999"], "exceeds the groups"),
        (["discount=1.5"], "at most 1"),
        (["kl_coefficient=0.1"], "models.reference"),
        (["overlong_buffer=100000"], "exceeds max_tokens"),
        (["correction_low=2.0", "correction_high=1.0"], "below the lowest"),
        (["name=distill"], "models.teacher"),
    ],
)
def test_what_cannot_train_is_refused_with_its_place(overrides: list[str], told: str) -> None:
    settings = [f"algorithm.{one}" for one in overrides]
    with pytest.raises(ConfigError) as refused:
        jobfile.load(EXAMPLE, settings)
    assert told in str(refused.value)


def test_models_that_score_at_temperature_1_are_compared_at_it() -> None:
    settings = [
        "algorithm.kl_coefficient=0.1",
        "models.reference.path=initial",
        "rollout.temperature=0.7",
    ]
    assert jobfile.load(EXAMPLE, settings[:2])[0].algorithm.kl_coefficient == 0.1
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        jobfile.load(EXAMPLE, settings)


@pytest.mark.parametrize(
    "overrides", [["name=dapo"], ["name=ppo", "updates=2"], ["name=gspo", "correction=mis"]]
)
def test_an_algorithm_is_a_line_of_the_job_file(overrides: list[str]) -> None:
    config, _ = jobfile.load(EXAMPLE, [f"algorithm.{one}" for one in overrides])
    assert config.algorithm.name == overrides[0].removeprefix("name=")
