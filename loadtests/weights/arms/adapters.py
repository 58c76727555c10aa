"""Arm with two adapters of two jobs on one engine beside one adapter, at the same batch.

Tokens per CPU-second, unmerged; and merged, where one adapter alone has the engine.
Log-probabilities of both are compared with those of models into which they are merged.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from loadtests.measuring.metered import HostMeter
from loadtests.measuring.rounds import Arm, ratios, spread, turns
from loadtests.measuring.shapes import drawn, shape
from loadtests.weights.contents import Tensors
from loadtests.weights.scene import Plan
from meshrl.common.generation.builtin.engine import BuiltinEngine
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.model.architecture.projections import build_projections, resolve_targets
from meshrl.common.model.network.lora import merge_adapters

MODEL = shape(256, 4, 704, 4096, (8, 4), max_positions=1024)
TARGETS = ("qkv", "output", "gate_up", "down")
RANK, SCALE = 8, 1.0
BATCH, TOKENS, LENGTH = 16, 64, 256
SCORED = 48  # tokens whose log-probabilities are compared
NAMES = ("a", "b")  # of adapters


def adapter(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    shapes = build_projections(MODEL)
    for layer in range(MODEL.num_layers):
        for name in resolve_targets(MODEL, TARGETS):
            at, shape = f"layers.{layer}.adapters.{name}", shapes[name]
            down = torch.randn(RANK, shape.columns, generator=generator)
            found[f"{at}.a"] = down * shape.columns**-0.5
            found[f"{at}.b"] = 0.1 * torch.randn(shape.rows, RANK, generator=generator)
    return found


def engine(state: Tensors) -> BuiltinEngine:
    made = build_engine(MODEL, BATCH, LENGTH, max_steps=8, step_budget_s=0.02)
    made.wake(state, 0)
    return made


def rate(made: BuiltinEngine, names: list[str]) -> float:
    """Measure tokens per CPU-second of a batch of requests with these adapters."""
    prompts = [np.array([1 + number % 50, 2, 3], np.int32) for number in range(BATCH)]
    made.submit(
        [
            GenerationRequest(number, prompts[number], TOKENS, 1.0, (), number, -1, adapter=name)
            for number, name in enumerate(names)
        ]
    )
    started_s, before = time.process_time(), made.tokens_generated
    while made.step():
        pass
    made.drain_outputs()
    return (made.tokens_generated - before) / (time.process_time() - started_s)


async def adapters(plan: Plan) -> Arm:
    """Measure `multi_adapter_ratio`, `one_over_merged`, `logprob_gap`."""
    honest = HostMeter()
    torch.set_num_threads(1)
    base = drawn(MODEL)
    factors = {name: adapter(seed) for seed, name in enumerate(NAMES, 1)}
    beside = engine(base)
    for name in NAMES:
        beside.load_adapter(name, factors[name], SCALE, 1)
    alone = {name: engine(merge_adapters(MODEL, base | factors[name], SCALE)) for name in NAMES}
    arms = {
        "one": (beside, ["a"] * BATCH),
        "two": (beside, ["a", "b"] * (BATCH // 2)),
        "merged": (alone["a"], [""] * BATCH),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for name in turns([*arms], plan.rounds):
        found[name].append(rate(*arms[name]))
    answer = spread("multi_adapter_ratio", ratios(found["two"], found["one"]))
    answer |= spread("one_over_merged", ratios(found["one"], found["merged"]))
    answer["logprob_gap"] = max(_gap(beside, alone[name], name) for name in NAMES)
    return answer | honest.get_validity()


def _gap(beside: BuiltinEngine, alone: BuiltinEngine, name: str) -> float:
    """Return the largest difference between an adapter's log-probabilities and its merged
    model's.
    """
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(1, MODEL.vocab_size, (SCORED,), generator=generator).numpy()
    one, other = beside.score(tokens, name), alone.score(tokens, "")
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())
