"""What is refused of an algorithm's keys before a job starts."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from common.base.errors import ConfigError
from common.job.config import AlgorithmConfig
from common.job.correction_bounds import LARGEST
from common.job.schema import JOB
from meshrl.job import jobfile
from meshrl.job.checks.file import algorithm
from services.trainer.algorithms import ALGORITHMS
from services.trainer.algorithms.hooks import advantage_of_one
from services.trainer.arithmetic import aggregation

EXAMPLE = Path(__file__).parents[4] / "examples/calculator.toml"


def test_the_choices_of_a_job_file_are_those_of_the_trainer() -> None:
    choices = {key: get_args(kind) for key, kind in JOB.kinds.items()}
    assert sorted(choices["algorithm.name"]) == sorted(ALGORITHMS)
    assert choices["algorithm.aggregation"] == ("", *aggregation.NAMES)
    assert choices["algorithm.correction"] == ("none", *LARGEST)
    assert AlgorithmConfig().name in ALGORITHMS
    rewardless = {name for name, one in ALGORITHMS.items() if one.advantages is advantage_of_one}
    assert rewardless == set(algorithm.REWARDLESS)


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
        (["correction=mis", "correction_high=0.4"], "0.4, is below the lowest, 0.5"),
        (["correction=mis", "correction_low=6.0"], "5, is below the lowest, 6"),
        (["name=distill"], "models.teacher"),
    ],
)
def test_what_cannot_train_is_refused_with_its_place(overrides: list[str], told: str) -> None:
    settings = [f"algorithm.{one}" for one in overrides]
    with pytest.raises(ConfigError) as refused:
        jobfile.load(EXAMPLE, settings)
    assert told in str(refused.value)


@pytest.mark.parametrize("filter", ["top_p=0.9", "top_k=50", "min_p=0.1"])
def test_sampling_from_a_part_of_the_distribution_asks_for_a_correction(filter: str) -> None:
    sampling = f"rollout.{filter}"
    with pytest.raises(ConfigError, match=r"rollout\.\w+ ratios .*") as refused:
        jobfile.load(EXAMPLE, [sampling])
    assert "algorithm.correction" in refused.value.fix
    corrected = [sampling, "algorithm.correction=tis"]
    assert jobfile.load(EXAMPLE, corrected)[0].algorithm.correction == "tis"
    reference = ["models.reference.path=initial", "algorithm.kl_coefficient=0.1"]
    assert jobfile.load(EXAMPLE, [*corrected, *reference])[0].algorithm.kl_in == "loss"
    with pytest.raises(ConfigError, match="divergence in the reward"):
        jobfile.load(EXAMPLE, [*corrected, *reference, "algorithm.kl_in=reward"])


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
