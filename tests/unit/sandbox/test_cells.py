"""Sessions: state between cells, isolation from each other, and typed ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.job_clock import JobClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.sessions import Sessions
from tests.load import scaled
from tests.unit.sandbox.launching import open_launcher

pytestmark = pytest.mark.needs("bwrap")
LIMITS = JailLimits(wall_s=20.0, cpu_s=1.0, memory_bytes=128 * MIB, output_bytes=4096)


@pytest.fixture
async def sessions(launcher: JailLauncher) -> AsyncIterator[Sessions]:
    new_sessions = Sessions(launcher, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=600.0)
    yield new_sessions
    new_sessions.close()


async def test_session_keeps_variables_functions_and_imports(sessions: Sessions) -> None:
    assert (
        await sessions.run("a", "import math\ndef f(x):\n    return x * k\nk = 3")
    ).stdout == b""
    result = await sessions.run("a", "f(math.floor(7.9))")
    assert (result.status, result.stdout) == ("ok", b"21\n")
    assert (await sessions.run("a", "_ + 1")).stdout == b"22\n"


async def test_error_is_shown_and_the_session_continues(sessions: Sessions) -> None:
    await sessions.run("a", "x = 5")
    failed = await sessions.run("a", "x = 6\n1 / 0")
    assert failed.status == "ok" and b"ZeroDivisionError" in failed.stderr
    assert b'"cell 2", line 2' in failed.stderr
    assert (await sessions.run("a", "x")).stdout == b"6\n"


async def test_forked_child_does_not_answer_for_its_cell(sessions: Sessions) -> None:
    source = "import os\nchild = os.fork()\nif not child:\n    raise ValueError('of the child')\n"
    result = await sessions.run("a", source + "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])")
    assert (result.status, result.stdout) == ("ok", b"1\n") and b"of the child" in result.stderr
    assert (await sessions.run("a", "child > 0")).stdout == b"True\n"


@pytest.mark.rotating(3)
async def test_cell_over_its_time_limit_ends_its_session(sessions: Sessions) -> None:
    await sessions.run("a", "x = 5")
    timed_out = await sessions.run("a", "print('begun')\nwhile True: pass")
    assert (timed_out.status, timed_out.stdout) == ("timeout", b"begun\n")
    assert "over 1 s of CPU time" in timed_out.error and "starts a new one" in timed_out.error
    assert (await sessions.run("a", "'x' in globals()")).stdout == b"False\n"


async def test_time_between_cells_does_not_count(launcher: JailLauncher) -> None:
    limits = replace(LIMITS, wall_s=2.0, cpu_s=1.0)
    sessions = Sessions(launcher, SystemClock(), limits, max_sessions=3, idle_timeout_s=600.0)
    await sessions.run("a", "x = 1")
    await asyncio.sleep(2.3)
    assert (await sessions.run("a", "x")).stdout == b"1\n"
    sessions.close()


@pytest.mark.rotating(3)
async def test_limits_apply_to_each_cell(launcher: JailLauncher) -> None:
    limits = replace(LIMITS, cpu_s=0.4)
    sessions = Sessions(launcher, SystemClock(), limits, max_sessions=3, idle_timeout_s=600.0)
    spinning = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    for _ in range(6):  # together far over the limit of one
        result = await sessions.run("a", "print('x' * 3000)")
        assert (result.status, len(result.stdout)) == ("ok", 3001)
        assert (await sessions.run("a", spinning)).status == "ok"
    assert (await sessions.run("a", "print('x' * 5000)")).status == "output_limit"
    sessions.close()


async def test_denied_cell_has_a_typed_status_and_the_session_continues(sessions: Sessions) -> None:
    await sessions.run("a", "x = 1")
    assert (await sessions.run("a", "bytearray(1 << 30)")).status == "out_of_memory"
    assert (await sessions.run("a", "import socket; socket.socket()")).status == "refused"
    assert (await sessions.run("a", "x")).stdout == b"1\n"


async def test_least_recently_used_session_is_evicted(sessions: Sessions) -> None:
    for name in "abc":
        await sessions.run(name, f"x = {name!r}")
    await sessions.run("a", "x")
    assert (await sessions.run("d", "1")).stdout == b"1\n"
    assert sessions.size == 3
    evicted = await sessions.run("b", "x")
    assert evicted.status == "evicted" and "unused for longest" in evicted.error
    assert evicted.stdout == b""
    assert b"NameError" in (await sessions.run("b", "x")).stderr
    assert (await sessions.run("a", "x")).stdout == b"'a'\n"


async def test_idle_session_is_evicted_and_its_next_call_reports_it(launcher: JailLauncher) -> None:
    sessions = Sessions(launcher, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=0.2)
    await sessions.run("a", "x = 1")
    await asyncio.sleep(0.3)
    sessions.evict_idle()
    assert sessions.size == 0
    assert (await sessions.run("a", "x")).status == "evicted"
    sessions.close()


async def test_session_of_a_paused_job_is_not_idle(launcher: JailLauncher) -> None:
    clock = JobClock(SystemClock())
    sessions = Sessions(launcher, SystemClock(), LIMITS, 3, 1.0, clock)
    await sessions.run("a", "x = 1")
    clock.set_paused(True)
    await asyncio.sleep(1.2)
    sessions.evict_idle()
    clock.set_paused(False)
    assert (await sessions.run("a", "x")).stdout == b"1\n"
    await asyncio.sleep(1.2)
    sessions.evict_idle()
    assert sessions.size == 0
    sessions.close()


async def test_ended_session_leaves_no_state(sessions: Sessions) -> None:
    await sessions.run("a", "x = 1")
    sessions.end("a")
    assert sessions.size == 0
    assert (await sessions.run("a", "'x' in globals()")).stdout == b"False\n"


@pytest.mark.rotating(3)
@pytest.mark.parametrize("exit", ["[]", "10**30", "'0'", "None"])
async def test_forged_cell_answer_does_not_affect_other_sessions(
    sessions: Sessions, exit: str
) -> None:
    source = "import json, os\n"
    source += f"frame = json.dumps({{'cell': 1, 'failed': False, 'exit': {exit}}}).encode()\n"
    source += "fd = max(map(int, os.listdir('/proc/self/fd')[:-1]))\n"
    source += "os.write(fd, len(frame).to_bytes(4, 'little') + frame)"
    result = await sessions.run("a", source)
    assert result.status in ("ok", "crashed") and result.exit_code in (0, 1, -9)
    assert (await sessions.run("b", "1 + 1")).stdout == b"2\n"


@pytest.mark.parametrize("ending", ["os.close(fd)", "os.write(fd, bytes(1_200_000))"])
async def test_cell_that_ends_its_channel_after_its_answer_ends_its_session(
    sessions: Sessions, ending: str
) -> None:
    """Check a padded answer, so that the channel's end is found after the answer."""
    source = f"""
import json, os, sys, time
frame = sys._getframe()
while "fd" not in frame.f_locals or "cell" not in frame.f_locals:
    frame = frame.f_back
fd, token = frame.f_locals["fd"], frame.f_locals["cell"]["token"]
body = json.dumps({{"cell": token, "exit": 0, "pad": "x" * 900_000}}).encode()
body = memoryview(len(body).to_bytes(4, "little") + body)
while body:
    body = body[os.write(fd, body):]
{ending}
time.sleep(60)
"""
    first = await sessions.run("a", source)
    assert first.status in ("ok", "crashed")
    # Much shorter than until a jail counts as stuck.
    async with asyncio.timeout(min(200.0, scaled(40))):
        result = first if first.status == "crashed" else await sessions.run("a", "1")
    # "timeout" if it was stopped between its answer and the bytes behind it
    assert result.status in ("crashed", "timeout") and "starts a new one" in result.error
    assert (await sessions.run("a", "7")).stdout == b"7\n"


