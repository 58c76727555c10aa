r"""Built-in engine behind a pipe, by the protocol of `loadtests.peers.vllm_worker`.

Usage:

    python -m loadtests.engine.worker --model DIR --path native --dtype float32 \
        --max-length 4352

As in an engine process, a call runs up to 8 steps and tokens are drained as they come. Answers also
hold `compute_s`, seconds inside the model, and `steps`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtests.measuring.entry import options
from meshrl.common.api.engine import FinishReason
from meshrl.common.generation.builtin.engine_builder import BuiltinEngine, build_engine
from meshrl.common.generation.engine_contract import EngineOutput, GenerationRequest
from meshrl.common.model.files.initial_parameters import load_model

SLOTS = 64
STEPS = 8  # of a call, as an engine process flushes
BUDGET_S = 0.02


def start(model: Path, path: str, dtype: str, max_length: int, cache_tokens: int) -> BuiltinEngine:
    """Return the engine with the weights of a Hugging Face directory."""
    torch.set_num_threads(1)
    config, decoder = load_model(model)
    engine = build_engine(
        config,
        SLOTS,
        max_length,
        backend=path,
        dtype=dtype,
        kv_cache_tokens=cache_tokens,
        max_steps=STEPS,
        step_budget_s=BUDGET_S,
    )
    engine.wake(decoder.state_dict(), 0)
    return engine


def requests(
    prompts: list[list[int]], new_tokens: list[int], greedy: bool, first_id: int
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=first_id + i,
            tokens=np.array(prompt, np.int32),
            max_new_tokens=count,
            temperature=0.0 if greedy else 1.0,
            stop_ids=(),
            seed=first_id + i,
            session=-1,
        )
        for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]


class Sampled:
    """Sampled tokens of requests, and the most tokens that running ones had at a time."""

    def __init__(self, prompt_lengths: dict[int, int]) -> None:
        self._prompt_lengths = prompt_lengths
        self._tokens: dict[int, list[int]] = {}
        self._running_tokens = 0
        self.count = self.peak_tokens = 0

    def add(self, flush: EngineOutput) -> None:
        ends = np.cumsum(flush.counts)
        done = 0  # tokens of requests that have ended
        for i, id in enumerate(flush.ids.tolist()):
            if id not in self._tokens:
                self._running_tokens += self._prompt_lengths[id]
            tokens = self._tokens.setdefault(id, [])
            tokens += flush.tokens[ends[i] - flush.counts[i] : ends[i]].tolist()
            if flush.finish_reasons[i] != FinishReason.RUNNING:
                done += self._prompt_lengths[id] + len(tokens)
        self.count += len(flush.tokens)
        self._running_tokens += len(flush.tokens)
        self.peak_tokens = max(self.peak_tokens, self._running_tokens)
        self._running_tokens -= done

    def digest(self) -> str:
        first = min(self._tokens)
        tokens = [self._tokens[first + i] for i in range(len(self._tokens))]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


class Worker:
    def __init__(self, engine: BuiltinEngine) -> None:
        self.engine = engine
        self._next = 0

    def generate(
        self, prompts: list[list[int]], new_tokens: list[int], greedy: bool
    ) -> dict[str, Any]:
        engine = self.engine
        asked = requests(prompts, new_tokens, greedy, self._next)
        sampled = Sampled({request.id: len(request.tokens) for request in asked})
        self._next += len(asked)
        steps, compute_s, computed = engine.num_steps, engine.compute_s, engine.tokens_computed
        preempted = engine.num_preempted
        wall, cpu = time.perf_counter(), time.process_time()
        engine.submit(asked)
        drained = engine.num_steps
        while engine.step():
            if engine.has_finished or engine.num_steps - drained >= STEPS:
                flush, drained = engine.drain_outputs(), engine.num_steps
                if flush is not None:
                    sampled.add(flush)
        answer = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "compute_s": engine.compute_s - compute_s,
            "steps": engine.num_steps - steps,
            "tokens": sampled.count,
            "computed": engine.tokens_computed - computed,
            "preemptions": engine.num_preempted - preempted,
            "cache_tokens": engine.cache_tokens,
            "peak_tokens": sampled.peak_tokens,
            "digest": sampled.digest(),
        }
        if sampled.count != sum(new_tokens):
            raise RuntimeError(f"asked for {sum(new_tokens)} tokens, got {sampled.count}")
        return answer


def main() -> None:
    parser = options(
        __doc__, max_length=4352, cache_tokens=(0, "size of the cache; 0: all slots full")
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--path", choices=("native", "eager"), default="native")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = parser.parse_args()
    worker = Worker(
        start(chosen.model, chosen.path, chosen.dtype, chosen.max_length, chosen.cache_tokens)
    )
    worker.generate([[1] * 4] * SLOTS, [8] * SLOTS, False)
    ready = {"ready": True, "peer": "meshrl", "path": worker.engine.backend, "dtype": chosen.dtype}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = worker.generate(request["prompts"], request["new_tokens"], request["greedy"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
