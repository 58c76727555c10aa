"""What a job's training begins with."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from common.job.config import LoraConfig, ModelConfigSection
from common.job.job_data import JobData
from services.trainer.core.beginning import first_weights, fresh_learner, outline
from tests.unit.trainer.core.groups_under_test import job

JOBS = Path(__file__).parents[3] / "mesh/jobs"


@pytest.fixture
def data(tmp_path: Path) -> JobData:
    described = tomllib.loads((JOBS / "digits.toml").read_text())["model"]["config"]
    config = replace(job("grpo"), model=ModelConfigSection(config=described))
    return JobData("j", config, tmp_path, tmp_path)


def test_a_model_is_described_without_being_made(data: JobData) -> None:
    config, parameters = outline(data)
    learner = fresh_learner(data)
    assert (config, parameters) == (learner.model.config, learner.size)


def test_without_a_warm_start_nobody_makes_a_whole_model_for_the_ranks(data: JobData) -> None:
    adapted = replace(data, config=replace(data.config, lora=LoraConfig(rank=2)))
    for one in (data, adapted):
        assert first_weights(one, lambda step, loss: None) == (None, False)