async def test_session_can_be_ended_during_a_cell(sessions: Sessions) -> None:
    cell = asyncio.create_task(sessions.run("a", "import time; time.sleep(1)"))
    await asyncio.sleep(0.4)
    sessions.end("a")
    assert (await sessions.run("a", "7")).stdout == b"7\n"
    with contextlib.suppress(JailFailed):
        assert (await cell).status != "ok"
    assert (await sessions.run("a", "_")).stdout == b"7\n"


async def test_sessions_run_concurrently(sessions: Sessions) -> None:
    cells = [sessions.run(name, f"x = {name!r}\nx") for name in "abc"]
    results = await asyncio.gather(*cells)
    assert [result.stdout for result in results] == [b"'a'\n", b"'b'\n", b"'c'\n"]


@pytest.fixture
async def cold_launcher(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    """Yield a launcher whose zygote has not started, so that its first jail takes longer."""
    async with open_launcher(tmp_path / "cold.log", homes=cgroups.find_parents()) as launcher:
        yield launcher


async def wait_for_leftover_jails(launcher: JailLauncher, idle: JailLauncher) -> int:
    """Return how many processes remain beyond an idle launcher's, after time for jails to end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + scaled(10.0)
    while (leftover := count_processes(launcher) - count_processes(idle)) and loop.time() < until:
        await asyncio.sleep(0.01)
    return leftover


def count_processes(launcher: JailLauncher) -> int:
    return len(psutil.Process(launcher.pid).children(recursive=True))


async def test_first_calls_share_one_jail(
    cold_launcher: JailLauncher, launcher: JailLauncher
) -> None:
    sessions = Sessions(cold_launcher, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=600.0)
    cells = [sessions.run("a", f"x{i} = {i}") for i in range(3)]
    assert [result.status for result in await asyncio.gather(*cells)] == ["ok"] * 3
    assert (await sessions.run("a", "x0, x1, x2")).stdout == b"(0, 1, 2)\n"
    assert cold_launcher.started_count == 1
    sessions.close()
    assert await wait_for_leftover_jails(cold_launcher, launcher) == 0


async def test_concurrently_started_sessions_respect_the_limit(cold_launcher: JailLauncher) -> None:
    sessions = Sessions(cold_launcher, SystemClock(), LIMITS, max_sessions=2, idle_timeout_s=600.0)
    results = await asyncio.gather(*(sessions.run(name, "1") for name in "abcd"))
    assert [result.status for result in results] == ["ok", "ok", "refused", "refused"]
    assert sessions.size == cold_launcher.started_count == 2
    sessions.close()


async def test_cancelled_first_call_leaves_the_start_to_waiting_calls(
    cold_launcher: JailLauncher, launcher: JailLauncher
) -> None:
    sessions = Sessions(cold_launcher, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    first = asyncio.create_task(sessions.run("a", "x = 1"))
    second = asyncio.create_task(sessions.run("a", "'x' in globals()"))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).stdout == b"False\n"
    assert first.cancelled() and sessions.size == cold_launcher.started_count == 1
    sessions.close()
    assert await wait_for_leftover_jails(cold_launcher, launcher) == 0


async def test_failed_start_releases_its_slot(cold_launcher: JailLauncher, tmp_path: Path) -> None:
    sessions = Sessions(cold_launcher, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    only_call = asyncio.create_task(sessions.run("a", "1"))
    await asyncio.sleep(0.01)
    assert sessions.size == 1
    only_call.cancel()
    await asyncio.wait([only_call])
    assert sessions.size == 0
    assert (await sessions.run("b", "1 + 1")).stdout == b"2\n"
    sessions.close()

    missing_interpreter = Interpreter("/nonexistent", True, ())
    failing = JailLauncher(
        SystemHost(), SystemClock(), "bwrap", missing_interpreter, None, tmp_path / "f.log"
    )
    sessions = Sessions(failing, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    results = await asyncio.gather(
        *(sessions.run("a", "1") for _ in range(2)), return_exceptions=True
    )
    assert [type(each) for each in results] == [JailFailed] * 2
    assert sessions.size == 0
    await failing.stop()


async def test_session_ended_during_its_start_leaves_no_jail(
    cold_launcher: JailLauncher, launcher: JailLauncher
) -> None:
    sessions = Sessions(cold_launcher, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    starting = asyncio.create_task(sessions.run("a", "1"))
    waiting = asyncio.create_task(sessions.run("a", "2"))
    await asyncio.sleep(0.01)
    sessions.end("a")
    for result in (await starting, await waiting):
        assert result.status == "crashed" and "starts a new one" in result.error
    assert sessions.size == 0 and await wait_for_leftover_jails(cold_launcher, launcher) == 0
    assert (await sessions.run("a", "3")).stdout == b"3\n"
    sessions.close()


async def test_call_queued_behind_a_session_ending_cell_reports_crashed(sessions: Sessions) -> None:
    ending_cell = asyncio.create_task(sessions.run("a", "import os; os._exit(3)"))
    waiting_cell = asyncio.create_task(sessions.run("a", "1"))
    assert (await ending_cell).status == "crashed"
    result = await waiting_cell
    assert result.status == "crashed" and "starts a new one" in result.error
    assert (await sessions.run("a", "7")).stdout == b"7\n"
