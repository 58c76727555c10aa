"""The algorithms of a job file are those of the trainer."""

from __future__ import annotations

from typing import get_args

from meshrl.common.job.config import AlgorithmConfig
from meshrl.common.job.correction_bounds import LARGEST
from meshrl.common.job.schema import JOB
from meshrl.job.checks.file import algorithm
from meshrl.services.trainer.algorithms import ALGORITHMS
from meshrl.services.trainer.algorithms.hooks import advantage_of_one
from meshrl.services.trainer.arithmetic import aggregation


def test_the_choices_of_a_job_file_are_those_of_the_trainer() -> None:
    choices = {key: get_args(kind) for key, kind in JOB.kinds.items()}
    assert sorted(choices["algorithm.name"]) == sorted(ALGORITHMS)
    assert choices["algorithm.aggregation"] == ("", *aggregation.NAMES)
    assert choices["algorithm.correction"] == ("none", *LARGEST)
    assert AlgorithmConfig().name in ALGORITHMS
    rewardless = {name for name, one in ALGORITHMS.items() if one.advantages is advantage_of_one}
    assert rewardless == set(algorithm.REWARDLESS)
