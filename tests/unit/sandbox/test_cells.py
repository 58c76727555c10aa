"""Sessions keep what their cells made, apart from each other, and their end is told by type."""

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
from tests.unit.sandbox.launching import launching

pytestmark = pytest.mark.needs("bwrap")
LIMITS = JailLimits(wall_s=20.0, cpu_s=1.0, memory_bytes=128 * MIB, output_bytes=4096)


@pytest.fixture
async def sessions(launcher: JailLauncher) -> AsyncIterator[Sessions]:
    made = Sessions(launcher, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=600.0)
    yield made
    made.close()


async def test_variables_functions_and_imports_stay(sessions: Sessions) -> None:
    assert (
        await sessions.run("a", "import math\ndef f(x):\n    return x * k\nk = 3")
    ).stdout == b""
    ran = await sessions.run("a", "f(math.floor(7.9))")
    assert (ran.status, ran.stdout) == ("ok", b"21\n")
    assert (await sessions.run("a", "_ + 1")).stdout == b"22\n"


async def test_an_error_is_shown_and_the_session_goes_on(sessions: Sessions) -> None:
    await sessions.run("a", "x = 5")
    failed = await sessions.run("a", "x = 6\n1 / 0")
    assert failed.status == "ok" and b"ZeroDivisionError" in failed.stderr
    assert b'"cell 2", line 2' in failed.stderr
    assert (await sessions.run("a", "x")).stdout == b"6\n"


async def test_a_fork_that_leaves_its_cell_answers_nothing(sessions: Sessions) -> None:
    falls = "import os\nchild = os.fork()\nif not child:\n    raise ValueError('of the child')\n"
    ran = await sessions.run("a", falls + "os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])")
    assert (ran.status, ran.stdout) == ("ok", b"1\n") and b"of the child" in ran.stderr
    assert (await sessions.run("a", "child > 0")).stdout == b"True\n"


@pytest.mark.rotating(3)
async def test_a_cell_that_takes_too_long_ends_its_session_and_says_so(sessions: Sessions) -> None:
    await sessions.run("a", "x = 5")
    late = await sessions.run("a", "print('begun')\nwhile True: pass")
    assert (late.status, late.stdout) == ("timeout", b"begun\n")
    assert "over 1 s of CPU time" in late.error and "begins a new one" in late.error
    assert (await sessions.run("a", "'x' in globals()")).stdout == b"False\n"


async def test_time_between_cells_does_not_count(launcher: JailLauncher) -> None:
    limits = replace(LIMITS, wall_s=2.0, cpu_s=1.0)
    sessions = Sessions(launcher, SystemClock(), limits, max_sessions=3, idle_timeout_s=600.0)
    await sessions.run("a", "x = 1")
    await asyncio.sleep(2.3)
    assert (await sessions.run("a", "x")).stdout == b"1\n"
    sessions.close()


@pytest.mark.rotating(3)
async def test_limits_are_of_each_cell(launcher: JailLauncher) -> None:
    limits = replace(LIMITS, cpu_s=0.4)
    sessions = Sessions(launcher, SystemClock(), limits, max_sessions=3, idle_timeout_s=600.0)
    spun = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    for _ in range(6):  # together far over the limit of one
        ran = await sessions.run("a", "print('x' * 3000)")
        assert (ran.status, len(ran.stdout)) == ("ok", 3001)
        assert (await sessions.run("a", spun)).status == "ok"
    assert (await sessions.run("a", "print('x' * 5000)")).status == "output_limit"
    sessions.close()


async def test_what_a_cell_is_refused_has_a_type_and_the_session_stays(sessions: Sessions) -> None:
    await sessions.run("a", "x = 1")
    assert (await sessions.run("a", "bytearray(1 << 30)")).status == "out_of_memory"
    assert (await sessions.run("a", "import socket; socket.socket()")).status == "refused"
    assert (await sessions.run("a", "x")).stdout == b"1\n"


