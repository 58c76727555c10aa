"""Check that a job fits into the memory of this host or its accelerators."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands.memory_table import make_memory_table
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.plan import JobModels, plan_memory
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.job.checks.host import memory
from meshrl.job.checks.host.memory import count_roles, plan_job_memory
from meshrl.launch.services.service_plan import describe_processes
from tests.gpus.driver import GIB, Gpus
from tests.unit.meshrl.job.machine.conftest import get_error, read

SHAPE = ModelConfig("qwen3", 64, 64, 6, 4, 2, 16, 128, qk_norm=True, tie_embeddings=True)
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "max_position_embeddings": 40_960,
}
LARGE = [
    "mesh.device=cuda",
    "model.config={" + ", ".join(f"{k}={json.dumps(v)}" for k, v in QWEN3_8B.items()) + "}",
    "training.dtype=bfloat16",
    "rollout.dtype=bfloat16",
    "optimizer.muon_lr=0",
    "rollout.max_tokens=4096",
    "training.bin_tokens=8192",
    "training.activation_checkpointing=true",
]


def test_processes_are_counted_by_worker() -> None:
    job = JobConfig.from_document(
        {
            "model": {"config": SHAPE.to_hf()},
            "rollout": {"slots": 8, "max_tokens": 64, "dtype": "bfloat16"},
            "mesh": {"workers": 4},
        }
    )
    core, engine = plan_job_memory(job).processes
    assert (core.process, core.count, engine.process, engine.count) == ("core", 1, "engine", 3)
    # The C++ decoder pads heads of 16 features to 32.
    assert engine.cache == 8 * 64 * 6 * 2 * 2 * 32 * 2
    sharded = JobConfig.from_document(job.to_document() | {"training": {"ranks": 2}})
    ranks = plan_job_memory(sharded).processes[0]
    assert ranks.count == 2 and ranks.moments == core.moments // 2


@pytest.mark.parametrize(
    ("workers", "algorithm", "roles", "place"),
    [
        (1, "grpo", "core, engine and frozen models, in", "take time slices on one of the core's"),
        (1, "sft", "core and frozen models, in", "take time slices on one of the core's"),
        (2, "grpo", "core and engine, in", "have a worker of their own"),
        (3, "grpo", "starts in the training role", "have a worker of their own"),
    ],
)
def test_dry_run_shows_where_frozen_models_run(
    workers: int, algorithm: str, roles: str, place: str
) -> None:
    config = JobConfig.from_document(
        {
            "model": {"config": SHAPE.to_hf()},
            "models": {"reference": {"path": "initial"}},
            "algorithm": {"name": algorithm},
            "mesh": {"workers": workers},
        }
    )
    described = dict(describe_processes(config))
    assert roles in described["worker/w0"]
    has_own = [name for name, text in described.items() if "the scoring role" in text]
    assert has_own == (["worker/w1"] if workers > 1 else [])
    plan = plan_memory(config, JobModels(SHAPE, {"reference": SHAPE}), count_roles(config))
    caption = str(make_memory_table(config, None, plan).caption)
    assert f"Frozen models {place}" in caption


@pytest.mark.parametrize(
    ("accelerator", "settings", "texts"),
    [
        # Masters, copy, moments and gradients of 8.2 billion parameters, with one rank.
        ("H200", ["mesh.workers=2"], ["core (", "moments 61.0 GiB", "training.ranks = 2"]),
        ("H200", ["mesh.workers=9", "training.ranks=8"], []),
        ("H200", ["mesh.workers=2", "lora.rank=32"], []),
        (
            "64",
            ["mesh.workers=1", "lora.rank=32"],
            ["core (", " and engine (", "mesh.workers = 2"],
        ),
        (
            "40",
            ["mesh.workers=5", "training.ranks=4"],
            [
                "core, each rank (",
                "an accelerator (40) has 40.0 GiB",
                "training.ranks = 16 (38.0 GiB)",
                "lora.rank = 32",
            ],
        ),
        (
            "24",
            ["mesh.workers=9", "training.ranks=8", "lora.rank=8", "rollout.dtype=float32"],
            ["engine (weights 30.6 GiB, ", 'rollout.dtype = "bfloat16" (17.6'],
        ),
        ("1", ["mesh.workers=2"], ["No key suffices"]),
    ],
)
def test_job_that_cannot_fit_is_refused_with_bytes_and_keys(
    place: Path, accelerator: str, settings: list[str], texts: list[str]
) -> None:
    check = partial(memory.check_memory, accelerator=accelerator)
    if not texts:
        return check(read(place, *LARGE, *settings))
    error = get_error(check, place, *LARGE, *settings)
    for text in ("the job does not fit", *texts):
        assert text in error


@pytest.mark.parametrize(
    ("value", "workers", "least_gib", "most_gib"),
    [("0.5", 9, 54, 56), ('"auto"', 9, 98, 99), ('"auto"', 1, 30, 50), ('"9 GiB"', 9, 8.9, 9)],
)
def test_cache_of_an_accelerator_follows_its_key(
    place: Path, value: str, workers: int, least_gib: float, most_gib: float
) -> None:
    settings = [f"rollout.kv_memory={value}", f"mesh.workers={workers}", "rollout.slots=1024"]
    config = read(place, *LARGE, *settings, "lora.rank=32").config
    room = memory.find_room("cuda", "H200")
    plan = plan_job_memory(config)
    engine = memory.limit_cache(config, plan, room).engine
    assert engine is not None and least_gib <= engine.cache / GIB <= most_gib
    small = memory.limit_cache(config, plan, memory.Room(GIB, "an accelerator")).engine
    assert small is not None and (value == '"9 GiB"' or small.cache == small.least_cache)
    host = memory.Room(1 << 40, "this host", is_host=True)
    assert memory.limit_cache(config, plan, host) is plan


def test_unknown_accelerator_is_rejected_with_the_known_kinds(place: Path) -> None:
    with pytest.raises(ConfigError, match="no accelerator 'H2'") as raised:
        memory.check_memory(read(place), "H2")
    assert "H200" in raised.value.fix


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["mesh.workers=1"], "core ("),
        (["mesh.workers=2"], "the smallest GPU has 1.0 GiB"),
        (["mesh.workers=1", "lora.rank=2", "model.config.vocab_size=80000"], ""),
    ],
)
def test_smallest_gpu_counts(
    place: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, settings: list[str], text: str
) -> None:
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    gpus.gpu("GPU-a", total=80 * GIB)
    gpus.gpu("GPU-b", total=(1 if text else 4) * GIB)
    large = ["mesh.device=cuda", "model.config.vocab_size=8000000", *settings]
    if not text:
        memory.check_memory(read(place, *large))
    else:
        assert text in get_error(memory.check_memory, place, *large)


def test_host_without_memory_for_all_slots_refuses_them(place: Path) -> None:
    memory.check_memory(read(place))
    error = get_error(memory.check_memory, place, "rollout.slots=1000000000")
    assert "this host has" in error and "rollout.slots = " in error


def test_doctor_prints_the_memory_of_a_job(place: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", str(place), "--accelerator", "H200"])
    assert "estimated memory of each process (cuda)" in found.output
    assert "An accelerator (H200) has 131.3 GiB." in found.output
    refused = CliRunner().invoke(app, ["doctor", str(place), "--accelerator", "0.1"])
    assert refused.exit_code == 1 and "the job does not fit" in refused.output
