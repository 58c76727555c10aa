"""Frozen models, judges, given answers and evaluation datasets of a job file."""

from __future__ import annotations

import json
from pathlib import Path

from meshrl.common.job.bundle.job_data import JobData
from meshrl.job import bundle, jobfile
from tests.unit.meshrl.conftest import NO_TENSORS
from tests.unit.meshrl.job.conftest import Given

MORE = '[{name = "more", path = "more.jsonl", samples = 4, pass_at = [1, 4]}]'


def test_what_is_whole_is_accepted_and_lies_in_the_bundle(frozen: Given, tmp_path: Path) -> None:
    config, base = jobfile.load(
        frozen.path,
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


def test_a_job_of_given_answers_has_groups_of_one_and_needs_no_reward(frozen: Given) -> None:
    settings = ["algorithm.name=sft", "dataset.train=given.jsonl", "reward.use="]
    frozen.path.write_text(frozen.path.read_text().replace("group_size = 4\n", ""))
    config = frozen.load(*settings)
    assert config.supervised and config.algorithm.group_size == 1 and config.min_group == 1
    assert frozen.load(*settings, "rollout.top_p=0.9").supervised  # of evaluations
