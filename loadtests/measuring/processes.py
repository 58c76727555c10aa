"""Processes and tasks of load tests: their first output and their CPU time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
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


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run work beside the block, and end it with the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process with one thread for each computation."""
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of a size, as of tmpfs, at a folder until the end of the block."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def drop_caches() -> bool:
    """Drop the page cache after writing dirty pages; return False without permission."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def forked(count: int, work: Callable[[int], T]) -> list[T]:
    """Return the JSON results of forks of this process, by their numbers.

    RuntimeError if one fails, which ends the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = {_fork(number, work, Path(folder)) for number in range(count)}
        failed = 0
        while running:
            pid, status = os.wait()
            running.discard(pid)
            failed = failed or status
            for other in running if failed else ():
                os.kill(other, signal.SIGKILL)
        if failed:
            raise RuntimeError("a rank has failed")
        return [json.loads((Path(folder) / str(number)).read_text()) for number in range(count)]


def _fork(number: int, work: Callable[[int], T], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        (folder / str(number)).write_text(json.dumps(work(number)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
