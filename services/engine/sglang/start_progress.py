"""Progress of an SGLang server's start, from its log and the CPU time of its processes.

A start may take minutes for large weights, and half an hour when kernels are compiled for the first
time. A start that is slow writes to its log or computes. One that is stalled does neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from meshrl.common.base.clock import Clock
from meshrl.common.generation.builtin.loaded_weights import get_tensor_shapes
from meshrl.common.model.architecture.config import ModelConfig

# Imports, ranks and the listener: some 30 s on an idle core, ten times as long on a busy machine.
BASE_S = 300.0
WEIGHT_BYTES_PER_S = 250e6  # of random weights, on a slow host
CAPTURE_S = 600.0  # to tune kernels and capture CUDA graphs
COMPILE_S = 3600.0  # to compile kernels that this host has not compiled before
STALL_S = 240.0  # less than a worker's limit for a start without progress
QUIET_S = 30.0  # silence that is reported
COMPUTING_SHARE = 0.1  # of a core: a process that uses less is idle

STAGES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"Init (parallel|torch distributed) begin", "connecting its ranks"),
        (r"Load weight begin", "creating its weights"),
        (r"Load weight end", "allocating its cache"),
        (r"Cache is allocated|KV cache allocated", "preparing its kernels"),
        (r"(?i)DeepGEMM.*(JIT|warmup|compil)", "compiling DeepGEMM kernels"),
        (r"(?i)flashinfer.*(JIT|autotun|compil)", "compiling FlashInfer kernels"),
        (r"(?i)torch\.?compile|Building extension|Compiling", "compiling kernels"),
        (r"Capture .* end\b", "starting its listener"),
        (r"(?i)Captur(e|ing) .*(graph|batches|num tokens)", "capturing graphs"),
        (r"Uvicorn running|startup complete|fired up", "answering first requests"),
    )
)
COMPILING = "compiling"  # in the texts of stages that compile
# A progress bar, as in `Capturing batches (bs=8): 25%|##5 | 9/36 [00:03<00:09, 2.9it/s]`.
BAR = re.compile(r"\d+%\|.*?\|\s*(\d+)/(\d+) \[")
COMPILERS = {"nvcc", "cicc", "ptxas", "fatbinary", "ninja", "cc1plus", "cudafe++"}


@dataclass(frozen=True)
class StartLimits:
    """Limits of a start."""

    total_s: float
    compile_s: float = COMPILE_S  # further time once kernels are being compiled
    stall_s: float = STALL_S  # without output and without computation

    @property
    def longest_s(self) -> float:
        """Seconds of the longest start, which compiles kernels."""
        return self.total_s + self.compile_s


def compute_start_limits(config: ModelConfig, dtype: str, device: str) -> StartLimits:
    """Compute the limits of the start of a server of this model."""
    numbers = sum(math.prod(shape) for shape in get_tensor_shapes(config).values())
    weights_s = numbers * getattr(torch, dtype).itemsize / WEIGHT_BYTES_PER_S
    return StartLimits(BASE_S + weights_s + (CAPTURE_S if device == "cuda" else 0.0))


class ServerProcesses:
    """CPU time and names of a server's processes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds: dict[int, float] = {}  # by pid

    def measure(self) -> tuple[float, set[str]]:
        """Return the CPU seconds since the last call, and the names of the processes."""
        seconds, names = {}, set()
        with suppress(psutil.Error):
            root = psutil.Process(self._pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    seconds[process.pid] = times.user + times.system
                    names.add(process.name())
        used = sum(s - min(s, self._seconds.get(pid, 0.0)) for pid, s in seconds.items())
        self._seconds = seconds
        return used, names


class StartProgress:
    """Progress of one start; `observe` is called every second or so."""

    def __init__(
        self,
        clock: Clock,
        log_file: Path,
        measure: Callable[[], tuple[float, set[str]]],
        limits: StartLimits,
        log_bytes: int = 0,
    ) -> None:
        """Begin to watch.

        `measure` is that of `ServerProcesses`. `log_bytes`: size of the log before the start.
        """
        self._clock, self._log_file, self._measure, self._limits = clock, log_file, measure, limits
        self._began_s = self._observed_s = self._news_s = clock.monotonic()
        self._offset = log_bytes  # bytes of the log that were read, or are of earlier starts
        self._rest = ""  # its last line, which may be incomplete
        self._stage, self._count, self._compiler = "importing its modules", "", ""
        self._has_compiled = False
        self.output_bytes, self.cpu_s = 0, 0.0  # in total

    def observe(self) -> None:
        """Read what is new; blocks on files."""
        now_s = self._clock.monotonic()
        used_s, names = self._measure()
        self.cpu_s += used_s
        self._compiler = next(iter(sorted(names & COMPILERS)), "")
        lines = self._read_lines()
        for line in lines:
            self._parse(line)
        self._has_compiled |= bool(self._compiler) or COMPILING in self._stage
        if lines or used_s > COMPUTING_SHARE * (now_s - self._observed_s):
            self._news_s = now_s
        self._observed_s = now_s

    def _read_lines(self) -> list[str]:
        """Return the log's new lines; a progress bar is rewritten in one line."""
        with suppress(FileNotFoundError), open(self._log_file, "rb") as file:
            size = file.seek(0, 2)
            file.seek(self._offset if size >= self._offset else 0)  # it was rotated
            content = file.read()
            self._offset = file.tell()
            self.output_bytes += len(content)
            parts = re.split(r"[\r\n]", self._rest + content.decode(errors="replace"))
            self._rest = parts[-1]
            return [part for part in parts if part] if content else []
        return []

    def _parse(self, line: str) -> None:
        bar = BAR.search(line)
        for pattern, stage in STAGES:
            if pattern.search(line):
                if stage != self._stage:
                    self._stage, self._count = stage, ""
                break
        if bar is not None:
            self._count = f", {bar[1]} of {bar[2]}"

    @property
    def text(self) -> str:
        """Progress for people."""
        stage = self._stage + self._count
        if self._compiler and COMPILING not in stage:
            stage = f"compiling kernels ({self._compiler}) while {stage}"
        quiet_s = self._observed_s - self._news_s
        return stage + (f", silent for {quiet_s:.0f} s" if quiet_s >= QUIET_S else "")

    @property
    def deadline_s(self) -> float:
        """Seconds that the whole start may take."""
        return self._limits.longest_s if self._has_compiled else self._limits.total_s

    def explain_failure(self) -> str:
        """Explain why the start has failed; empty while it may continue."""
        quiet_s, total_s = self._observed_s - self._news_s, self._observed_s - self._began_s
        if quiet_s > self._limits.stall_s:
            return (
                f"SGLang is stalled: it has neither written to its log nor computed for "
                f"{quiet_s:.0f} s, while {self._stage}{self._count}"
            )
        if total_s > self.deadline_s:
            return (
                f"SGLang was not ready within {self.deadline_s:.0f} s, though it still works: "
                f"{self._stage}{self._count}"
            )
        return ""


def is_progress_bar(line: str) -> bool:
    return BAR.search(line) is not None
