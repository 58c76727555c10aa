"""Server of SGLang with random weights, compared with the built-in engine."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from loadtests.gpu.generating import (
    build_requests,
    copy_to_host,
    draw_prompts,
    generate,
    start_engine,
)
from loadtests.gpu.measuring import build_config, draw_model
from loadtests.gpu.parts.sharing import measure_used
from loadtests.gpu.plan import Figures, Incorrect, Settings, Skipped
from loadtests.measuring.entry import print_progress
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.sglang.engine import SGLangEngine, attach_engine
from meshrl.services.engine.sglang.launch_config import LaunchConfig
from meshrl.services.engine.sglang.server import SGLangServer

SLOTS, MAX_LENGTH = 64, 512
PROMPT_TOKENS, NEW_TOKENS = 32, 128
STOP_S = 10.0
MAX_MEAN_GAP = {"bfloat16": 0.05, "float32": 1e-3}  # of log-probabilities, from the built-in engine


class CheckedServer:
    """Running server, with weights of two versions and the built-in engine's scores of them."""

    def __init__(self, settings: Settings, python: str) -> None:
        """Start a server from the main thread, because it exits with the thread that started it."""
        self.settings, self.config = settings, build_config(settings)
        self.dtype = "float32" if settings.is_tiny else "bfloat16"
        base = copy_to_host(draw_model(settings, self.config, torch.float32).state_dict())
        scaled = {
            name: tensor * (1.5 if tensor.dim() > 1 else 1.0) for name, tensor in base.items()
        }
        self.versions = [base, scaled]
        self.row = draw_prompts(self.config, 1, PROMPT_TOKENS)[0]
        self.scores = self._compute_scores()
        self.directory = Path(tempfile.mkdtemp(prefix="meshrl-gpu-"))
        print_progress(f"SGLang's log: {self.directory}/sglang.log")
        launch = LaunchConfig(
            python, self.directory, SLOTS, MAX_LENGTH, dtype=self.dtype, device=settings.device
        )
        began = time.perf_counter()
        loop = asyncio.new_event_loop()
        self.server = loop.run_until_complete(
            SGLangServer.start(
                SystemHost(),
                SystemClock(),
                launch,
                self.config,
                deadline_s=settings.deadline_s - (time.perf_counter() - began) - STOP_S,
            )
        )
        self.start_s = time.perf_counter() - began
        threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()

    def close(self) -> None:
        """Stop the server and delete its files."""
        self.server.http.spawn(self.server.stop()).result(STOP_S)
        shutil.rmtree(self.directory)

    def _compute_scores(self) -> list[NDArray[np.float32]]:
        """Return the built-in engine's log-probabilities of a row under each version."""
        engine = start_engine(self.settings, self.config, 2, MAX_LENGTH, self.dtype)
        found = []
        for version, state in enumerate(self.versions):
            engine.wake(state, version)
            found.append(engine.score(self.row))
        engine.sleep()
        return found

    def describe_start(self) -> Figures:
        """Return the seconds until the server was ready, and its version."""
        return {"start_s": self.start_s, "version": self.server.version}

    def attach(self, transport: str = "auto") -> SGLangEngine:
        """Return an engine of the server with the first version's weights."""
        engine = attach_engine(self.server, self.config, SLOTS, MAX_LENGTH, weights=transport)
        engine.wake(self.versions[0], 0)
        return engine

    def check_scores(self, engine: SGLangEngine, version: int) -> float:
        """Return the mean gap to the built-in engine's scores; Incorrect if it is too large."""
        gap = float(np.abs(engine.score(self.row) - self.scores[version]).mean())
        if not gap <= MAX_MEAN_GAP[self.dtype]:
            raise Incorrect(
                f"version {version} differs by {gap:.3g} a token from the built-in engine"
            )
        return gap

    def measure_transport(self, transport: str) -> Figures:
        """Measure an update of all weights by a transport, and check which weights are there."""
        try:
            engine = self.attach(transport)
        except ConfigError as error:
            raise Skipped(str(error)) from error
        try:
            self.check_scores(engine, 0)
            began = time.perf_counter()
            engine.update_weights(self.versions[1], 1)
            seconds = time.perf_counter() - began
            gap = self.check_scores(engine, 1)
        finally:
            engine.close()
        width = getattr(torch, self.dtype).itemsize
        size_bytes = width * sum(tensor.numel() for tensor in self.versions[1].values())
        return {
            "update_s": seconds,
            "gb_per_s": size_bytes / seconds / 1e9,
            "mean_logprob_gap": gap,
        }

    def measure_tokens(self) -> Figures:
        """Measure tokens per second of a full batch, after one that warms up."""
        prompt, new = (8, 8) if self.settings.is_tiny else (PROMPT_TOKENS, NEW_TOKENS)
        prompts = draw_prompts(self.config, SLOTS, prompt)
        engine = self.attach()
        try:
            generate(engine, build_requests(prompts, new, 1.0))
            began = time.perf_counter()
            generate(engine, build_requests(prompts, new, 1.0, first=SLOTS))
            return {"tokens_per_s": SLOTS * new / (time.perf_counter() - began)}
        finally:
            engine.close()

    def measure_sleep(self) -> Figures:
        """Measure the memory that sleep frees, and waking with other weights."""
        engine = self.attach()
        try:
            awake_bytes = measure_used(self.settings)
            began = time.perf_counter()
            engine.sleep()
            asleep_s = time.perf_counter() - began
            asleep_bytes = measure_used(self.settings)
            began = time.perf_counter()
            engine.wake(self.versions[1], 1)
            awake_s = time.perf_counter() - began
            self.check_scores(engine, 1)
        finally:
            engine.close()
        found: Figures = {"sleep_s": asleep_s, "wake_s": awake_s}
        if self.settings.device == "cuda":
            if asleep_bytes >= awake_bytes:
                raise Incorrect("sleep frees no memory of the device")
            found["freed_gib"] = (awake_bytes - asleep_bytes) / 2**30
        return found
