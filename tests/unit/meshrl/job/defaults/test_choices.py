"""Values that are chosen for a pretrained model, and the job file that results."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.common.job.config import JobConfig
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.job.defaults.choices import OPEN_KEYS, describe_choices
from meshrl.job.defaults.differences import select_differences
from meshrl.job.job_file import JobFile, get_value
from meshrl.job.job_reader import check_config, read_job_file
from meshrl.job.toml.writer import to_toml
from tests.gpus.driver import GIB, Gpus
from tests.unit.meshrl.conftest import NO_TENSORS, SHAPE

LARGE = {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192}
LARGE |= {"vocab_size": 32_000, "num_attention_heads": 16}


@pytest.fixture
def place(job: Path) -> Path:
    """Return a job file beside a pretrained model."""
    build_character_tokenizer("0123456789+=", job.parent / "tokenizer.json")
    text = job.read_text()
    begin, end = text.index("config = {"), text.index("[dataset]")
    job.write_text(f'{text[:begin]}path = "model"\n\n{text[end:]}')
    write_model(job.parent, dtype="bfloat16")
    return job


def write_model(directory: Path, **keys: Any) -> None:
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model/config.json").write_text(json.dumps(SHAPE | keys))


def read(place: Path, *settings: str) -> JobFile:
    return read_job_file(place, list(settings))


def find_reason(job: JobFile, key: str) -> str:
    return next(choice.reason for choice in job.choices if choice.key == key)


@pytest.mark.parametrize(
    ("keys", "dtype", "reason"),
    [
        ({"dtype": "bfloat16"}, "bfloat16", "config.json has bfloat16; trained parameters stay"),
        ({"torch_dtype": "bfloat16"}, "bfloat16", "config.json has bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16", "needs loss scaling"),
        ({"dtype": "float32"}, "float32", "config.json has float32"),
        ({}, "float32", "config.json states no dtype"),
    ],
)
def test_passes_have_the_type_of_the_models_files(
    place: Path, keys: dict[str, str], dtype: str, reason: str
) -> None:
    write_model(place.parent, **keys)
    job = read(place, "models.reference.path=initial")
    dtypes = [
        job.config.training.dtype,
        job.config.rollout.dtype,
        job.config.models.reference.dtype,
    ]
    assert dtypes == [dtype] * 3 and job.config.models.teacher.dtype == "float32"
    assert reason in find_reason(job, "training.dtype")


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ([], 1e-6),
        (["lora.rank=1"], 1e-5),
        (["lora.rank=8"], 2.8e-5),
        (["algorithm.name=sft", "algorithm.group_size=1"], 2e-5),
        (["algorithm.name=sft", "algorithm.group_size=1", "lora.rank=8"], 2e-4),
    ],
)
def test_rates_follow_the_kind_of_training(
    place: Path, settings: Sequence[str], rate: float
) -> None:
    place.with_name("train.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    job = read(place, *settings)
    assert job.config.optimizer.adamw_lr == pytest.approx(rate, rel=1e-9)
    assert job.config.optimizer.muon_lr == 0
    assert job.config.warm_start == JobConfig().warm_start, "it has no demonstrations"


@pytest.mark.parametrize(("positions", "tokens"), [(4096, 1024), (600, 600)])
def test_trajectories_fit_the_models_positions(place: Path, positions: int, tokens: int) -> None:
    write_model(place.parent, max_position_embeddings=positions)
    job = read(place)
    assert job.config.rollout.max_tokens == tokens
    assert f"{positions:,} positions" in find_reason(job, "rollout.max_tokens")


def test_model_from_scratch_keeps_the_defaults(job: Path) -> None:
    found = read(job, "mesh.device=cuda")
    assert found.choices == ()
    defaults = JobConfig()
    assert all(get_value(found.config, key) == get_value(defaults, key) for key in OPEN_KEYS)


def test_stated_values_are_kept_unless_they_are_auto(place: Path) -> None:
    stated = ("optimizer.adamw_lr=0.001", "optimizer.muon_lr=auto", "training.dtype=float32")
    job = read(place, *stated)
    assert job.config.optimizer.adamw_lr == 0.001 and job.config.optimizer.muon_lr == 0
    assert (job.config.training.dtype, job.config.rollout.dtype) == ("float32", "bfloat16")
    keys = [choice.key for choice in job.choices]
    assert keys == [
        "rollout.dtype",
        "optimizer.muon_lr",
        "rollout.max_tokens",
        "training.activation_checkpointing",
    ]
    assert "rollout.max_tokens = 1024, training.activation_checkpointing = false" in (
        describe_choices(job.choices)
    )


def test_job_made_in_code_keeps_its_values(place: Path) -> None:
    job = read(place, "optimizer.adamw_lr=0.001", "training.dtype=float32")
    again = check_config(job.config, place.parent, [])
    assert again.config == job.config and again.choices == ()


@pytest.mark.parametrize(("keys", "large"), [({}, False), (LARGE, True)])
def test_large_models_recompute_activations_where_no_gpu_is_known(
    place: Path, keys: dict[str, int], large: bool
) -> None:
    write_model(place.parent, **keys)
    job = read(place)
    assert job.config.training.activation_checkpointing is large
    assert "a billion" in find_reason(job, "training.activation_checkpointing")


@pytest.mark.needs("compiler")
def test_gpus_decide_on_workers_and_activations(
    place: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(place.parent, **LARGE)
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    gpus.gpu("GPU-a", total=80 * GIB)
    job = read(place, "mesh.device=cuda", "rollout.slots=8")
    assert job.config.mesh.workers == 1 and not job.config.training.activation_checkpointing
    assert "core and engine take" in find_reason(job, "training.activation_checkpointing")
    assert read(place, "mesh.device=cuda").config.training.activation_checkpointing
    gpus.gpu("GPU-b", total=32 * GIB)
    job = read(place, "mesh.device=cuda")
    assert job.config.mesh.workers == 2 and job.config.training.activation_checkpointing
    assert "above 80% of a GPU's 32 GiB" in find_reason(job, "training.activation_checkpointing")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["optimizer.adamw_lr=9e-6"], ""),
        (
            ["optimizer.adamw_lr=1e-5"],
            "is 10 times the usual rate of full training of a pretrained",
        ),
        (["optimizer.muon_lr=1e-4"], "10 times the usual rate"),
        (["optimizer.adamw_lr=1e-5", "lora.rank=8"], ""),
        (
            ["optimizer.adamw_lr=1e-3", "lora.rank=8"],
            "usual rate of adapters of rank 8 of a pretrained model",
        ),
        (["optimizer.adamw_lr=1", "budget.steps=0"], ""),
    ],
)
def test_rates_of_ten_times_the_usual_are_reported(
    place: Path, settings: list[str], warned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read(place, *settings)
    error = capsys.readouterr().err
    assert warned in error and bool(error) is bool(warned)
    assert not warned or error.startswith("warning: --set optimizer.")


def test_high_rate_of_a_model_from_scratch_is_reported(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(job, "optimizer.muon_lr=1000")
    assert "333,333 times the usual rate of full training of a model from scratch" in (
        capsys.readouterr().err
    )


def test_chat_template_that_a_job_does_not_use_is_reported(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.parent / "model/chat_template.jinja").write_text("{{ messages[0].content }}")
    read(place)
    assert "line 6: the model has a chat template, but the job has no" in capsys.readouterr().err


def test_differences_of_a_pretrained_model_describe_the_same_job(place: Path) -> None:
    defaults = [f"optimizer.adamw_lr={JobConfig().optimizer.adamw_lr}", "training.dtype=float32"]
    job = read(place, *defaults, "reward.parts=[{use='rewards:score'}]", "reward.use=")
    document, printed = select_differences(job), place.with_name("printed.toml")
    reasons = {choice.key: choice.reason for choice in job.choices}
    printed.write_text(to_toml(document, reasons))
    assert all(f"  # {reason}\n" in printed.read_text() for reason in reasons.values())
    assert read(printed).config == job.config
    assert document["optimizer"] == {"muon_lr": 0.0, "adamw_lr": 0.001}
    assert "sandbox" not in document and "algorithm" in document


def test_dry_run_prints_differences_with_reasons_or_every_key(place: Path) -> None:
    (place.parent / "model/model.safetensors").write_bytes(NO_TENSORS)
    words = ["run", str(place), "--dry-run", "--set=model.path=", "--set=rollout.max_tokens=64"]
    words.append(
        "--set=model.config={" + ", ".join(f"{k}={json.dumps(v)}" for k, v in SHAPE.items()) + "}"
    )
    short = CliRunner().invoke(app, words)
    assert short.exit_code == 0, short.output
    document = tomllib.loads(short.stdout)
    assert "planner" not in document and document["rollout"] == {"max_tokens": 64}
    assert "planner/0" in short.stderr and "activations" in short.stderr
    assert "Warning" not in short.stderr
    long = CliRunner().invoke(app, [*words, "--all", "--set=rollout.kv_tokens=0"])
    assert tomllib.loads(long.stdout).keys() == JobConfig().to_document().keys()
    large = CliRunner().invoke(app, [*words, "--set=rollout.slots=1000000000"])
    assert "the job does not fit" in str(large.exception)
