"""Benchmark of the trainer beside TRL's, beside padding, and beside itself with more ranks and
hybrids.

Usage:

    python -m loadtests.trainer [equal longtail reward ...] [--repeats 3] [--steps 10]

Prints one flat JSON object, the figures of all parts that were named (default: all).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtests.measuring.entry import options, parts_of
from loadtests.measuring.metered import run_job
from loadtests.trainer import beside_trl, elastic

Figures = dict[str, Any]
Part = Callable[[Path, argparse.Namespace], Figures]
PASSES = 9  # of each side
JOB = Path(__file__).parents[2] / "examples/calculator.toml"
NO_EVALUATION = ("evaluation.before=false", "evaluation.after=false", "evaluation.every=0")


def demo(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the log-probability gap of a finished run, which is made if none is named.

    `logprob_gap_max` is the largest |difference|, and `logprob_kl` the mean over tokens (k3, of
    engine from trainer).
    """
    if chosen.demo is not None:
        lines = (chosen.demo / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
    else:
        out = folder / "run"
        changes = [f"out={out}", f"budget.steps={chosen.demo_steps}", *NO_EVALUATION]
        changes += chosen.demo_set
        rows = asyncio.run(run_job(JOB, out, chosen.demo_steps, *changes)).rows
    fresh = [row for row in rows if row["fresh_tokens"]]
    if not fresh:
        raise RuntimeError("the run trained no token under the version that had sampled it")
    tokens = sum(row["fresh_tokens"] for row in fresh)
    return {
        "logprob_gap_max": max(row["logprob_gap"] for row in fresh),
        "logprob_kl": sum(row["logprob_kl"] * row["fresh_tokens"] for row in fresh) / tokens,
    }


def packed(folder: Path, chosen: argparse.Namespace) -> Figures:
    """Measure packing, as `loadtests.packing` does."""
    import torch  # which the other parts leave to processes of their own

    from loadtests.packing import comparing as packing

    torch.set_num_threads(1)
    plans = packing.plans(0, chosen.sequences or packing.SEQUENCES)
    return plans | packing.passes(chosen.passes, 0, chosen.trained or packing.TRAINED)


PARTS: dict[str, Part] = {
    "equal": beside_trl.equal,
    "longtail": beside_trl.longtail,
    "reward": beside_trl.reward,
    "packing": packed,
    "ranks": elastic.two_ranks,
    "hybrid": elastic.hybrid,
    "transfer": elastic.transfer,
    "join": elastic.join,
    "checkpoint": elastic.checkpoint,
    "recovery": elastic.recovery,
    "demo": demo,
}


def main() -> None:
    parser = options(
        __doc__,
        repeats=(3, "of each side, in turn"),
        steps=(10, "that are measured in each"),
        trl=(beside_trl.VENV, "TRL's environment"),
        demo=(Path, "the run directory of a demo; none: runs it"),
        demo_steps=48,
        passes=(PASSES, "of `packing`, of each side"),
        sequences=(int, "of `packing`; none: as many as there"),
        trained=(int, "of `packing`; none: as many as there"),
    )
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--demo-set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args()
    parts_of(parser, chosen, PARTS)


if __name__ == "__main__":
    main()
