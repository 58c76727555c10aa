"""Jobs with frozen models, evaluation and supervised answers, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.job.model_files import MAX_READ_BYTES
from tests.load import scaled
from tests.mesh.running import JOB, ROOT, Run

QUICK = {"rollout__max_tokens": 24, "algorithm__group_size": 4, "algorithm__groups_per_step": 2}


def write_rows(path: Path, count: int = 16, first: int = 0) -> Path:
    """Write sums of two digits with their answers."""
    sums = ((i, (7 * i + i // 10) % 10) for i in range(first, first + count))  # each once
    lines = [
        json.dumps({"prompt": f"?{a % 10}+{b}=", "response": f"{a % 10 + b}$", "n": a})
        for a, b in sums
    ]
    path.write_text("\n".join(lines))
    return path


def create_teacher(directory: Path, seed: int = 7) -> Path:
    """Create a model of the job's shape and tokenizer with other weights."""
    job = tomllib.loads(JOB.read_text())
    config = ModelConfig.from_hf(job["model"]["config"])
    model = Decoder(config)
    model.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model.embedding.mul_(20)  # sharp, like a distribution that can be learned
    tokenizer = (JOB.parent / job["model"]["tokenizer"]).resolve()
    save_model(directory, config, model.state_dict(), tokenizer)
    return directory


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_job_with_kl_and_evaluation_exports_its_best_version(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    """Check a job with a KL term, an evaluation set of its own, and an export of its best version.
    Its head has eight ids that the tokenizer lacks.
    """
    dataset = {"name": "more", "path": str(write_rows(tmp_path / "more.jsonl", 4, 100))}
    settings = ", ".join(f"{k} = {json.dumps(v)}" for k, v in dataset.items())
    one = run(
        mesh__workers=3,
        model__config__vocab_size=72,
        models__reference__path="initial",
        algorithm__kl_coefficient=0.1,
        optimizer__muon_lr=0.02,
        evaluation__every=2,
        evaluation__before="true",
        evaluation__after="true",
        evaluation__best="more.pass@2",
        evaluation__datasets=f"[{{{settings}, samples = 4, pass_at = [1, 2], solved = 0.2}}]",
        budget__steps=5,
        **QUICK,
    )
    assert one.finish() == 0, one.output + one.logs()
    steps = metrics(one)
    assert abs(steps[0]["reference_kl"]) < 1e-6, "the first step trains the reference itself"
    assert steps[-1]["reference_kl"] > 1e-6
    assert steps[0]["logprob_gap"] < 1e-4, "engine and trainer leave the same ids out"
    assert one.audit()["lost"] == 0 and one.audit()["trained_twice"] == 0
    evaluations = {e["tag"]: e for e in one.events("evaluation")}
    assert {tag: e["step"] for tag, e in evaluations.items()} == {
        "before": 0,
        "step-2": 2,
        "step-4": 4,
        "after": 5,
    }
    values = {e["step"]: e["figures"]["more.pass@2"] for e in evaluations.values()}
    for e in evaluations.values():
        assert e["mixed"] == e["failed"] == 0, "every sample is of the version that was asked for"
        assert e["figures"]["more.pass@1"] <= e["figures"]["more.pass@2"]
    best = min(values, key=lambda step: (-values[step], step))
    assert one.summary()["best_version"] == best
    manifest = next(e["manifest"] for e in evaluations.values() if e["step"] == best)
    assert ChunkStore(one.directory / "store").has(manifest)
    out = tmp_path / "best"
    words = ["export", str(one.directory), "--best", "--out", str(out)]
    command = [sys.executable, "-m", "meshrl", *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=scaled(100))
    load_model(out)


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_job_with_a_reference_trains_the_same_on_one_worker(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check time slices of core, engine and reference on an accelerator that holds one of them.

    Each step's weights are those of a job with two workers.
    """
    frozen = {"models__reference__path": "initial", "algorithm__kl_coefficient": 0.1}
    same = {"training__deterministic": "true", "algorithm__max_staleness": 0}
    job = {**QUICK, **frozen, **same, "budget__steps": 2}
    manifests = []
    for workers, budget in (2, ""), (1, "900000"):  # bytes; the three take 2.3 million
        if budget:
            monkeypatch.setenv("MESHRL_ACCELERATOR_BYTES", budget)
        one = run(mesh__workers=workers, **job)
        assert one.finish() == 0, one.output + one.logs()
        assert one.audit()["lost"] == 0 and one.audit()["trained_twice"] == 0
        assert metrics(one)[-1]["reference_kl"] > 0
        manifests.append([step["manifest"] for step in one.events("step")])
        hosts = {event["role"]: event["workers"] for event in one.events("desired")}
        assert (hosts["scoring"] == hosts["training"]) == (workers == 1)
        one.directory.rename(tmp_path / f"on {workers}")
    assert manifests[0] == manifests[1] and len(manifests[0]) == 2


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_job_with_a_teacher_and_judge_survives_their_loss(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    other = create_teacher(tmp_path / "teacher")
    one = run(
        mesh__workers=3,
        algorithm__name="distill",
        models__teacher__path=other,
        models__reward__path=other,
        reward__use="",
        reward__judge__use="model",
        reward__judge__template="?{answer}=",
        reward__judge__yes="1",
        reward__judge__no="2",
        rollout__stop="['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']",  # most turns end
        optimizer__muon_lr=0.1,
        optimizer__adamw_lr=0.1,
        optimizer__clip_norm=10.0,
        algorithm__max_staleness=0,
        budget__steps=16,
        **QUICK | {"algorithm__groups_per_step": 8},
    )
    one.until("version 1", lambda: one.version >= 1, within_s=90.0)
    before = one.pid("scoring/digits")
    os.kill(before, signal.SIGKILL)
    one.pid("scoring/digits", other_than=before)
    assert one.finish() == 0, one.output + one.logs()
    rewards = [row["reward"] for row in metrics(one)]
    assert all(0 <= reward < 1 for reward in rewards), "a probability, or 0 without an answer"
    assert rewards[0] > 0, rewards
    gaps = [row["teacher_kl"] for row in metrics(one)]
    assert len(gaps) == 16
    assert sum(gaps[-4:]) < sum(gaps[:4]) - 4, "it comes nearer to the teacher"
    assert one.audit()["lost"] == 0


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_teacher_with_non_finite_weights_fails_the_job_by_tensor(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    other = create_teacher(tmp_path / "teacher")
    weights = other / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = torch.nan  # no header shows this before the start,
    large = torch.zeros(MAX_READ_BYTES // 2, dtype=torch.bfloat16)  # in files that are large
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = large
    save_file(tensors, weights)
    one = run(
        mesh__workers=3,
        algorithm__name="distill",
        models__teacher__path=other,
        budget__steps=2,
        **QUICK,
    )
    assert one.finish() != 0
    assert "the frozen models cannot be served: tensor model.norm.weight has 1 of" in one.output


@pytest.mark.rotating(3)
@pytest.mark.timeout(300)
def test_supervised_job_trains_without_an_engine(run: Callable[..., Run], tmp_path: Path) -> None:
    one = run(
        algorithm__name="sft",
        algorithm__group_size=1,
        algorithm__groups_per_step=8,
        dataset__train=write_rows(tmp_path / "sums.jsonl"),
        dataset__held_out=write_rows(tmp_path / "more.jsonl", first=16),
        environment__special_tokens="anywhere",  # each answer ends with one
        optimizer__muon_lr=0.02,
        evaluation__every=2,
        evaluation__best="held_out.loss",
        budget__steps=6,
        mesh__workers=1,
    )
    assert one.finish() == 0, one.output + one.logs()
    steps = metrics(one)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [row["sequences"] for row in steps] == [8] * 6
    losses = {row["step"]: row["held_out_loss"] for row in steps if "held_out_loss" in row}
    assert losses.keys() == {2, 4} and losses[4] < losses[2]
    assert one.summary()["best_version"] == 4
    assert one.summary()["trained"] == 48 and one.audit()["lost"] == 0
