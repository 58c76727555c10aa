"""Benchmark of long-tailed generation: cost of the longest requests for the others, and a schedule
bound.

Usage:

    python -m loadtests.longtail [--kv-budget 0.25 0.5]

512 requests, lognormal lengths of mean 64 whose longest tenth holds half the tokens, 64 slots, on
one core, in CPU-seconds.

- `ratio_static`: static batches of 64 with transformers' `generate`, each of which waits for its
  longest, over the built-in engine.
- `schedule_efficiency`: the list-scheduling bound over the engine's time. The bound gives each
  request in order to the first free slot and adds up what steps of so many sequences of such
  lengths, and prompts computed 64 at a time, cost by the engine's own measured table; scheduling,
  prompts that come one by one and everything else are free.
- `context_cost_ratio`: CPU-seconds of 63 short requests that decode beside one at 4,096 tokens of
  context, over the same without it.

With `--kv-budget` only `budget.py` runs: the same requests with a cache of these shares of the peak
of their tokens. `budget_*_makespan_ratio` is in CPU-seconds, over a cache for all slots.
"""

from __future__ import annotations

import heapq
import math
import random
import tempfile
from pathlib import Path
from statistics import NormalDist, median

import numpy as np

from loadtests.engine.contestants import (
    LONG,
    SHORT,
    Contestant,
    Prompts,
    generate,
    make_model,
    one_core,
    ours,
    prompts,
)
from loadtests.longtail.budget import measure_budgets
from loadtests.measuring.entry import options, report

REQUESTS, SLOTS, MEAN = 512, 64, 64.0
SIGMA = 1.2816  # of the logarithm: the share of the longest tenth is then normal_cdf(0) = 1/2
MOST = 2048
RUNNING = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (32, 512)
TABLE_STEPS = 48


def main() -> None:
    parser = options(
        __doc__,
        rounds=3,
        requests=REQUESTS,
        mean=(MEAN, "tokens of a request"),
        context=(LONG, "tokens beside short requests"),
        table_steps=(TABLE_STEPS, "of each cell"),
        kv_budget=([0.0], "only caches of these shares of the tokens that requests hold at most"),
    )
    parser.add_argument("--contexts", type=int, nargs=2, default=CONTEXTS, help="of the table")
    chosen = parser.parse_args()
    one_core()
    lengths = drawn(chosen.requests, chosen.mean, seed=0)
    random.seed(0)
    if any(chosen.kv_budget):
        with tempfile.TemporaryDirectory(prefix="meshrl-budget-") as folder:
            report(measure_budgets(Path(folder), lengths, chosen.kv_budget, chosen.rounds))
        return
    with tempfile.TemporaryDirectory(prefix="meshrl-longtail-") as folder:
        model = make_model(Path(folder) / "qwen2")
        engine, static = ours(model, "native"), generate(model)
        times: list[float] = []
        tables: list[Table] = []
        contexts: list[float] = []
        for _ in range(chosen.rounds):
            tables.append(Table(engine, chosen.table_steps, tuple(chosen.contexts)))
            times.append(engine.ask(prompts(len(lengths), SHORT), lengths).cpu_s)
            shorts = prompts(SLOTS - 1, SHORT)
            alone_s = engine.decode_s(shorts, 128)
            beside_s = engine.decode_s(shorts + prompts(1, chosen.context), 128)
            contexts.append(beside_s / alone_s)
        in_batches = static_s(static, prompts(len(lengths), SHORT), lengths)
        for contestant in (engine, static):
            contestant.close()
    bound = median(table.list_schedule_s(lengths) for table in tables)
    spent = median(times)
    found = {
        "ratio_static": in_batches / spent,
        "schedule_efficiency": bound / spent,
        "context_cost_ratio": median(contexts),
        "tokens_per_cpu_s": sum(lengths) / spent,
    }
    report({name: round(figure, 3) for name, figure in found.items()})


def drawn(requests: int, mean: float, seed: int) -> list[int]:
    """Return the new tokens of each request as quantiles of the lognormal, without chance."""
    mu = math.log(mean) - SIGMA**2 / 2
    quantiles = [NormalDist().inv_cdf((i + 0.5) / requests) for i in range(requests)]
    lengths = [min(MOST, max(1, round(math.exp(mu + SIGMA * z)))) for z in quantiles]
    random.Random(seed).shuffle(lengths)
    return lengths


def static_s(static: Contestant, asked: Prompts, lengths: list[int]) -> float:
    starts = range(0, len(lengths), SLOTS)
    return sum(static.ask(asked[i : i + SLOTS], lengths[i : i + SLOTS]).cpu_s for i in starts)


class Table:
    """Seconds of a decode step by running sequences and the sum of their contexts, measured."""

    def __init__(self, engine: Contestant, steps: int, contexts: tuple[int, int]) -> None:
        self._steps, self._least = steps, contexts[0]
        short, long = ([self._step_s(engine, n, context) for n in RUNNING] for context in contexts)
        self._steps_s = np.array(short)
        self._prompt_s = median(  # of one prompt and the first token behind it
            engine.ask(prompts(SLOTS, SHORT), [1] * SLOTS).cpu_s / SLOTS for _ in range(5)
        )
        extra = np.array(RUNNING) * (contexts[1] - contexts[0])
        # of one token of context: the slope through the origin of what longer contexts add
        self._context_s = float(((np.array(long) - self._steps_s) * extra).sum() / (extra**2).sum())

    def _step_s(self, engine: Contestant, running: int, context: int) -> float:
        asked = prompts(running, context - self._steps // 2)
        return engine.decode_s(asked, self._steps) / self._steps

    def step_s(self, running: int, contexts: int) -> float:
        base = float(np.interp(running, RUNNING, self._steps_s))
        return base + self._context_s * (contexts - running * self._least)

    def list_schedule_s(self, lengths: list[int]) -> float:
        """Return the time of the list schedule (Graham 1966) on SLOTS slots."""
        free = [0] * SLOTS  # the step at which a slot is free
        heapq.heapify(free)
        spans = []
        for length in lengths:
            start = heapq.heappop(free)
            spans.append((start, start + length - 1))  # the first token comes with the prompt
            heapq.heappush(free, start + length - 1)
        last = max(end for _, end in spans)
        running, contexts = np.zeros(last, int), np.zeros(last, int)
        for start, end in spans:
            running[start:end] += 1
            contexts[start:end] += SHORT + 1 + np.arange(end - start)
        pairs = zip(running.tolist(), contexts.tolist(), strict=True)
        steps_s = sum(self.step_s(n, total) for n, total in pairs)
        return steps_s + self._prompt_s * len(lengths)


if __name__ == "__main__":
    main()