async def test_the_session_unused_for_longest_makes_room_and_is_told(sessions: Sessions) -> None:
    for name in "abc":
        await sessions.run(name, f"x = {name!r}")
    await sessions.run("a", "x")
    assert (await sessions.run("d", "1")).stdout == b"1\n"
    assert sessions.size == 3
    told = await sessions.run("b", "x")
    assert told.status == "evicted" and "unused for longest" in told.error
    assert told.stdout == b""
    assert b"NameError" in (await sessions.run("b", "x")).stderr
    assert (await sessions.run("a", "x")).stdout == b"'a'\n"


async def test_an_idle_session_is_ended_and_its_next_call_told(launcher: JailLauncher) -> None:
    sessions = Sessions(launcher, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=0.2)
    await sessions.run("a", "x = 1")
    await asyncio.sleep(0.3)
    sessions.evict_idle()
    assert sessions.size == 0
    assert (await sessions.run("a", "x")).status == "evicted"
    sessions.close()


async def test_a_session_of_a_paused_job_is_not_idle(launcher: JailLauncher) -> None:
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


async def test_a_session_that_was_ended_is_forgotten(sessions: Sessions) -> None:
    await sessions.run("a", "x = 1")
    sessions.end("a")
    assert sessions.size == 0
    assert (await sessions.run("a", "'x' in globals()")).stdout == b"False\n"


@pytest.mark.rotating(3)
@pytest.mark.parametrize("exit", ["[]", "10**30", "'0'", "None"])
async def test_an_end_of_a_cell_by_the_model_harms_nobody(sessions: Sessions, exit: str) -> None:
    source = "import json, os\n"
    source += f"frame = json.dumps({{'cell': 1, 'failed': False, 'exit': {exit}}}).encode()\n"
    source += "fd = max(map(int, os.listdir('/proc/self/fd')[:-1]))\n"
    source += "os.write(fd, len(frame).to_bytes(4, 'little') + frame)"
    ran = await sessions.run("a", source)
    assert ran.status in ("ok", "crashed") and ran.exit_code in (0, 1, -9)
    assert (await sessions.run("b", "1 + 1")).stdout == b"2\n"


@pytest.mark.parametrize("behind", ["os.close(fd)", "os.write(fd, bytes(1_200_000))"])
async def test_a_cell_that_ends_its_channel_behind_its_answer_ends_its_session(
    sessions: Sessions, behind: str
) -> None:
    """The answer is padded: its end, and what comes behind it, are seen once it was taken."""
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
{behind}
time.sleep(60)
"""
    first = await sessions.run("a", source)
    assert first.status in ("ok", "crashed")
    # Far less than until a jail counts as stuck.
    async with asyncio.timeout(min(200.0, scaled(40))):
        told = first if first.status == "crashed" else await sessions.run("a", "1")
    # "timeout", should it have been stopped between its answer and what is behind it
    assert told.status in ("crashed", "timeout") and "begins a new one" in told.error
    assert (await sessions.run("a", "7")).stdout == b"7\n"


async def test_a_session_that_is_closed_in_mid_cell_is_told_by_type(sessions: Sessions) -> None:
    cell = asyncio.create_task(sessions.run("a", "import time; time.sleep(1)"))
    await asyncio.sleep(0.4)
    sessions.end("a")
    assert (await sessions.run("a", "7")).stdout == b"7\n"
    with contextlib.suppress(JailFailed):
        assert (await cell).status != "ok"
    assert (await sessions.run("a", "_")).stdout == b"7\n"


async def test_sessions_run_beside_each_other(sessions: Sessions) -> None:
    cells = [sessions.run(name, f"x = {name!r}\nx") for name in "abc"]
    found = await asyncio.gather(*cells)
    assert [ran.stdout for ran in found] == [b"'a'\n", b"'b'\n", b"'c'\n"]


@pytest.fixture
async def cold(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    """A launcher whose zygote has yet to start: its first jail takes a while."""
    async with launching(tmp_path / "cold.log", homes=cgroups.find_parents()) as made:
        yield made


async def jails_left(launcher: JailLauncher, idle: JailLauncher) -> int:
    """How many processes it has beyond those of an idle one, once jails have had time to end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + scaled(10.0)
    while (left := processes(launcher) - processes(idle)) and loop.time() < until:
        await asyncio.sleep(0.01)
    return left


