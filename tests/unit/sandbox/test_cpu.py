"""CPU time of a jail is counted from outside, all of it, and nobody computes between two calls."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import ProgramResult
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.jail.confinement import landlock
from meshrl.services.sandbox.jail.metering import watch
from meshrl.services.sandbox.sessions import Sessions
from tests.load import scaled
from tests.unit.sandbox.launching import SOON_S, ZYGOTE, launching, pythons

pytestmark = [
    pytest.mark.needs("bwrap"),
    # One's guests that go before all others would put off another's keeper on the same core.
    pytest.mark.group("one core"),
]
LIMITS = JailLimits(wall_s=8.0, cpu_s=1.0, memory_bytes=128 * MIB, output_bytes=4096, processes=128)
WATCHED_S = 0.5  # in which one that spins uses most of a core
STOPS_S = 5.0  # until one that is told to stand still does
STILL_S = 0.15  # CPU time in it, of who stands still: ticks, and the keeper's looks
THIS, ROOT = Path(__file__), Path(__file__).parents[3]
TIERS = ("cgroup", "bwrap", "landlock")


@pytest.fixture(params=TIERS)
async def tiered(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JailLauncher]:
    """A launcher of each tier that this host has."""
    homes = cgroups.find_parents() if request.param == "cgroup" else None
    if request.param == "cgroup" and homes is None:
        pytest.skip("no control groups")
    if request.param == "landlock":
        if landlock.read_abi() < landlock.TIER_MIN_ABI:
            pytest.skip("no Landlock")
        if os.getuid() == 0:
            pytest.skip("run as a plain user by the last test of this file")
    tier = "landlock" if request.param == "landlock" else "bwrap"
    async with launching(tmp_path / "log", tier=tier, homes=homes) as made:
        await made.start()
        yield made


@pytest.fixture
async def sessions(tiered: JailLauncher) -> AsyncIterator[Sessions]:
    made = Sessions(tiered, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=600.0)
    yield made
    made.close()


def used_s(launcher: JailLauncher) -> float:
    """CPU time of the processes in its outer jail."""
    total = 0.0
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def used_meanwhile(launcher: JailLauncher) -> float:
    before = used_s(launcher)
    await asyncio.sleep(min(5.0, scaled(WATCHED_S)))
    return used_s(launcher) - before


async def stands_still(launcher: JailLauncher) -> None:
    """Return once its processes use no CPU time, as their keeper may need a while to stop them."""
    async with asyncio.timeout(scaled(STOPS_S)):
        while await used_meanwhile(launcher) >= STILL_S:
            pass


LEAVES_SPINNERS = """
import os, threading
def spin():
    while not done: pass
done = []
if os.fork() == 0:
    spin()
thread = threading.Thread(target=spin)
thread.start()
"""


async def test_nobody_computes_between_two_cells(tiered: JailLauncher, sessions: Sessions) -> None:
    assert (await sessions.run("a", LEAVES_SPINNERS)).status == "ok"
    await stands_still(tiered)
    assert (await sessions.run("a", "done.append(1); thread.join(); 'joined'")).stdout == (
        b"'joined'\n"
    )
    await stands_still(tiered)


# A program of a session that knows where its interpreter answers, and what it has been told.
ANSWERS = """
import json, os, sys
def answer(**changes):
    cell = sys._getframe(1)
    while "cell" not in cell.f_locals or "fd" not in cell.f_locals:
        cell = cell.f_back
    told, fd = cell.f_locals["cell"], cell.f_locals["fd"]
    said = {"cell": told.get("token", told["number"]), "exit": 0, **changes}
    frame = json.dumps(said).encode()
    os.write(fd, len(frame).to_bytes(4, "little") + frame)
"""


async def test_an_early_answer_stops_a_cell(tiered: JailLauncher, sessions: Sessions) -> None:
    await sessions.run("a", ANSWERS)
    early = await sessions.run("a", "answer()\nwhile True: pass")
    assert early.status == "ok"
    await stands_still(tiered)


async def test_an_answer_that_comes_before_its_cell_ends_the_session(sessions: Sessions) -> None:
    await sessions.run("a", ANSWERS)
    await sessions.run("a", "answer()\nanswer(cell=3)")
    told = await sessions.run("a", "while True: pass")
    assert told.status == "crashed" and "where the interpreter answers" in told.error
    assert (await sessions.run("a", "1 + 1")).stdout == b"2\n"


async def test_an_answer_to_another_cell_ends_the_session(sessions: Sessions) -> None:
    await sessions.run("a", ANSWERS)
    told = await sessions.run("a", "answer(cell='0' * 16)\nwhile True: pass")
    assert told.status == "crashed" and "where the interpreter answers" in told.error


IN_CHILDREN = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        while True: pass
time.sleep(60)
"""

# Each is over before anybody looks twice, and nobody waits for it.
IN_THEIR_CHILDREN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    while True:
        if os.fork() == 0:
            end = time.process_time() + 0.05
            while time.process_time() < end: pass
            os._exit(0)
        time.sleep(0.02)
