"""A whole run through the command line: stopped, without its Redis, to the end, and beyond."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load import scaled

ROOT = Path(__file__).parents[4]
STEPS = 20
SMALL = {
    "budget.steps": STEPS,
    "training.checkpoint_every": 1,  # there is one as soon as a step is seen
    "warm_start.steps": 2,
    "algorithm.groups_per_step": 2,
    "algorithm.group_size": 4,
    "rollout.max_tokens": 48,
    "evaluation.problems": 4,
    "evaluation.every": 0,
    "mesh.workers": 2,
}


def meshrl(*words: str, where: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "MESHRL_REDIS_URL"}
    return subprocess.Popen(
        [sys.executable, "-m", "meshrl", *words],
        cwd=where,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(program: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = program.communicate(timeout=scaled(200))
    return program.returncode, said


@pytest.mark.deep
@pytest.mark.timeout(560)
def test_a_run_is_stopped_resumed_without_its_redis_audited_and_extended(tmp_path: Path) -> None:
    settings = [f"--set={key}={value}" for key, value in {**SMALL, "cache": '""'}.items()]
    job = str(ROOT / "examples/calculator.toml")
    first = meshrl("run", job, *settings, where=tmp_path)
    assert first.stdout is not None
    lines = []
    for line in first.stdout:
        lines.append(line)
        if "] step " in line:
            first.send_signal(signal.SIGINT)
            break
    code, said = finish(first)
    assert code == 130, "".join(lines) + said
    assert "meshrl resume runs/calculator" in said

    run_dir = tmp_path / "runs/calculator"
    assert finish(meshrl("audit", "runs/calculator", where=tmp_path))[0] == 0
    shutil.rmtree(run_dir / "mesh/redis")
    code, said = finish(meshrl("resume", "runs/calculator", where=tmp_path))
    assert code == 0, said
    assert "starts again from step-000-" in said

    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["phase"], summary["steps"]) == ("finished", STEPS)
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
    assert summary["held_out"]["before"] and summary["held_out"]["after"]
    assert [json.loads(row)["step"] for row in (run_dir / "metrics.jsonl").open()] == list(
        range(1, STEPS + 1)
    )
    assert "<svg" in (run_dir / "report.html").read_text()
    assert (run_dir / "model/config.json").is_file()
    assert finish(meshrl("audit", "runs/calculator", where=tmp_path))[0] == 0

    code, said = finish(meshrl("resume", "runs/calculator", where=tmp_path))
    assert code == 1 and "--set budget.steps=N" in said

    more = ["--set", f"budget.steps={STEPS + 2}", "--set", "optimizer.adamw_lr=0.0005"]
    code, said = finish(meshrl("resume", "runs/calculator", *more, where=tmp_path))
    assert code == 0, said
    assert f"optimizer.adamw_lr: 0.001 -> 0.0005, from step {STEPS + 1} on" in said
    extended = json.loads((run_dir / "summary.json").read_text())
    assert (extended["phase"], extended["steps"]) == ("finished", STEPS + 2)
    tags = {e["tag"]: e["step"] for e in extended["evaluations"]}
    assert tags == {"before": 0, f"step-{STEPS}": STEPS, "after": STEPS + 2}
    assert (extended["lost"], extended["trained_twice"]) == (0, 0)
    kept = json.loads((run_dir / "job.json").read_text())
    assert kept["changes"][0]["was"] == {"budget.steps": STEPS, "optimizer.adamw_lr": 0.001}
    assert kept["document"]["optimizer"]["adamw_lr"] == 0.0005