def processes(launcher: JailLauncher) -> int:
    return len(psutil.Process(launcher.pid).children(recursive=True))


async def test_first_calls_share_one_jail(cold: JailLauncher, launcher: JailLauncher) -> None:
    sessions = Sessions(cold, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=600.0)
    cells = [sessions.run("a", f"x{i} = {i}") for i in range(3)]
    assert [ran.status for ran in await asyncio.gather(*cells)] == ["ok"] * 3
    assert (await sessions.run("a", "x0, x1, x2")).stdout == b"(0, 1, 2)\n"
    assert cold.started_count == 1
    sessions.close()
    assert await jails_left(cold, launcher) == 0


async def test_sessions_that_begin_at_once_take_no_more_than_all_places(cold: JailLauncher) -> None:
    sessions = Sessions(cold, SystemClock(), LIMITS, max_sessions=2, idle_timeout_s=600.0)
    found = await asyncio.gather(*(sessions.run(name, "1") for name in "abcd"))
    assert [ran.status for ran in found] == ["ok", "ok", "refused", "refused"]
    assert sessions.size == cold.started_count == 2
    sessions.close()


async def test_a_first_call_that_is_cancelled_leaves_the_start_to_those_that_wait(
    cold: JailLauncher, launcher: JailLauncher
) -> None:
    sessions = Sessions(cold, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    first = asyncio.create_task(sessions.run("a", "x = 1"))
    second = asyncio.create_task(sessions.run("a", "'x' in globals()"))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).stdout == b"False\n"
    assert first.cancelled() and sessions.size == cold.started_count == 1
    sessions.close()
    assert await jails_left(cold, launcher) == 0


async def test_a_failed_start_leaves_no_place_taken(cold: JailLauncher, tmp_path: Path) -> None:
    sessions = Sessions(cold, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    only = asyncio.create_task(sessions.run("a", "1"))
    await asyncio.sleep(0.01)
    assert sessions.size == 1
    only.cancel()
    await asyncio.wait([only])
    assert sessions.size == 0
    assert (await sessions.run("b", "1 + 1")).stdout == b"2\n"
    sessions.close()

    nothing = Interpreter("/nonexistent", True, ())
    failing = JailLauncher(SystemHost(), SystemClock(), "bwrap", nothing, None, tmp_path / "f.log")
    sessions = Sessions(failing, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    found = await asyncio.gather(
        *(sessions.run("a", "1") for _ in range(2)), return_exceptions=True
    )
    assert [type(each) for each in found] == [JailFailed] * 2
    assert sessions.size == 0
    await failing.stop()


async def test_a_session_that_is_ended_while_it_starts_leaves_no_jail(
    cold: JailLauncher, launcher: JailLauncher
) -> None:
    sessions = Sessions(cold, SystemClock(), LIMITS, max_sessions=1, idle_timeout_s=600.0)
    starting = asyncio.create_task(sessions.run("a", "1"))
    waiting = asyncio.create_task(sessions.run("a", "2"))
    await asyncio.sleep(0.01)
    sessions.end("a")
    for told in (await starting, await waiting):
        assert told.status == "crashed" and "begins a new one" in told.error
    assert sessions.size == 0 and await jails_left(cold, launcher) == 0
    assert (await sessions.run("a", "3")).stdout == b"3\n"
    sessions.close()


async def test_a_call_behind_a_cell_that_ends_the_session_is_told(sessions: Sessions) -> None:
    ends = asyncio.create_task(sessions.run("a", "import os; os._exit(3)"))
    waits = asyncio.create_task(sessions.run("a", "1"))
    assert (await ends).status == "crashed"
    told = await waits
    assert told.status == "crashed" and "begins a new one" in told.error
    assert (await sessions.run("a", "7")).stdout == b"7\n"
