"""Benchmark of MeshRL and TRL's GRPOTrainer on one task, in turn: CPU-seconds of a step, and
rewards.

Both start from the same weights, with the same prompts, batch, groups, learning rate and forced
lengths, and step on what the newest weights have sampled. A step is all that it takes: TRL's one
process from the end of one step to the next, and all processes of a mesh from one commit to the
next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from pathlib import Path
from statistics import mean, median
from typing import Any

from loadtests.measuring.metered import Measured, run_job
from loadtests.measuring.processes import environment
from loadtests.trainer import digits
from loadtests.trainer.digits import Task

VENV = Path(".venvs/trl")  # where `make peers` builds it
PROGRAM = Path(__file__).parents[1] / "peers" / "trl_grpo.py"
WARM_STEPS = 2  # of every run, which are not measured
LONG_STEPS = 4  # that are measured of the long tail: TRL takes 20 s for one
LONG_REPEATS = 2
LEARNING_STEPS = 20
LAST_STEPS = 5  # over which the reward is averaged
SEEDS = 0, 1, 2
TRL_S = 900.0


def equal(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `ratio_trl_equal`, with all completions of one length."""
    task = digits.write(folder / "task", (digits.EQUAL,))
    return compared("equal", task, chosen.trl, chosen.steps, chosen.repeats)


def longtail(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure `ratio_trl_longtail` with lognormal lengths, and the share of the longest tenth."""
    lengths = digits.long_tail()
    task = digits.write(folder / "task", lengths)
    found = compared("longtail", task, chosen.trl, LONG_STEPS, min(chosen.repeats, LONG_REPEATS))
    return found | {"longtail_tenth_share": digits.tail_share(lengths)}


def compared(name: str, task: Task, venv: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Return medians over runs of the mean CPU-seconds of a step."""
    last = WARM_STEPS + steps
    mesh, peer = [], []
    for repeat in range(repeats):
        mesh.append(ours(task, last, task.folder / f"run-{repeat}").per_step(WARM_STEPS, last))
        peer.append(mean(theirs(task, last, venv)["cpu_s"][WARM_STEPS:]))
    used, trl_cpu_s = [sum(run.values()) for run in mesh], median(peer)
    found = {
        f"ratio_trl_{name}": median(used) / trl_cpu_s,
        f"mesh_cpu_s_{name}": median(used),
        f"trl_cpu_s_{name}": trl_cpu_s,
    }
    for kind in sorted(mesh[0]):
        found[f"{kind}_cpu_s_{name}"] = median(run.get(kind, 0.0) for run in mesh)
    return found


def reward(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure the mean final reward after equal samples: `reward_mesh`, `reward_trl`."""
    task = digits.write(folder / "task", (digits.EQUAL,))
    mesh, peer = [], []
    for seed in SEEDS:
        run = ours(task, LEARNING_STEPS, folder / f"run-{seed}", seed=seed)
        mesh.append(mean(row["reward"] for row in run.rows[:LEARNING_STEPS][-LAST_STEPS:]))
        told = theirs(task, LEARNING_STEPS, chosen.trl, seed=seed)
        peer.append(mean(told["reward"][-LAST_STEPS:]))
    return {"reward_mesh": mean(mesh), "reward_trl": mean(peer)}


def ours(task: Task, last: int, out: Path, seed: int = 0) -> Measured:
    """Train the task on a mesh until step `last`, one step behind another."""
    job = task.job_file(out, steps=last + 1, seed=seed, staleness=0)
    measured = asyncio.run(run_job(job, out, last))
    expected = [length(task, step) for step in range(last)]
    found = [row["length_mean"] - digits.PROMPT for row in measured.rows[:last]]
    if not is_close(found, expected):
        raise RuntimeError(f"lengths were {found}, not {expected}")
    return measured


def theirs(task: Task, steps: int, venv: Path, seed: int = 0) -> dict[str, Any]:
    """Return the result of a run of trl_grpo.py; RuntimeError with its last output if it fails."""
    python = venv / "bin" / "python"
    if not python.exists():
        raise RuntimeError(f"there is no TRL in {venv}: build it with `make peers`")
    command = [str(python), str(PROGRAM), "--model", str(task.model), "--rows", str(task.rows)]
    command += ["--lengths", str(task.lengths_file()), "--steps", str(steps)]
    command += ["--batch", str(task.batch), "--group", str(task.group), "--seed", str(seed)]
    command += ["--learning-rate", str(digits.LEARNING_RATE)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TRL_S, env=environment())
    if run.returncode:
        raise RuntimeError(f"TRL ended with {run.returncode}:\n{run.stderr[-3000:]}")
    document: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if not is_close(document["length_mean"], [length(task, step) for step in range(steps)]):
        raise RuntimeError(f"TRL's lengths were {document['length_mean']}")
    return document


def length(task: Task, step: int) -> float:
    first = step * task.batch
    return mean(task.lengths[(first + i) % len(task.lengths)] for i in range(task.batch))


def is_close(found: list[float], expected: list[float]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(abs(a - b) < 0.01 for a, b in pairs)
