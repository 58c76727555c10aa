"""Arm with pushes of a version to an SGLang server: peak of host memory over the model's bytes.

Measured is the peak during a push above the level before it, of the sender and the receiver
together: private memory, and files in memory, each once. The version itself and the receiver's
parameters are not part of it. `serialised` is the file as it was written before it was streamed.
The version was staged by two ranks, so its tensors lie in pieces. The first push also loads
libraries and starts torch's manager of shared memory, so it counts apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from loadtests.measuring.metered import HostMeter
from loadtests.measuring.processes import environment
from loadtests.measuring.rounds import Arm
from loadtests.weights.scene import Plan

MODULE = "loadtests.weights.members.pushing"
STAGE_S, START_S, PUSH_S = 900.0, 900.0, 600.0
LOOK_S = 0.002  # between two readings of all memory
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BLOCK_BYTES = 512  # unit of `st_blocks`
# The heap of a role process, which retains what is freed.
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
FILES = ("serialised", "disk", "tensors")
WITH_SERVER = (*FILES, "distributed")  # with a real server


async def server_push(plan: Plan) -> Arm:
    """Measure `server_push_KIND_extra`, `server_push_KIND_mb_s` and `server_push_model_mib`."""
    honest, answer = HostMeter(), Arm()
    kinds = WITH_SERVER if "MESHRL_SGLANG_PYTHON" in os.environ else FILES
    with tempfile.TemporaryDirectory(prefix="meshrl-push-", dir=plan.directory or None) as made:
        await _stage(made, plan)
        for kind in kinds:
            model_bytes, pushes = await _measure(kind, made, plan)
            answer["server_push_model_mib"] = round(model_bytes / (1 << 20), 1)
            (first_bytes, _), *later = pushes
            took_s = statistics.median(took_s for _, took_s in later)
            answer[f"server_push_{kind}_first_extra"] = round(first_bytes / model_bytes, 3)
            extra = max(peak for peak, _ in later) / model_bytes
            answer[f"server_push_{kind}_extra"] = round(extra, 3)
            answer[f"server_push_{kind}_mb_s"] = round(model_bytes / took_s / 1e6)
    return answer | honest.get_validity()


async def _stage(made: str, plan: Plan) -> None:
    words = "-m", MODULE, "stage", made, str(plan.server_push)
    stage = await asyncio.create_subprocess_exec(sys.executable, *words, env=environment())
    try:
        async with asyncio.timeout(STAGE_S):
            if await stage.wait():
                raise RuntimeError("the version could not be staged")
    finally:
        if stage.returncode is None:
            stage.kill()


async def _measure(kind: str, made: str, plan: Plan) -> tuple[int, list[tuple[int, float]]]:
    """Return the model's bytes, and the extra bytes and the seconds of each push."""
    words = "-m", MODULE, "push", made, str(plan.server_push), kind
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    sender = await asyncio.create_subprocess_exec(
        sys.executable, *words, **pipes, env=environment(**HEAP)
    )
    assert sender.stdin is not None and sender.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            ready = json.loads(await sender.stdout.readline())
        pushes = []
        for _ in range(1 + plan.rounds):
            level = read_memory(sender.pid)
            sender.stdin.write(b"\n")
            answer = asyncio.ensure_future(sender.stdout.readline())
            peak = level
            async with asyncio.timeout(PUSH_S):
                while not answer.done():
                    peak = max(peak, read_memory(sender.pid))
                    await asyncio.sleep(LOOK_S)
            pushes.append((peak - level, float(json.loads(await answer)["took_s"])))
        sender.stdin.close()
        async with asyncio.timeout(START_S):
            await sender.wait()
    finally:
        with contextlib.suppress(psutil.Error):  # it has exited
            for process in psutil.Process(sender.pid).children(recursive=True):
                process.kill()
            psutil.Process(sender.pid).kill()
    return int(ready["model_bytes"]), pushes


def read_memory(pid: int) -> int:
    """Return private bytes of a process and all below it, and of their files in memory."""
    private, files = 0, dict[tuple[int, int], int]()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            resident, shared = map(int, Path(f"/proc/{process.pid}/statm").read_text().split()[1:3])
            private += (resident - shared) * PAGE_BYTES
            for link in os.scandir(f"/proc/{process.pid}/fd"):
                if os.readlink(link.path).startswith("/memfd:"):
                    found = os.stat(link.path)
                    files[found.st_dev, found.st_ino] = found.st_blocks * BLOCK_BYTES
            for path in Path("/dev/shm").glob(f"torch_{process.pid}_*"):
                found = path.stat()
                files[found.st_dev, found.st_ino] = found.st_blocks * BLOCK_BYTES
    return private + sum(files.values())
