"""What a job's training begins with."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import LoraConfig, ModelConfigSection, WarmStartConfig
from meshrl.services.trainer.initial.beginning import (
    demonstrations,
    first_weights,
    fresh_learner,
    outline,
)
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.steps.groups_under_test import job

JOBS = Path(__file__).parents[3] / "mesh/jobs"


@pytest.fixture
def data(tmp_path: Path) -> JobData:
    described = tomllib.loads((JOBS / "digits.toml").read_text())["model"]["config"]
    config = replace(job("grpo"), model=ModelConfigSection(config=described))
    make_tokenizer(tmp_path)
    return JobData("j", config, tmp_path, tmp_path)


def test_a_model_is_described_without_being_made(data: JobData) -> None:
    config, parameters = outline(data)
    learner = fresh_learner(data)
    assert (config, parameters) == (learner.model.config, learner.size)


def test_without_a_warm_start_nobody_makes_a_whole_model_for_the_ranks(data: JobData) -> None:
    adapted = replace(data, config=replace(data.config, lora=LoraConfig(rank=2)))
    for one in (data, adapted):
        begun = first_weights(one, lambda step, loss: None, lambda told: None)
        with pytest.raises(StopIteration) as ended:
            next(begun)
        assert ended.value.value == (None, False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "return 'a text'",
            "returned 'a text', which is no demonstration (shows_0.py:1 in show())",
        ),
        ("return []", "returned [], which is no demonstration (shows_1.py:1 in show())"),
        ("return [('1', 0), (2, 1)]", "is no demonstration (shows_2.py:1 in show())"),
        ("\n    return {}['prompt']", "raised KeyError: 'prompt' (shows_3.py:3 in show())"),
    ],
)
def test_what_is_no_demonstration_is_named_with_its_line(
    data: JobData, body: str, said: str, request: pytest.FixtureRequest
) -> None:
    number = request.node.callspec.indices["body"]
    data.modules.mkdir(exist_ok=True)
    (data.modules / f"shows_{number}.py").write_text(f"def show(rng, progress):\n    {body}\n")
    shows = WarmStartConfig(demonstrations=f"shows_{number}:show")
    asked = demonstrations(replace(data, config=replace(data.config, warm_start=shows)))
    with pytest.raises(ConfigError) as told:
        asked(Random(0), 0.0)
    assert said in told.value.message and told.value.where == "warm_start.demonstrations"
