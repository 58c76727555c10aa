"""Benchmark of an SGLang server as the engine: events and CPU time per token.

Usage:

    MESHRL_SGLANG_PYTHON=PATH python -m loadtests.sglang [--rounds 3] [--in-flight 64]

A random Qwen3 decodes on a CPU with many requests in flight. `single_*` is a server that sends each
token alone (`--stream-interval 1`), `batched_*` one that sends them in batches. Both run, in turn.
`engine_*` is this process, which does what an engine process does, `both_*` with the server's
processes. Figures are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from loadtests.measuring.entry import options, report
from loadtests.measuring.shapes import drawn, shape
from meshrl.common.base.clock import SystemClock
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang.engine import SGLangEngine, attach_engine
from meshrl.services.engine.sglang.launch_config import LaunchConfig
from meshrl.services.engine.sglang.server import SGLangServer

PROMPT, NEW, IN_FLIGHT = 16, 200, 64
CONFIG = shape(128, 2, 384, 512, (4, 2))
START_S = 900.0
ARMS = {"single": ("--stream-interval", "1"), "batched": ()}


@dataclass
class Figures:
    """Measurements of one arm, one entry a round."""

    events_per_token: list[float] = field(default_factory=list)
    engine_us_per_token: list[float] = field(default_factory=list)
    both_us_per_token: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {name: round(median(values), 4) for name, values in vars(self).items()}


class Arm:
    """Server with its engine, whose events are counted as they arrive."""

    def __init__(self, server: SGLangServer, weights: dict[str, torch.Tensor], slots: int) -> None:
        self.server, self.events, self.figures = server, 0, Figures()
        stream = server.http.stream

        def count(path: str, body: dict[str, Any], on_event: Callable[[Any], None]) -> Any:
            def hear(event: Any) -> None:
                self.events += isinstance(event, dict)
                on_event(event)

            return stream(path, body, hear)

        server.http.stream = count  # type: ignore[method-assign]
        length = server.launch_config.max_length
        self.engine: SGLangEngine = attach_engine(server, CONFIG, slots, length)
        self.engine.wake(weights, 0)

    def run(self, in_flight: int, new: int, seed: int) -> tuple[int, float]:
        """Generate `in_flight` times `new` tokens; return their number and the seconds."""
        prompts = np.random.default_rng(seed).integers(1, 500, (in_flight, PROMPT), np.int32)
        began = time.perf_counter()
        self.engine.submit(
            [GenerationRequest(i, prompts[i], new, 1.0, (), i, -1) for i in range(in_flight)]
        )
        tokens, wait = 0, threading.Event()
        while self.engine.num_running or self.engine.num_waiting or self.engine.has_finished:
            self.engine.step()
            output = self.engine.drain_outputs()
            tokens += len(output.tokens) if output is not None else 0
            wait.wait(self.engine.next_step_delay_s)
        return tokens, time.perf_counter() - began

    def measure(self, in_flight: int, new: int, seed: int) -> None:
        events, own, theirs = self.events, time.process_time(), self.server_cpu_s()
        tokens, took_s = self.run(in_flight, new, seed)
        own_s, their_s = time.process_time() - own, self.server_cpu_s() - theirs
        self.figures.events_per_token.append((self.events - events) / tokens)
        self.figures.engine_us_per_token.append(1e6 * own_s / tokens)
        self.figures.both_us_per_token.append(1e6 * (own_s + their_s) / tokens)
        self.figures.tokens_per_s.append(tokens / took_s)

    def server_cpu_s(self) -> float:
        root = psutil.Process(self.server.pid)
        times = [one.cpu_times() for one in [root, *root.children(recursive=True)]]
        return float(sum(t.user + t.system for t in times))


def main() -> None:
    parser = options(
        __doc__,
        rounds=3,
        in_flight=(IN_FLIGHT, "requests"),
        new=(NEW, "tokens of each request"),
        python=(os.environ.get("MESHRL_SGLANG_PYTHON", ""), "interpreter that has SGLang"),
        arms=(list(ARMS), "servers to measure"),
    )
    chosen = parser.parse_args()
    if not chosen.python:
        parser.error("name an interpreter that has SGLang by --python or $MESHRL_SGLANG_PYTHON")
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    arms: dict[str, Arm] = {}
    with tempfile.TemporaryDirectory(prefix="meshrl-sglang-") as folder:
        servers = [
            (name, loop.run_until_complete(start(Path(folder) / name, ARMS[name], chosen)))
            for name in chosen.arms
        ]
        threading.Thread(target=loop.run_forever, daemon=True).start()
        try:
            for name, server in servers:
                arms[name] = Arm(server, drawn(CONFIG), chosen.in_flight)
                arms[name].run(chosen.in_flight, chosen.new // 4, 0)
            for seed in range(1, chosen.rounds + 1):
                for arm in arms.values():
                    arm.measure(chosen.in_flight, chosen.new, seed)
        finally:
            for _, server in servers:
                server.http.spawn(server.stop()).result(60.0)
    report({name: arm.figures.medians() for name, arm in arms.items()} | {"valid": True})


async def start(place: Path, flags: tuple[str, ...], chosen: Any) -> SGLangServer:
    length = PROMPT + chosen.new + 8
    launch = LaunchConfig(chosen.python, place, chosen.in_flight, length, options=flags)
    return await SGLangServer.start(SystemHost(), SystemClock(), launch, CONFIG, deadline_s=START_S)


if __name__ == "__main__":
    main()
