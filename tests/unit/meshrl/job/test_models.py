"""Frozen models, judges, given answers and evaluation datasets of a job file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import ConfigError
from common.job.bundle.job_data import JobData
from common.job.config import JobConfig
from common.model.tokens.tokenizer import character_tokenizer
from meshrl.job import bundle, jobfile
from tests.unit.meshrl.conftest import NO_TENSORS


def model(directory: Path, characters: str, shape: str) -> Path:
    """What the checks look at of a Hugging Face directory."""
    directory.mkdir()
    (directory / "config.json").write_text(shape)
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    character_tokenizer(characters, directory / "tokenizer.json")
    return directory


@pytest.fixture
def place(job: Path, shape: str) -> Path:
    """The job of two rows with a teacher, a stranger and another dataset beside it."""
    character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    model(job.parent / "teacher", "0123456789+=abc", shape)
    model(job.parent / "stranger", "abc0123456789+=", shape)
    (job.parent / "more.jsonl").write_text('{"prompt": "2+3="}\n{"prompt": "2+4="}\n')
    (job.parent / "given.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    (job.parent / "ask.txt").write_text("Is {answer} right?\nyes or no\n")
    return job


MORE = '[{name = "more", path = "more.jsonl", samples = 4, pass_at = [1, 4]}]'
JUDGED = ("reward.use=", "reward.judge.template=Is {answer} right?")


def test_what_is_whole_is_accepted_and_lies_in_the_bundle(place: Path, tmp_path: Path) -> None:
    config, base = jobfile.load(
        place,
        [
            "models.reference.path=initial",
            "models.teacher.path=teacher",
            "models.reward.path=stranger",
            "reward.use=",
            "reward.judge.use=model",
            "reward.judge.template=ask.txt",
            f"evaluation.datasets={MORE}",
            "evaluation.best=more.pass@4",
            "algorithm.kl_coefficient=0.1",
        ],
    )
    assert config.reward.judge.template == "Is {answer} right?\nyes or no\n"
    _, document = bundle.pack(config, base, tmp_path / "run")
    data = JobData.of("tiny", json.loads(json.dumps(document)), str(tmp_path))
    assert (data.frozen("teacher") / "model.safetensors").read_bytes() == NO_TENSORS
    assert (data.frozen("reward") / "tokenizer.json").is_file()
    assert data.config.models.reference.path == "initial"
    [dataset] = data.config.evaluation.datasets
    assert data.rows_of(dataset.path) == [{"prompt": "2+3="}, {"prompt": "2+4="}]
    assert dataset.pass_at == [1, 4]


def test_a_job_of_given_answers_has_groups_of_one_and_needs_no_reward(place: Path) -> None:
    settings = ["algorithm.name=sft", "dataset.train=given.jsonl", "reward.use="]
    text = place.read_text().replace("[algorithm]\ngroup_size = 4\n", "")
    place.write_text(text)
    config, _ = jobfile.load(place, settings)
    assert config.supervised and config.algorithm.group_size == 1 and config.min_group == 1
    assert jobfile.load(place, [*settings, "rollout.top_p=0.9"])[0].supervised  # of evaluations
    with pytest.raises(ConfigError, match="nothing to correct for"):
        jobfile.load(place, [*settings, "algorithm.correction=tis"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["models.teacher.dtype=float32"], r"models\.teacher has no path"),
        (["models.teacher.path=initial"], "for the reference alone"),
        (["models.teacher.path=nowhere"], r"holds no config\.json"),
        (["models.teacher.path=stranger"], "another tokenizer"),
        (["models.teacher.path=teacher", "mesh.workers=2"], "one for the job's frozen models"),
        (["models.reward.path=teacher"], "nobody asks"),
        (["algorithm.kl_coefficient=0.1"], r"models\.reference"),
        (["models.reference.path=initial", "rollout.temperature=0.8"], "at temperature 1"),
        (["algorithm.name=distill"], r"models\.teacher"),
        ([*JUDGED, "reward.judge.use=model"], r"no \[models\.reward\]"),
        ([*JUDGED, "reward.judge.use=ftp://x"], "neither 'model' nor a URL"),
        ([*JUDGED, "reward.judge.use=http://x/v1"], r"judge\.model is missing"),
        ([*JUDGED, "reward.judge.use=http://me:key@x/v1"], r"a password .* reward\.judge\.key"),
        (["reward.judge.use=http://x/v1"], "exclude each other"),
        (["reward.use=", "reward.judge.use=http://x", "reward.judge.template=?"], r"no {answer}"),
        (
            [
                *JUDGED,
                "reward.judge.use=http://x",
                "reward.judge.model=m",
                "reward.judge.key=NO_KEY",
            ],
            "no variable NO_KEY",
        ),
        (["algorithm.name=sft"], "of sft it is 1"),
        (["algorithm.group_size=1"], "at least 2"),
        (["evaluation.best=more.mean"], "no figure of this job"),
        (['evaluation.datasets=[{name = "held_out", path = "more.jsonl"}]'], "taken"),
        (
            ['evaluation.datasets=[{name = "more", path = "nothing"}]'],
            r"\[0\]\.path: there is no file",
        ),
        (['evaluation.datasets=[{name = "more"}]'], "path is missing"),
        (
            ['evaluation.datasets=[{name = "a", path = "more.jsonl", pass_at = [2]}]'],
            "must lie in 1 to samples = 1",
        ),
    ],
)
def test_what_is_not_is_an_error_with_its_place(
    place: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        jobfile.load(place, settings)


@pytest.mark.parametrize("answer", [{}, {"response": ""}, {"response": 2}, {"response": {"a": 1}}])
def test_a_row_without_an_answer_is_named(place: Path, answer: dict[str, Any]) -> None:
    place.write_text(place.read_text().replace("group_size = 4", ""))
    row = json.dumps({"prompt": "1+2="} | answer)
    (place.parent / "given.jsonl").write_text(f'{{"prompt": "1+1=", "response": "2"}}\n{row}\n')
    with pytest.raises(ConfigError, match="line 2"):
        jobfile.load(place, ["algorithm.name=sft", "dataset.train=given.jsonl"])


def test_a_job_without_them_has_none() -> None:
    assert JobConfig().models.declared == {} and not JobConfig().supervised


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "abacus"}, "unknown model architecture 'abacus'.*use one of"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not implemented"),
        ({"vocab_size": "many"}, "cannot be read: ValueError.*many"),
    ],
)
@pytest.mark.parametrize("key", ["model.config", "model.path", "models.teacher.path"])
def test_a_model_that_the_decoder_does_not_implement_is_told_before_anything_starts(
    place: Path, shape: str, key: str, change: dict[str, Any], why: str
) -> None:
    described = json.loads(shape) | change
    (place.parent / "teacher/config.json").write_text(json.dumps(described))
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in described.items())
    value = f"{{ {table} }}" if key == "model.config" else "teacher"
    with pytest.raises(ConfigError, match=rf"--set {re.escape(key)}=.*: {key}: .*{why}"):
        jobfile.load(place, [f"{key}={value}"])


def test_a_frozen_models_tokenizer_that_is_none_is_named_with_its_key(place: Path) -> None:
    (place.parent / "teacher/tokenizer.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"--set models\.teacher\.path=teacher: .*tokenizer\.json"
    ):
        jobfile.load(place, ["models.teacher.path=teacher"])
