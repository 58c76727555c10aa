"""How far the trainer's log-probabilities lie from the engines' over the demo.

Only tokens count that were sampled, with all before them, under the weights that are trained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from loadtests.measuring.metered import run_job

JOB = Path(__file__).parents[2] / "examples/calculator.toml"
NO_EVALUATION = ("evaluation.before=false", "evaluation.after=false", "evaluation.every=0")


def demo(folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """`logprob_gap_max`, the largest |difference|, and `logprob_kl` (k3, of engine from trainer),
    the mean over tokens, of a finished run if one is named, or else of one made for it.
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
        "logprob_tokens": tokens,
    }
