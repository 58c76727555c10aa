"""Programs whose processes are the ranks of a gang, and a function that runs one in a test."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from tests.load import scaled

ROOT = Path(__file__).parents[3]


def fork(run: Callable[[int], None], rank: int) -> int:
    """Fork a process that runs a rank; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fork_all(run: Callable[[int], None], ranks: int) -> int:
    """Run all ranks, and end the others when one of them fails; return the exit status."""
    running = {fork(run, rank) for rank in range(ranks)}
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        failed = failed or status
        for other in running if failed else ():
            os.kill(other, signal.SIGKILL)
    return int(failed != 0)


async def run_program(program: Path, directory: Path, *words: str) -> None:
    """Run a program of ranks to its end and require success."""
    log = directory / "ranks.log"
    child = SystemHost().spawn(
        [sys.executable, str(program), *words],
        name="ranks",
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        log=log,
        options=SpawnOptions(own_session=True),
    )
    try:
        assert await child.wait(scaled(200.0)) == 0, log.read_text()[-4000:]
    finally:
        child.kill()
