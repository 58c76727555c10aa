"""Processes that answer out of order: the late fail alone, the blocked are replaced."""

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
    """`make(deadline_s)` -> a process whose answers have that long."""
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
    """For what is answered at once, however busy the host is."""
    return make(scaled(60.0))


@pytest.fixture
def hasty(make: Make, monkeypatch: pytest.MonkeyPatch) -> EpisodeProcess:
    """For what is not answered at all."""
    monkeypatch.setattr(episode_process, "PROBE_TIMEOUT_S", scaled(1.0))
    return make(scaled(0.5))


async def test_answers_come_in_any_order(process: EpisodeProcess) -> None:
    later = process.submit((1, "later", "b"))
    assert await process.submit((2, "text", "a")) == "a" and not later.done()
    assert await process.submit((3, "text", "c")) == "c"
    assert await later == "b"


async def test_what_is_late_fails_alone(make: Make) -> None:
    deadline_s = float(round(scaled(2.0)))  # messages name whole seconds
    process = make(deadline_s)
    await process.submit((1, "text", ""))
    pid = process.pid
    late = process.submit((2, "never", ""))
    with pytest.raises(EnvironmentHung, match=f"no answer in {deadline_s:g} s"):
        await late
    assert await process.submit((1, "text", "a")) == "a" and process.pid == pid


async def test_what_comes_while_it_starts_waits_for_the_start_too(
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


async def test_a_blocked_process_is_replaced(hasty: EpisodeProcess) -> None:
    await hasty.submit((1, "text", ""))
    pid = hasty.pid
    with pytest.raises(EnvironmentHung):
        await hasty.submit((2, "block", ""))
    assert await hasty.submit((1, "text", "a")) == "a" and hasty.pid != pid


async def test_a_stopped_process_is_lost_and_nobody_is_to_blame(hasty: EpisodeProcess) -> None:
    await hasty.submit((1, "text", ""))
    os.kill(hasty.pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentLost) as lost:
        await hasty.submit((2, "text", ""))
    assert lost.type is EnvironmentLost
    assert await hasty.submit((1, "text", "a")) == "a"


async def test_closing_what_was_never_opened_starts_no_process(process: EpisodeProcess) -> None:
    assert await process.submit((1, "close", None)) is None
    assert process.pid == 0


async def test_a_process_that_does_not_start_fails_what_waits_and_is_tried_again(
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


async def test_garbage_costs_the_process_and_hangs_nobody(process: EpisodeProcess) -> None:
    open_before = process.submit((1, "never", ""))
    await process.submit((1, "text", ""))
    pid = process.pid
    garbage = process.submit((2, "garbage", ""))
    for future in (open_before, garbage):
        with pytest.raises(EnvironmentLost) as lost:
            await asyncio.wait_for(future, scaled(30.0))
        assert lost.type is EnvironmentLost, "well before its deadline"
    assert await process.submit((1, "text", "a")) == "a" and process.pid != pid


async def test_what_cannot_travel_fails_alone(process: EpisodeProcess) -> None:
    good = process.submit((1, "text", "a"))
    bad = [process.submit((2, "text", v)) for v in (1 << 64, "\ud800", bytes(64 << 20))]
    for future in bad:
        with pytest.raises(ToolFailed, match="cannot travel"):
            await future
    assert await good == "a"


async def test_frames_past_the_limit_go_as_several(process: EpisodeProcess) -> None:
    large = [bytes([i]) * (24 << 20) for i in range(3)]
    futures = [process.submit((i, "never", value)) for i, value in enumerate(large)]
    pid = process.pid
    assert await process.submit((9, "text", "a")) == "a" and pid in (0, process.pid)
    assert not any(future.done() for future in futures)


async def test_a_process_that_takes_no_frame_is_replaced(hasty: EpisodeProcess) -> None:
    await hasty.submit((1, "text", ""))
    pid = hasty.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentLost):
        await asyncio.wait_for(hasty.submit((2, "text", bytes(8 << 20))), scaled(20.0))
    assert await hasty.submit((1, "text", "a")) == "a" and hasty.pid != pid


async def test_the_end_lets_the_process_exit(process: EpisodeProcess, tmp_path: Path) -> None:
    await process.submit((1, "text", ""))
    await process.close()
    assert (tmp_path / "mark").read_text() == "ended"
