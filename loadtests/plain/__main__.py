"""Synchronous GRPO in one process and one thread: the baseline of the mesh.

Usage:

    python -m loadtests.plain examples/calculator.toml --seed 0 --steps 40

It shares the model, the packing and the learner with the mesh and nothing else: slots that decode
together, generate all, then train, no queue, no store, no second process.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from loadtests.measuring.entry import options, report
from loadtests.plain.loop import Job, accuracy, run_plain, warmed_up


def main() -> None:
    parser = options(
        __doc__,
        seed=0,
        steps=40,
        problems=(int, "held-out ones that are tried; none: all"),
    )
    parser.add_argument("job", type=Path, nargs="?", default=Path("examples/calculator.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    job, begun = Job(chosen.job, chosen.set), time.process_time()
    job.held_out = job.held_out[: chosen.problems]
    state = warmed_up(job, chosen.seed)
    found: dict[str, Any] = {"seed": chosen.seed, "warm_start_cpu_s": time.process_time() - begun}
    for when in ("before", "after"):
        if when == "after":
            found |= run_plain(job, chosen.seed, chosen.steps, state)
        model = job.model(chosen.seed)
        model.load_state_dict(state)
        found[f"{when}_sampled"] = accuracy(job, model, greedy=False)
        found[f"{when}_greedy"] = accuracy(job, model, greedy=True)
    report(found)


if __name__ == "__main__":
    main()