time.sleep(60)
"""


# The same by pairs, each of which is over long before the next look.
IN_SHORT_PAIRS = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    for _ in range(2):
        if os.fork() == 0:
            end = time.process_time() + 0.004
            while time.process_time() < end: pass
            os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


async def ran(launcher: JailLauncher, source: str, limits: JailLimits = LIMITS) -> ProgramResult:
    return await launcher.run(JailProgram(source), limits)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "source",
    [IN_CHILDREN, IN_THEIR_CHILDREN, IN_SHORT_PAIRS],
    ids=["live", "gone", "pairs"],
)
async def test_the_limit_is_of_all_processes_together(tiered: JailLauncher, source: str) -> None:
    limits = JailLimits(wall_s=120.0, cpu_s=0.5, memory_bytes=128 * MIB)
    found = await asyncio.wait_for(ran(tiered, source, limits), scaled(60))
    assert (found.status, "of CPU time" in found.error) == ("timeout", True)
    # Without groups it is counted at looks of a keeper that competes with its guest.
    late_s = 1.0 if tiered.tier != "landlock" else 2.0
    assert 0.45 <= found.cpu_s <= 2 * limits.cpu_s + late_s


def test_what_a_virtual_machine_was_robbed_of_is_a_core_s_mean() -> None:
    """64 cores that each lack 2 % of their time lack more than a core together, but none lacks
    more than 2 %: a sleeping program is not excused for as long as it sleeps.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    line = b"cpu  1 2 3 4 5 6 7 %d 0 0\n" % (64 * ticks)
    assert watch.parse_steal_s(line, 64) == pytest.approx(1.0)


async def test_what_a_program_and_its_children_used_is_reported(launcher: JailLauncher) -> None:
    source = """
import subprocess, sys
spin = "import time\\nwhile time.process_time() < 0.2: pass"
subprocess.run([sys.executable, "-c", spin])
"""
    found = await ran(launcher, source)
    assert found.status == "ok" and 0.2 <= found.cpu_s < 1.0


@pytest.fixture
def on_one_core() -> Iterator[None]:
    """This process, and what it starts, on one core; before what else runs there, if it may."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    with before_others():
        yield
    os.sched_setaffinity(0, before)


@contextmanager
def before_others() -> Iterator[None]:
    """This process and what it starts alike go before other tests: how a keeper fares beside its
    own guests is asked, and not how it fares beside another test.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, AHEAD)
    yield
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


AHEAD = -10  # niceness
SPINNERS = """
import os
for _ in range(100):
    if os.fork() == 0:
        try:
            os.setsid()  # a share of its own, where the kernel groups tasks by session
        except OSError:
            pass
        while True: pass
while True: pass
"""


@pytest.mark.rotating(3)
async def test_a_hundred_that_spin_on_one_core_do_not_put_off_their_end(
    on_one_core: None, tiered: JailLauncher
) -> None:
    limits = JailLimits(wall_s=200.0, cpu_s=1.0, memory_bytes=256 * MIB, processes=128)
    found = await ran(tiered, SPINNERS, limits)
    assert found.status == "timeout"
    assert found.cpu_s <= 2 * limits.cpu_s + 1
    assert found.wall_s < 90, "it was 100 s where only the first process counted"


@pytest.mark.rotating(3)
async def test_waiting_for_its_own_excuses_no_jail(on_one_core: None, tiered: JailLauncher) -> None:
    """Eight on one core wait for it seven eighths of the time, while others of the jail run."""
    source = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    limits = JailLimits(wall_s=0.5, cpu_s=60.0, memory_bytes=256 * MIB)
    found = await ran(tiered, source, limits)
    assert (found.status, "of wall clock time" in found.error) == ("timeout", True)
    assert found.cpu_s <= 2 * limits.wall_s + 1


CONTINUES_ITSELF = """
import ctypes, signal, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
timer, often = ctypes.c_void_p(), 300_000_000
signal.signal(signal.SIGCONT, lambda *_: None)
event = struct.pack("QII48x", 0, signal.SIGCONT, 0)
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, struct.pack("QQQQ", 0, often, 0, often), None) == 0
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""


async def test_a_session_that_lets_a_timer_continue_it_is_ended(tmp_path: Path) -> None:
    async with launching(tmp_path / "log") as launcher:
        sessions = Sessions(launcher, SystemClock(), LIMITS, max_sessions=3, idle_timeout_s=600.0)
        try:
            assert (await sessions.run("a", CONTINUES_ITSELF)).status == "ok"
            async with asyncio.timeout(scaled(SOON_S)):
                while len(pythons(launcher)) > ZYGOTE:
                    await asyncio.sleep(0.02)
            assert (await sessions.run("a", "1")).status == "timeout"
        finally:
            sessions.close()


@pytest.mark.deep
@pytest.mark.needs("root")
@pytest.mark.needs("landlock")
@pytest.mark.timeout(300)
def test_it_holds_for_a_plain_user_without_namespaces() -> None:
    """Which is where Landlock is used: root's own files are out of reach of what root starts."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        plain = [sys.executable, "-m", "tests.unit.sandbox.plain_user", sys.executable, "-m"]
        pytest_ = ["pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-k", "landlock"]
        pytest_ += ["--tier", "deep"]
        command = [*plain, *pytest_, "--basetemp", f"{directory}/base", str(THIS)]
        with before_others():
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(280)
            )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "9 passed" in done.stdout and "skipped" not in done.stdout
