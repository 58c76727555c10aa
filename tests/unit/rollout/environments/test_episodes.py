"""Episode processes: answers in any order, timeouts and replacement of blocked processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import ToolFailed
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.environments import episode_process
from meshrl.services.rollout.environments.environment_process import (
    EnvironmentHung,
    EnvironmentLost,
)
from meshrl.services.rollout.environments.episode_process import EpisodeProcess
from tests.load import scaled
from tests.meshes import alone

ROOT = Path(__file__).parents[4]
# Answers "text" at once, "later" with the next frame, "never" not at all; "block" stops everything.
PROGRAM = """\
import sys, time
sys.path.insert(0, sys.argv[1])
import msgpack
from meshrl.common.mesh.process.entry.child import ChildChannel

channel, kept = ChildChannel.from_env(), []
while (block := channel.recv()) is not None:
    answers, kept = kept, []
    for number, key, operation, argument in msgpack.unpackb(block, raw=False):
        if operation == "block":
            time.sleep(3600)
        elif operation == "garbage":
            channel.send(msgpack.packb([number]))
        elif operation != "never":
            (kept if operation == "later" else answers).append([number, "ok", argument])
    if answers:
        channel.send(msgpack.packb(answers))
open(sys.argv[2], "w").write("ended")
"""


Make = Callable[[float], EpisodeProcess]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Return `make(deadline_s)`, which creates a process with that deadline."""
    (tmp_path / "program.py").write_text(PROGRAM)
    clock = SystemClock()
    mesh = alone("rollout/job/0", clock, Random(1), SystemHost())
    argv = [sys.executable, str(tmp_path / "program.py"), str(ROOT), str(tmp_path / "mark")]
    made: list[EpisodeProcess] = []

    def process(deadline_s: float) -> EpisodeProcess:
        made.append(EpisodeProcess(mesh, argv, "episodes", tmp_path / "log", deadline_s))
        return made[-1]

    yield process
    for one in made:
        await one.close()
    await mesh.leave()


@pytest.fixture
def process(make: Make) -> EpisodeProcess:
    """Create a process whose deadline suits a busy host."""
    return make(scaled(60.0))


@pytest.fixture
def impatient_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> EpisodeProcess:
    """Create a process with a short deadline, for requests that stay unanswered."""
    monkeypatch.setattr(episode_process, "PROBE_TIMEOUT_S", scaled(1.0))
    return make(scaled(0.5))


async def test_answers_come_in_any_order(process: EpisodeProcess) -> None:
    later = process.submit((1, "later", "b"))
    assert await process.submit((2, "text", "a")) == "a" and not later.done()
    assert await process.submit((3, "text", "c")) == "c"
    assert await later == "b"


async def test_late_answer_fails_only_its_own_request(make: Make) -> None:
    deadline_s = float(round(scaled(2.0)))  # messages name whole seconds
    process = make(deadline_s)
    await process.submit((1, "text", ""))
    pid = process.pid
    late = process.submit((2, "never", ""))
    with pytest.raises(EnvironmentHung, match=f"no answer within {deadline_s:g} s"):
        await late
    assert await process.submit((1, "text", "a")) == "a" and process.pid == pid


async def test_request_during_startup_waits_for_startup(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_process, "PROBE_TIMEOUT_S", 0.1)
    (tmp_path / "program.py").write_text(f"import time\ntime.sleep(3)\n{PROGRAM}")
    process = make(0.1)
    first = process.submit((1, "text", "a"))
    await asyncio.sleep(0.1)
    assert process.pid and not first.done()
    second = process.submit((2, "text", "b"))
    assert (await first, await second) == ("a", "b")


async def test_blocked_process_is_replaced(impatient_process: EpisodeProcess) -> None:
    await impatient_process.submit((1, "text", ""))
    pid = impatient_process.pid
    with pytest.raises(EnvironmentHung):
        await impatient_process.submit((2, "block", ""))
    assert await impatient_process.submit((1, "text", "a")) == "a" and impatient_process.pid != pid


async def test_stopped_process_is_lost_without_a_failure(impatient_process: EpisodeProcess) -> None:
    await impatient_process.submit((1, "text", ""))
    os.kill(impatient_process.pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentLost) as lost:
        await impatient_process.submit((2, "text", ""))
    assert lost.type is EnvironmentLost
    assert await impatient_process.submit((1, "text", "a")) == "a"


async def test_close_of_unopened_episode_starts_no_process(process: EpisodeProcess) -> None:
    assert await process.submit((1, "close", None)) is None
    assert process.pid == 0


async def test_failed_start_fails_waiting_requests_and_is_retried(
    process: EpisodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, "no process left")

    with monkeypatch.context() as patch:
        patch.setattr(SystemHost, "spawn", full)
        futures = [process.submit((key, "text", "a")) for key in (1, 2)]
        for future in futures:
            with pytest.raises(EnvironmentLost, match="no process left"):
                await asyncio.wait_for(future, scaled(30.0))
    assert await process.submit((1, "text", "a")) == "a"


async def test_invalid_frame_ends_the_process_and_fails_its_requests(
    process: EpisodeProcess,
) -> None:
    open_before = process.submit((1, "never", ""))
    await process.submit((1, "text", ""))
    pid = process.pid
    garbage = process.submit((2, "garbage", ""))
    for future in (open_before, garbage):
        with pytest.raises(EnvironmentLost) as lost:
            await asyncio.wait_for(future, scaled(30.0))
        assert lost.type is EnvironmentLost, "well before its deadline"
    assert await process.submit((1, "text", "a")) == "a" and process.pid != pid


async def test_unserializable_request_fails_alone(process: EpisodeProcess) -> None:
    good = process.submit((1, "text", "a"))
    bad = [process.submit((2, "text", v)) for v in (1 << 64, "\ud800", bytes(64 << 20))]
    for future in bad:
        with pytest.raises(ToolFailed, match="cannot be serialized"):
            await future
    assert await good == "a"


async def test_oversized_batch_is_split_into_frames(process: EpisodeProcess) -> None:
    large = [bytes([i]) * (24 << 20) for i in range(3)]
    futures = [process.submit((i, "never", value)) for i, value in enumerate(large)]
    pid = process.pid
    assert await process.submit((9, "text", "a")) == "a" and pid in (0, process.pid)
    assert not any(future.done() for future in futures)


async def test_process_that_reads_no_frame_is_replaced(impatient_process: EpisodeProcess) -> None:
    await impatient_process.submit((1, "text", ""))
    pid = impatient_process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentLost):
        await asyncio.wait_for(impatient_process.submit((2, "text", bytes(8 << 20))), scaled(20.0))
    assert await impatient_process.submit((1, "text", "a")) == "a" and impatient_process.pid != pid


async def test_close_lets_the_process_exit(process: EpisodeProcess, tmp_path: Path) -> None:
    await process.submit((1, "text", ""))
    await process.close()
    assert (tmp_path / "mark").read_text() == "ended"
