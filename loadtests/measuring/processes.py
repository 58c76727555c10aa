"""Processes of load tests: what they print first, what they have used."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

OF_PROCESS = 2  # the kind of a CPU clock that counts all threads of a process


def cpu_s(*pids: int) -> float:
    """Return the CPU-seconds of all threads of processes so far; without any, of this one."""
    return sum(time.clock_gettime((~pid << 3) | OF_PROCESS) for pid in pids or (os.getpid(),))


@contextmanager
def served(module: str, *words: str) -> Iterator[tuple[int, str]]:
    """Run a module of Python until the end of the block; yield its pid and its first line."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.kill()


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process with one thread for each computation."""
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def drop_caches() -> bool:
    """Drop the page cache, what is not on the disk yet written before; False if that is refused."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def status_bytes(pid: int, *keys: str) -> list[int]:
    """Return entries of a process's status, such as VmHWM, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found: Mapping[str, str] = dict(line.split(":", 1) for line in lines)
    return [int(found[key].split()[0]) << 10 for key in keys]
