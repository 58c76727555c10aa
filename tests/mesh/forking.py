"""Training processes that start in milliseconds: forks of one that has imported PyTorch already.

Product code never forks. A test that starts twenty processes would spend most of its time on their
imports, four CPU-seconds each; this parent has no state but modules, so its forks
are what a fresh interpreter would be. They end with it, and it ends with the test.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.process.child import Channel, tie_to_parent
from common.process.handle import SystemChild, start_time
from common.process.host import SystemHost

START_S = 120.0


class Forks:
    """Starts modules as forks of a process in which `imports` are loaded."""

    def __init__(self, host: SystemHost, imports: list[str], log: Path) -> None:
        self._host = host
        self._parent = host.spawn(
            [sys.executable, "-m", "tests.mesh.forking", *imports],
            name="forks",
            env={"OMP_NUM_THREADS": "1"},
            log=log,
            pipe=True,
        )

    async def start(
        self, name: str, module: str, arguments: list[str], env: Mapping[str, str], log: Path
    ) -> SystemChild:
        log.parent.mkdir(parents=True, exist_ok=True)
        order = {"module": module, "arguments": arguments, "env": dict(env), "log": str(log)}
        await self._parent.send(json.dumps(order).encode())
        pid, started = json.loads(await self._parent.recv(START_S))
        child = self._host.adopt(pid, started, name=name)
        assert child is not None, f"{name} ended at once"
        return child

    async def close(self) -> None:
        self._parent.kill()
        await self._parent.wait(5.0)


def main() -> None:
    channel = Channel.from_env()
    for module in sys.argv[1:]:
        __import__(module)
    # This one, and that of common.process.child, which waits in a system call and holds nothing.
    assert len(os.listdir("/proc/self/task")) == 2, "a fork would have the locks of more threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    parent = os.getpid()
    while (frame := channel.recv()) is not None:
        pid = os.fork()
        if pid == 0:
            become(json.loads(frame), parent)
        channel.send(json.dumps([pid, start_time(pid)]).encode())


def become(order: dict[str, Any], parent: int) -> None:
    """What `common.process.child` does, in a process that has its modules."""
    tie_to_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 256)  # the parent's
    os.environ.update(order["env"])
    sys.argv = [order["module"], *order["arguments"]]
    sys.modules.pop(order["module"], None)
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
