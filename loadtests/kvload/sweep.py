"""Time to the first token after a stored prefix, by load speed: computed, loaded, and both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from loadtests.kvload.scene import VOCAB, Scene, scene
from loadtests.measuring.rounds import rotated
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS
from meshrl.common.job.memory.cache_blocks import MAX_PREFILL_TOKENS

BEYOND = 1.05  # of computing's time, after which loading alone is slower, and need not end
MATCHED = 1.0
COMPUTING = ("compute", 0.0)  # the arm without a ratio


@dataclass(frozen=True)
class Point:
    """Measurements at one length of one model. `ratios`: load over compute."""

    model: str
    tokens: int
    ratios: tuple[float, ...]


POINTS = (
    Point("30M", 2048, (0.2, 0.5, 1.0, 2.0, 5.0)),
    Point("30M", 8192, (0.2, 1.0, 5.0)),
    Point("30M", 16384, (0.2, 1.0, 5.0)),
    Point("200M", 2048, (0.2, 1.0, 5.0)),
    Point("200M", 8192, (1.0,)),
)
OVER_SOCKETS = (
    Point("30M", 2048, (0.2, 0.5, 1.0, 2.0, 5.0)),
    Point("30M", 8192, (0.2, 1.0)),
)

Made = Callable[[str, int, Path], AbstractContextManager[Scene]]


def sweep(
    points: Sequence[Point], directory: Path, rounds: int, made_by: Made = scene
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reads = late = 0
    for name in dict.fromkeys(point.model for point in points):
        of_model = [point for point in points if point.model == name]
        length = max(point.tokens for point in of_model) + 2 * CHUNK_TOKENS
        with made_by(name, length, directory) as made:
            for point in of_model:
                for ratio, figures in _measured(made, point, rounds).items():
                    key = f"{name}_{point.tokens}_{ratio:g}"
                    found[key] = figures
                    print(key, figures, flush=True)
            reads, late = reads + made.paced.reads, late + made.paced.late
    matched = [f for key, f in found.items() if key.endswith(f"_{MATCHED:g}")]
    every = list(found.values())
    return {
        **found,
        "never_worse": max(f["never_worse"] for f in every),
        "closed_form_share": min(f["closed_form_share"] for f in every),
        "over_compute_matched": [f["over_compute"] for f in matched],
        "over_load_matched": [f["over_load"] for f in matched],
        "meeting_error_chunks": max(abs(f["meeting_error_chunks"]) for f in every),
        "late_share": round(late / reads, 4) if reads else 0.0,
    }


def _measured(made: Scene, point: Point, rounds: int) -> dict[float, dict[str, Any]]:
    random = np.random.default_rng(point.tokens)
    tokens = random.integers(0, VOCAB, point.tokens + 1).astype(np.int32)
    size = made.store(tokens)
    compute_s = made.first_token_s(tokens, "compute")
    times: dict[tuple[str, float], list[float]] = {}
    curves: list[list[tuple[int, float]]] = []
    met: dict[float, list[int]] = {ratio: [] for ratio in point.ratios}
    arms = [COMPUTING, *((arm, ratio) for ratio in point.ratios for arm in ("load", "both"))]
    for turn in range(rounds):
        for arm, ratio in rotated(arms, 3 * turn):
            known = times.get(COMPUTING, [compute_s])
            made.paced.settle(size / (ratio * median(known)) if ratio else 0.0)
            until_s = BEYOND * max(known) if arm == "load" else 600.0
            before = made.engine.tokens_computed
            took_s = made.first_token_s(tokens, arm, until_s)
            times.setdefault((arm, ratio), []).append(took_s)
            if arm == "compute":
                curves.append(list(made.steps))
            if arm == "both":
                met[ratio].append(made.engine.tokens_computed - before)
    curve = sorted(curves, key=lambda steps: steps[-1][1])[len(curves) // 2]
    return {
        ratio: _figures(point.tokens, ratio, times, median(met[ratio]), curve)
        for ratio in point.ratios
    }


def _figures(
    n: int,
    ratio: float,
    times: Mapping[tuple[str, float], list[float]],
    met: float,
    curve: list[tuple[int, float]],
) -> dict[str, Any]:
    compute, load, both = times[COMPUTING], times["load", ratio], times["both", ratio]
    compute_s, load_s, both_s = median(compute), median(load), median(both)
    # An aborted load alone is a worse measure than the rate to which it was slowed down.
    per_token = load_s / n if ratio <= 1 else ratio * compute_s / n
    best_s, at = _closed_form(n, per_token, curve)
    chunk_s = compute_s * MAX_PREFILL_TOKENS / n
    worse = [(b - chunk_s) / min(c, d) for c, d, b in zip(compute, load, both, strict=True)]
    return {
        "compute_s": round(compute_s, 3),
        "load_s": round(load_s, 3),
        "both_s": round(both_s, 3),
        "over_compute": round(compute_s / both_s, 3),
        "over_load": round(per_token * n / both_s, 3),
        "closed_form_share": round(best_s / both_s, 3),
        "never_worse": round(median(worse), 3),
        "meeting_error_chunks": round((met - at) / CHUNK_TOKENS, 1),
    }


def _closed_form(n: int, per_token: float, curve: list[tuple[int, float]]) -> tuple[float, int]:
    """Return the least time in which computed front and loaded back can meet, and the front's
    tokens.

    The front has the measured cost, and the back consists of chunks.
    """
    done, seconds = zip(*((0, 0.0), *curve), strict=True)
    choices = range(0, n + 1, CHUNK_TOKENS)
    times = [(max(float(np.interp(k, done, seconds)), per_token * (n - k)), k) for k in choices]
    return min(times)
