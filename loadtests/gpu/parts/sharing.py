"""Two instances of one GPU in processes of their own, of which one is awake at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from loadtests.gpu.generating import (
    build_requests,
    copy_to_host,
    draw_prompts,
    generate,
    start_engine,
)
from loadtests.gpu.measuring import build_config, draw_model
from loadtests.gpu.parts.sleeping import SleepingLearner
from loadtests.gpu.plan import Figures, Incorrect, Settings

ROUNDS = 3
ANSWER_S = 60.0  # limit of one command of the other process
CONTEXT_BYTES = 3 << 29  # of CUDA, its libraries and kernels, in each process
SLOTS, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 32


def measure_used(settings: Settings) -> int:
    """Return the bytes of the device that all processes use; 0 on a CPU."""
    if settings.device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def serve_learner(settings: Settings, commands: Connection) -> None:
    """Run commands of the engine's process on a learner: create, wake, train, sleep."""
    learner: SleepingLearner | None = None
    while (command := commands.recv()) != "end":
        began = time.perf_counter()
        result: float = 0.0
        if command == "create":
            learner = SleepingLearner(settings)
        else:
            assert learner is not None
            calls: dict[str, Callable[[], object]] = {"sleep": learner.sleep, "wake": learner.wake}
            if command in calls:
                calls[command]()
            else:
                result = learner.compute_gradient_sum()
        commands.send((result, time.perf_counter() - began))


def alternate(settings: Settings) -> Figures:
    """Let an engine and a learner take turns; each must find its state, and memory for itself."""
    context = multiprocessing.get_context("fork")  # CUDA is not in use here yet
    ours, theirs = context.Pipe()
    other = context.Process(target=serve_learner, args=(settings, theirs), daemon=True)
    other.start()
    theirs.close()
    try:
        return Turns(settings, ours).run()
    finally:
        other.kill()
        other.join(ANSWER_S)


class Turns:
    """Turns of the engine of this process and the learner of another."""

    def __init__(self, settings: Settings, other: Connection) -> None:
        self.settings, self.other = settings, other
        config = build_config(settings)
        model = draw_model(settings, config, torch.bfloat16)
        self.state = copy_to_host(model.state_dict(), pinned=settings.device == "cuda")
        del model
        if settings.device == "cuda":
            torch.cuda.empty_cache()
        self.engine = start_engine(settings, config, SLOTS, PROMPT_TOKENS + NEW_TOKENS, "bfloat16")
        self.prompts = draw_prompts(config, SLOTS, PROMPT_TOKENS)
        self.peak_bytes = {"engine": 0, "learner": 0}

    def ask(self, command: str) -> tuple[float, float]:
        """Run a command in the other process; return its result and its seconds."""
        self.other.send(command)
        if not self.other.poll(ANSWER_S):
            raise Incorrect(f"the learner's process did not {command} within {ANSWER_S:g} s")
        result, seconds = self.other.recv()
        return result, seconds

    def note_peak(self, name: str) -> None:
        self.peak_bytes[name] = max(self.peak_bytes[name], measure_used(self.settings))

    def run(self) -> Figures:
        """Return the times of turns and the memory that was in use."""
        self.ask("create")
        self.note_peak("learner")
        self.ask("sleep")
        asleep_bytes, to_engine_s, to_learner_s = [], [], []
        sums, tokens = [], []
        for turn in range(ROUNDS):
            began = time.perf_counter()
            self.engine.wake(self.state, turn)
            to_engine_s.append(time.perf_counter() - began)
            first = turn * SLOTS
            found = generate(self.engine, build_requests(self.prompts, NEW_TOKENS, first=first))
            tokens.append(np.concatenate([found[first + i][0] for i in range(SLOTS)]))
            self.note_peak("engine")
            self.engine.sleep()
            asleep_bytes.append(measure_used(self.settings))
            to_learner_s.append(self.ask("wake")[1])
            sums.append(self.ask("compute_gradient_sum")[0])
            self.note_peak("learner")
            self.ask("sleep")
        self.ask_end()
        self.check_state(tokens, sums)
        return {
            "to_engine_ms": 1000 * float(np.median(to_engine_s)),
            "to_learner_ms": 1000 * float(np.median(to_learner_s)),
            **self.check_memory(max(asleep_bytes)),
        }

    def ask_end(self) -> None:
        self.other.send("end")

    def check_state(self, tokens: list[Any], sums: list[float]) -> None:
        """Raise Incorrect if an instance computed other results after its sleep."""
        if any(not np.array_equal(found, tokens[0]) for found in tokens[1:]):
            raise Incorrect("the engine generated other tokens after the learner's turn")
        if any(abs(found - sums[0]) > 1e-3 * sums[0] for found in sums[1:]):
            raise Incorrect(f"the learner's gradients differ between turns: {sums}")

    def check_memory(self, asleep_bytes: int) -> Figures:
        """Return the device's memory in use in GiB; Incorrect above the two processes' contexts."""
        if self.settings.device != "cuda":
            return {}
        figures = {f"{name}_awake_gib": used / 2**30 for name, used in self.peak_bytes.items()}
        gib = asleep_bytes / 2**30
        if asleep_bytes > 2 * CONTEXT_BYTES:
            raise Incorrect(f"{gib:.2f} GiB are in use while both sleep: {figures}")
        return figures | {"asleep_gib": gib}


CASES = {"alternate": alternate}
