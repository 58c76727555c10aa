"""Rejected and accepted settings of a job's algorithm, models and sandbox."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig
from meshrl.common.job.correction_bounds import MAX_WEIGHTS
from meshrl.common.job.isolation import isolation_probe
from meshrl.common.job.isolation.tiers import TIER_ORDER
from meshrl.common.job.schema import JOB_SCHEMA
from meshrl.job import bundle, job_reader
from meshrl.job.checks.job_file import algorithm
from meshrl.job.references import find_references
from meshrl.services.trainer.algorithms import ALGORITHMS
from meshrl.services.trainer.algorithms.hooks import compute_unit_advantages
from meshrl.services.trainer.learner import aggregation
from tests.unit.meshrl.conftest import NO_TENSORS
from tests.unit.meshrl.job.conftest import JobVariant

MACHINE = "meshrl.job.checks.host"
CASES = [json.loads(line) for line in Path(__file__).with_name("refusals.jsonl").open("rb")]


def param(case: dict[str, Any]) -> Any:
    marks = [pytest.mark.rotating(case["rotating"])] if "rotating" in case else []
    return pytest.param(case, id="; ".join(case["says"])[:100], marks=marks)


@pytest.mark.parametrize("case", map(param, CASES))
def test_mistake_is_rejected_with_its_location(
    case: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    job: JobVariant = request.getfixturevalue(case["job"])
    for name, content in case.get("files", {}).items():
        encoding, text = (
            next(iter(content.items())) if isinstance(content, dict) else (None, content)
        )
        (job.path.parent / name).write_bytes(text.encode(encoding or "utf-8"))
    if "replace" in case:
        assert case["replace"][0] in job.path.read_text()
        job.path.write_text(job.path.read_text().replace(*case["replace"]))
    if "append" in case:
        job.path.write_text(f"{job.path.read_text()}\n{case['append']}\n")
    module, _, check = case.get("check", "").rpartition(".")
    looks = getattr(import_module(f"{MACHINE}.{module}"), check) if check else None
    error = job.get_error(*case.get("set", ()), check=looks)
    assert all(text in error for text in case["says"]), error
    assert "meshrl-trial" not in error  # errors name the author's own files, not their copies
    if "line" in case:
        assert error.startswith(f"{job.path}, line {case['line']}")


def test_job_file_choices_match_the_trainers() -> None:
    choices = {key: get_args(kind) for key, kind in JOB_SCHEMA.types_by_key.items()}
    assert sorted(choices["algorithm.name"]) == sorted(ALGORITHMS)
    assert choices["algorithm.aggregation"] == ("", *aggregation.AGGREGATIONS)
    assert choices["algorithm.correction"] == ("none", *MAX_WEIGHTS)
    assert AlgorithmConfig().name in ALGORITHMS
    rewardless = {
        name
        for name, one in ALGORITHMS.items()
        if one.compute_advantages is compute_unit_advantages
    }
    assert rewardless == set(algorithm.REWARDLESS_ALGORITHMS)


MORE = '[{name = "more", path = "more.jsonl", samples = 4, pass_at = [1, 4]}]'


def test_complete_job_with_frozen_models_is_accepted_and_bundled(
    frozen: JobVariant, tmp_path: Path
) -> None:
    config, base = job_reader.load_config(
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
    _, document = bundle.pack_bundle(config, base, tmp_path / "run")
    data = JobData.from_document("tiny", json.loads(json.dumps(document)), str(tmp_path))
    assert (data.get_frozen_model_dir("teacher") / "model.safetensors").read_bytes() == NO_TENSORS
    assert (data.get_frozen_model_dir("reward") / "tokenizer.json").is_file()
    assert data.config.models.reference.path == "initial"
    [dataset] = data.config.evaluation.datasets
    assert data.read_file_rows(dataset.path) == [{"prompt": "2+3="}, {"prompt": "2+4="}]
    assert dataset.pass_at == [1, 4]


def test_supervised_job_has_groups_of_one_and_needs_no_reward(frozen: JobVariant) -> None:
    settings = ["algorithm.name=sft", "dataset.train=given.jsonl", "reward.use="]
    frozen.path.write_text(frozen.path.read_text().replace("group_size = 4\n", ""))
    config = frozen.load(*settings)
    assert config.is_supervised and config.algorithm.group_size == 1 and config.min_group == 1
    assert frozen.load(*settings, "rollout.top_p=0.9").is_supervised  # applies to evaluations


EXAMPLE = Path(__file__).parents[4] / "examples" / "calculator.toml"


def test_reward_parts_and_tools_of_all_kinds_are_accepted() -> None:
    tools = "{calculate='calculator:calculate', p='python', s='shell', w='mcp:web/search'}"
    config, _ = job_reader.load_config(
        EXAMPLE,
        [
            "reward.use=",
            "reward.parts=[{use='math'}, {use='calculator:reward', weight=0.5}]",
            f"environment.tools={tools}",
            "environment.mcp={web=['server']}",
            "environment.no_retry_tools=['p']",
        ],
    )
    assert [(part.use, part.weight) for part in config.reward.reward_parts] == [
        ("math", 1.0),
        ("calculator:reward", 0.5),
    ]
    assert sorted(config.jailed_names) == ["python", "shell"]
    references = dict(find_references(config))
    assert references["reward.parts"] == "calculator:reward"
    assert "environment.tools.p" not in references


def test_sandbox_tiers_match_the_isolation_tiers_in_order() -> None:
    assert get_args(JOB_SCHEMA.types_by_key["sandbox.tier"]) == TIER_ORDER[:0:-1]


def test_job_without_model_written_code_needs_no_isolation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # bwrap is not there
    config, _ = job_reader.load_config(EXAMPLE, [])
    assert config.jailed_names == []
    isolation_probe.require_isolation(config)


def test_job_with_model_written_code_is_rejected_without_isolation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config, _ = job_reader.load_config(EXAMPLE.with_name("code.toml"), [])
    with pytest.raises(Refused, match=r"code_tests run code that the model wrote") as caught:
        isolation_probe.require_isolation(config)
    assert "apt-get install bubblewrap" in str(caught.value)


@pytest.mark.rotating(2)
@pytest.mark.needs("bwrap")
def test_probed_isolation_has_run_a_program() -> None:
    found = isolation_probe.probe_isolation()
    assert found.tier in ("bwrap", "cgroup")
    assert found.description.startswith("bwrap + seccomp")
    assert bool(found.fix) == (found.tier != "cgroup")
    config, _ = job_reader.load_config(EXAMPLE.with_name("code.toml"), [])
    isolation_probe.require_isolation(config)
