"""Cost of a small cache: the same requests with a share of the memory that they would fill.

The reference engine has a cache for all its slots. It gives the peak of the tokens that running
requests hold at a time. Another engine has a cache of the budget's share of that peak, at least of
one sequence of full length. Both run the same requests with the same seeds, in turn.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from loadtests.engine.contestants import SHORT, Answer, Contestant, make_model, ours, prompts


def measure_budgets(
    folder: Path, lengths: list[int], shares: list[float], rounds: int
) -> dict[str, Any]:
    """Measure each share of the peak against the whole cache; ratios are of CPU-seconds."""
    model, length = make_model(folder / "qwen2"), SHORT + max(lengths)
    asked = prompts(len(lengths), SHORT)
    whole = ours(model, "native", length=length)
    small: dict[float, Contestant] = {}
    try:
        peak_tokens = whole.ask(asked, lengths).peak_tokens
        for share in shares:
            small[share] = ours(
                model, "native", length=length, cache_tokens=int(share * peak_tokens)
            )
            small[share].ask(asked, lengths)
        found: dict[float, list[Answer]] = {}
        for _ in range(rounds):
            for share, contestant in {1.0: whole, **small}.items():
                found.setdefault(share, []).append(contestant.ask(asked, lengths))
    finally:
        for contestant in (whole, *small.values()):
            contestant.close()
    return {"peak_tokens": peak_tokens} | {
        f"budget_{share:g}": _compare(found[1.0], found[share]) for share in shares
    }


def _compare(whole: list[Answer], small: list[Answer]) -> dict[str, Any]:
    return {
        "cache_tokens": small[0].cache_tokens,
        "outputs_equal": all(a.digest == b.digest for a, b in zip(whole, small, strict=True)),
        "preemptions": median(answer.preemptions for answer in small),
        "recomputed_share": round(
            median(answer.computed / answer.tokens for answer in small)
            - median(answer.computed / answer.tokens for answer in whole),
            3,
        ),
        "makespan_ratio": round(
            median(answer.cpu_s for answer in small) / median(answer.cpu_s for answer in whole), 3
        ),
        "steps_ratio": round(
            median(answer.steps for answer in small) / median(answer.steps for answer in whole), 3
        ),
    }
