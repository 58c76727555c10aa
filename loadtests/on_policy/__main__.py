"""Accuracy of the mesh without staleness, beside a synchronous loop in one process.

Usage:

    python -m loadtests.on_policy [examples/calculator.toml] [--seeds 0 1 2] [--steps 48]

Same seeds, same warm-started weights, same prompts in each step, same number of updates. Only the
random numbers of sampling differ, so accuracies are equal up to noise.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from loadtests.measuring.commands import Command
from loadtests.measuring.entry import options, print_progress, report
from loadtests.plain.loop import Job, accuracy, run_plain, warmed_up
from loadtests.plain.warm_cache import cache_weights
from meshrl.directory.directory_paths import read_json_or_empty
from meshrl.view.recording.run_record import read_events

RUN_S = 900.0
ACCOUNT = ("lost", "trained_twice", "stale_requeued")


def main() -> None:
    parser = options(__doc__, seeds=[0, 1, 2], steps=48)
    parser.add_argument("job", type=Path, nargs="?", default=Path("examples/calculator.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="on both")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    arms: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        with tempfile.TemporaryDirectory(prefix="meshrl-on-policy-") as scratch:
            job = Job(chosen.job, chosen.set)
            state = warmed_up(job, seed)
            changes = [*chosen.set, f"seed={seed}", f"budget.steps={chosen.steps}"]
            mesh = run_mesh(chosen.job, changes, Path(scratch), state)
        model = job.model(seed)
        model.load_state_dict(state)
        before = accuracy(job, model, greedy=False)
        run_plain(job, seed, chosen.steps, state)
        model.load_state_dict(state)
        found = {mode: accuracy(job, model, mode == "greedy") for mode in ("sampled", "greedy")}
        arms.append({"before": before, "mesh": mesh, "plain": found})
        print_progress(f"seed {seed}: {json.dumps(arms[-1])}")
    figures = compare(arms)
    report({k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()})


def run_mesh(
    job: Path, changes: list[str], scratch: Path, state: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Train without staleness and return the run's figures."""
    out, cache = scratch / "run", scratch / "cache"
    cache_weights(job, changes, scratch / "probe", cache, state)
    more = {
        "out": out,
        "cache": cache,
        "algorithm.max_staleness": 0,
        "evaluation.every": 0,
        "evaluation.before": "false",
    }
    words = [*changes, *(f"{key}={value}" for key, value in more.items())]
    sets = [word for change in words for word in ("--set", change)]
    command = Command(Path.cwd(), "run", str(job), *sets)
    try:
        status = command.wait(RUN_S)
    finally:
        command.end()
    summary = read_json_or_empty(out / "summary.json")
    if summary.get("phase") != "finished":  # the status is 1 where nothing could be learned
        raise RuntimeError(f"the run ended with {status}: {command.text[-4000:]}")
    steps = [e.fields["metrics"] for e in read_events(out) if e.kind == "step"]
    return {
        **summary["held_out"]["after"],
        "staleness_max": summary["staleness_max"],
        "stale_tokens": sum(sum(metrics["staleness_tokens"][1:]) for metrics in steps),
        "steps": summary["steps"],
        "wall_s": summary["wall_s"],
        **{term: summary[term] for term in ACCOUNT},
    }


def compare(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over seeds, and `gap_error`, the standard error of the mean difference."""
    found: dict[str, Any] = {}
    for name, mode in (("accuracy", "sampled"), ("greedy", "greedy")):
        for arm, of in (("mesh", "on_policy"), ("plain", "synchronous")):
            values = [round(one[arm][mode], 4) for one in arms]
            found |= {f"{name}_{of}": statistics.fmean(values), f"{name}_{of}_seeds": values}
    gaps = [one["mesh"]["sampled"] - one["plain"]["sampled"] for one in arms]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    mesh = [one["mesh"] for one in arms]
    return found | {
        "accuracy_before": statistics.fmean(one["before"] for one in arms),
        "accuracy_gap": statistics.fmean(gaps),
        "gap_error": error,
        "staleness_max": max(one["staleness_max"] for one in mesh),
        "stale_tokens": sum(one["stale_tokens"] for one in mesh),
        "steps": min(one["steps"] for one in mesh),
        "mesh_wall_s": statistics.fmean(one["wall_s"] for one in mesh),
        **{term: sum(one[term] for one in mesh) for term in ACCOUNT},
    }


if __name__ == "__main__":
    main()
