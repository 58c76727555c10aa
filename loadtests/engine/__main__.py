"""Benchmark of the built-in engine, transformers' `generate` and vLLM on one core, in tokens per
CPU-second.

Usage:

    python -m loadtests.engine [--rounds 3]

A random Qwen2 of 4.07M parameters, prompts of 16 tokens and of 4,096, 128 new tokens. All
contestants run in turn, in processes of one thread; ratios are of medians over the rounds. At 4,096
tokens prompts stay computed from round to round on both sides, and only decoding counts.

vLLM runs in bfloat16 in `ratio_vllm_*`, whatever we run in; `ratio_vllm_float32_*` is beside vLLM
in float32, which is the faster one where the processor does not multiply bfloat16.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from loadtests.engine.contestants import (
    LONG,
    SHORT,
    VLLM,
    Contestant,
    generate,
    make_model,
    one_core,
    ours,
    prompts,
    vllm,
)
from loadtests.measuring.entry import options, report

NEW = 128
BATCHES = (1, 8, 32)
AT_4K = 32  # sequences
NATIVE, EAGER, GENERATE = "native", "eager", "generate"
VLLM_BF16, VLLM_F32 = "vllm_bf16", "vllm_float32"

Seconds = dict[tuple[str, str], list[float]]  # (contestant, case) -> one for each round


def main() -> None:
    parser = options(
        __doc__,
        rounds=3,
        vllm=(VLLM, "its virtual environment"),
        new=(NEW, "tokens of each request"),
        long=(LONG, "tokens of the long prompts"),
        at_once=(AT_4K, "long prompts"),
    )
    chosen = parser.parse_args()
    one_core()
    with tempfile.TemporaryDirectory(prefix="meshrl-engine-") as folder:
        contestants = start(make_model(Path(folder) / "qwen2"), chosen.vllm, chosen.new)
        try:
            found, share = measure(contestants, chosen)
        finally:
            for contestant in contestants.values():
                contestant.close()
    report(figures(contestants, found, share))


def start(model: Path, folder: Path, new: int) -> dict[str, Contestant]:
    there = {
        NATIVE: ours(model, "native"),
        EAGER: ours(model, "eager", length=SHORT + new + 1),
        GENERATE: generate(model),
        VLLM_BF16: vllm(model, "bfloat16", folder),
        VLLM_F32: vllm(model, "float32", folder),
    }
    return {name: contestant for name, contestant in there.items() if contestant is not None}


def measure(
    contestants: dict[str, Contestant], sizes: argparse.Namespace
) -> tuple[Seconds, list[float]]:
    """Measure CPU-seconds and Python's share of each native step at batch 32."""
    found: Seconds = {}
    shares: list[float] = []
    random.seed(0)
    context = prompts(sizes.at_once, sizes.long)
    for _ in range(sizes.rounds):
        for batch in BATCHES:
            short = prompts(batch, SHORT)
            for name, contestant in contestants.items():
                answer = contestant.ask(short, [sizes.new] * batch)
                found.setdefault((name, f"b{batch}"), []).append(answer.cpu_s)
                if name == NATIVE and batch == 32:
                    shares.append(1 - answer.compute_s / answer.wall_s)
        for name in contestants.keys() - {EAGER, GENERATE}:
            spent = contestants[name].decode_s(context, sizes.new)
            found.setdefault((name, "4k"), []).append(spent)
    return found, shares


def figures(
    contestants: dict[str, Contestant],
    found: Seconds,
    shares: list[float],
) -> dict[str, Any]:
    """Return one flat object; ratios are the peer's CPU-seconds over ours, null without a peer."""

    def ratio(peer: str, us: str, case: str) -> float | None:
        if (peer, case) not in found:
            return None
        return round(median(found[peer, case]) / median(found[us, case]), 3)

    ready = {name: contestant.ready for name, contestant in contestants.items()}
    return {
        "ratio_generate_b1": ratio(GENERATE, NATIVE, "b1"),
        "ratio_generate_b32": ratio(GENERATE, NATIVE, "b32"),
        "ratio_vllm_b1": ratio(VLLM_BF16, NATIVE, "b1"),
        "ratio_vllm_b32": ratio(VLLM_BF16, NATIVE, "b32"),
        "ratio_vllm_4k": ratio(VLLM_BF16, NATIVE, "4k"),
        "ratio_vllm_float32_b1": ratio(VLLM_F32, NATIVE, "b1"),
        "ratio_vllm_float32_b32": ratio(VLLM_F32, NATIVE, "b32"),
        "ratio_vllm_float32_4k": ratio(VLLM_F32, NATIVE, "4k"),
        "torch_path_ratio_generate_b32": ratio(GENERATE, EAGER, "b32"),
        "scheduler_share": round(median(shares), 4),
        "vllm": ready.get(VLLM_BF16, {}).get("peer", "not built: make peers"),
        "vllm_dtype": ready.get(VLLM_BF16, {}).get("vllm_dtype"),
    }


if __name__ == "__main__":
    main()
