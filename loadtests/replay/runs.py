"""Runs whose trainer dies in given phases of steps, and their results."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.view.recording.audit import audit_run

# A worker's budget is five restarts a minute, so the deaths are spread over two runs.
STEPS, CHECKPOINT_EVERY = 8, 4
DEATHS = (
    ("waiting@2", "computing@3", "updating@6", "staging@7"),
    ("checkpointing@4", "writing@4", "committing@6", "telling@7"),
)
JOB = Path(__file__).parents[2] / "tests/mesh/jobs/digits.toml"
# A run that stops after three steps or so, and goes on with other settings.
SLOW = {"rollout.emulate": "10/64/100000"}  # so that there is time to stop it
STOPPED_AFTER, CHANGED_DEATHS = 3, ("computing@7", "committing@8")
CHANGES = {"optimizer.muon_lr": 0.02, "optimizer.adamw_lr": 0.01, "algorithm.clip_high": 0.01}
RUN_S = 300.0
DYING = "loadtests.replay.dying_rank"
POLL_S = 0.05
SETTINGS = {
    "budget.steps": STEPS,
    "training.checkpoint_every": CHECKPOINT_EVERY,
    "training.deterministic": "true",
    "algorithm.max_staleness": 0,
    "algorithm.filter_zero_variance": "false",
    "reward.deadline_s": 10.0,
    "evaluation.before": "false",
    "evaluation.after": "false",
    "evaluation.every": 0,
}


def one_run(
    job: Path, directory: Path, deaths: Sequence[str] = (), steps: int = STEPS
) -> dict[str, Any]:
    """Return the versions' digests, the lineage and the audit of a run whose trainer dies at
    `deaths`.
    """
    words = SETTINGS | {"out": directory / "run", "budget.steps": steps}
    with started(["run", str(job)], words, directory, deaths) as program:
        await_exit(program, directory)
    return found_in(directory)


def changed_run(
    job: Path, directory: Path, deaths: Sequence[str], steps: int, stopped_after: int
) -> dict[str, Any]:
    """Return the same of a run whose settings change between two steps."""
    words = SETTINGS | {"out": directory / "run", "training.checkpoint_every": 10 * steps, **SLOW}
    words["budget.steps"] = steps
    with started(["run", str(job)], words, directory, ()) as program:
        until = time.monotonic() + RUN_S
        while len(committed_in(directory)) < stopped_after and time.monotonic() < until:
            time.sleep(POLL_S)
        program.send_signal(signal.SIGINT)
        await_exit(program, directory, 130)
    run = str(directory / "run")
    with started(["resume", run], CHANGES, directory, deaths) as program:
        await_exit(program, directory)
    record = json.loads((directory / "run/job.json").read_text())
    return found_in(directory) | {"changed_from": record["changes"][0]["from_step"]}


def started(
    command: Sequence[str],
    words: Mapping[str, Any],
    directory: Path,
    deaths: Sequence[str],
    rank: str = DYING,
) -> subprocess.Popen[bytes]:
    """Run `meshrl` with a command and settings, and with ranks of a module that die so."""
    marks = directory / "deaths"
    marks.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "MESHRL_REDIS_URL"}
    if deaths or rank != DYING:
        ranks = [sys.executable, "-m", rank, "--marks", str(marks)]
        ranks += ["--die", *deaths] if deaths else []
        environment["MESHRL_ROLE_COMMANDS"] = f"training={shlex.join(ranks)}"
    argv = [sys.executable, "-m", "meshrl", *command]
    argv += [f"--set={key}={value}" for key, value in words.items()]
    with (directory / "said").open("a") as said:
        return subprocess.Popen(argv, env=environment, stdout=said, stderr=said)


def await_exit(program: subprocess.Popen[bytes], directory: Path, status: int = 0) -> None:
    if program.wait(RUN_S) != status:
        raise RuntimeError((directory / "said").read_text()[-3000:])


def committed_in(directory: Path) -> list[dict[str, Any]]:
    path = directory / "run/events.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [e["fields"] for e in map(json.loads, lines) if e["kind"] == "step"]


def found_in(directory: Path) -> dict[str, Any]:
    marks, committed = directory / "deaths", committed_in(directory)
    found = audit_run(directory / "run")
    return {
        "deaths": sorted(mark.name for mark in marks.iterdir()),
        "manifests": [step["manifest"] for step in committed],
        "lineages": sorted({step["lineage"] for step in committed}),
        "lost": found["lost"],
        "trained_twice": found["trained_twice"],
    }
