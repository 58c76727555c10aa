"""Processes that answer out of order: the late fail alone, the blocked are replaced."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.clock import SystemClock
from common.host import SystemHost
from common.mesh import Mesh
from common.random import Random
from common.state.client import State
from common.transport.memory import MemoryNetwork, MemoryTransport
from services.rollout.environment_process import EnvironmentHung, EnvironmentLost
from services.rollout.episodes import EpisodeProcess

ROOT = Path(__file__).parents[3]
# Answers "text" at once, "later" with the next frame, "never" not at all; "block" stops everything.
PROGRAM = """\
import sys, time
sys.path.insert(0, sys.argv[1])
import msgpack
from common.child import Channel

channel, kept = Channel.from_env(), []
while (block := channel.recv()) is not None:
    answers, kept = kept, []
    for number, key, operation, argument in msgpack.unpackb(block, raw=False):
        if operation == "block":
            time.sleep(60)
        elif operation != "never":
            (kept if operation == "later" else answers).append([number, "ok", argument])
    if answers:
        channel.send(msgpack.packb(answers))
"""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[EpisodeProcess]:
    (tmp_path / "program.py").write_text(PROGRAM)
    clock = SystemClock()
    mesh = Mesh(
        name="rollout/0",
        kind="rollout",
        state=State.simulated(clock),
        transport=MemoryTransport(MemoryNetwork(clock, Random(1)), "mem://rollout"),
        clock=clock,
        random=Random(1),
        host=SystemHost(),
    )
    argv = [sys.executable, str(tmp_path / "program.py"), str(ROOT)]
    process = EpisodeProcess(mesh, argv, "episodes", tmp_path / "log", deadline_s=2.0)
    yield process
    await process.close()
    await mesh.leave()


async def test_answers_come_in_any_order(process: EpisodeProcess) -> None:
    later = process.put((1, "later", "b"))
    assert await process.put((2, "text", "a")) == "a" and not later.done()
    assert await process.put((3, "text", "c")) == "c"
    assert await later == "b"


async def test_what_is_late_fails_alone(process: EpisodeProcess) -> None:
    await process.put((1, "text", ""))
    pid = process.pid
    late = process.put((2, "never", ""))
    with pytest.raises(EnvironmentHung, match="no answer in 2 s"):
        await late
    assert await process.put((1, "text", "a")) == "a" and process.pid == pid


async def test_a_blocked_process_is_replaced(process: EpisodeProcess) -> None:
    await process.put((1, "text", ""))
    pid = process.pid
    with pytest.raises(EnvironmentHung):
        await process.put((2, "block", ""))
    assert await process.put((1, "text", "a")) == "a" and process.pid != pid


async def test_a_stopped_process_is_lost_and_nobody_is_to_blame(process: EpisodeProcess) -> None:
    await process.put((1, "text", ""))
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentLost) as lost:
        await process.put((2, "text", ""))
    assert lost.type is EnvironmentLost
    assert await process.put((1, "text", "a")) == "a"


async def test_closing_what_was_never_opened_starts_no_process(process: EpisodeProcess) -> None:
    assert await process.put((1, "close", None)) is None
    assert process.pid == 0
