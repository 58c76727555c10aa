"""Generators under measurement, each a process of its own on one core, run in turn.

They use the protocol of `loadtests.peers.vllm_worker`: a ready line, then an answer per request.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.measuring.processes import environment

VLLM = Path(".venvs/vllm")  # where `make peers` builds it
STOP_S = 60.0
VOCABULARY = 512
SHORT, LONG = 16, 4096  # tokens of prompts
Prompts = list[list[int]]


@dataclass(frozen=True)
class Answer:
    wall_s: float
    cpu_s: float
    tokens: int
    compute_s: float = 0.0  # of the built-in engine: inside the model
    steps: int = 0
    computed: int = 0  # tokens through the model
    preemptions: int = 0
    cache_tokens: int = 0  # that its cache holds
    peak_tokens: int = 0  # most tokens of running requests at a time, as far as drained
    digest: str = ""  # of all sampled tokens, by request


class Contestant:
    """Worker process; its stderr is shown if it fails."""

    def __init__(self, command: list[str]) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the worker
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment(),
        )
        self.ready = self._line()

    def ask(self, prompts: Prompts, new_tokens: list[int], greedy: bool = False) -> Answer:
        request = {"prompts": prompts, "new_tokens": new_tokens, "greedy": greedy}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Answer(**self._line())

    def decode_s(self, prompts: Prompts, count: int) -> float:
        """Return CPU-seconds of all tokens but the first, `count` for each prompt."""
        self.ask(prompts, [1] * len(prompts))  # from now on what is shared of them is computed
        first = self.ask(prompts, [1] * len(prompts)).cpu_s
        return self.ask(prompts, [1 + count] * len(prompts)).cpu_s - first

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError(f"{self._process.args!r} ended:\n{self._said.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def ours(
    model: Path, path: str, dtype: str = "float32", length: int = 4352, cache_tokens: int = 0
) -> Contestant:
    """Return the built-in engine; `cache_tokens` 0: a cache for all slots."""
    module = [sys.executable, "-m", "loadtests.engine.worker"]
    about = ["--path", path, "--dtype", dtype, "--max-length", str(length)]
    about += ["--cache-tokens", str(cache_tokens)]
    return Contestant([*module, *about, "--model", str(model)])


def generate(model: Path) -> Contestant:
    module = [sys.executable, "-m", "loadtests.peers.generate_worker"]
    return Contestant([*module, "--model", str(model), "--dtype", "float32"])


def vllm(model: Path, dtype: str, folder: Path = VLLM) -> Contestant | None:
    """Return compiled vLLM on the CPU; None if it is not built."""
    python = folder / "bin" / "python"
    if not python.exists():
        return None
    worker = Path(__file__).parents[1] / "peers" / "vllm_worker.py"
    command = [str(python), str(worker), "--model", str(model), "--dtype", dtype, "--prefixes"]
    return Contestant([*command, "--max-length", "4352"])


def one_core() -> None:
    """Pin this process and its children to the last core that it may use."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def make_model(folder: Path) -> Path:
    """Write the measured model, a Qwen2 of 4.07M parameters."""
    command = [sys.executable, "-m", "loadtests.peers.make_model", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


def prompts(count: int, length: int) -> Prompts:
    return [[random.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]
