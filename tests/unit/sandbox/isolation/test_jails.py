"""A jail runs a program, bounds it, and says by type how it ended; nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed, ProgramResult
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail import interpreters
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import ExitReporter
from tests.descriptors import closed_again, open_descriptors
from tests.load import scaled
from tests.unit.sandbox.launching import SOON_S, ZYGOTE, guests_run, launching, pythons

pytestmark = pytest.mark.needs("bwrap")
MANY = 3000  # descriptors
LIMITS = JailLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=128 * MIB, output_bytes=4096)


async def ran(
    launcher: JailLauncher, source: str, stdin: bytes = b"", limits: JailLimits = LIMITS
) -> ProgramResult:
    return await launcher.run(JailProgram(source), limits, stdin)


async def test_a_program_reads_its_input_and_its_output_comes_back(launcher: JailLauncher) -> None:
    source = "import sys\nprint(sys.stdin.read().upper())\nprint('oh', file=sys.stderr)"
    found = await ran(launcher, source, b"hello")
    assert (found.status, found.exit_code, found.stdout, found.stderr) == (
        "ok",
        0,
        b"HELLO\n",
        b"oh\n",
    )
    assert 0 <= found.cpu_s < 2 and found.wall_s > 0


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("source", "status", "exit"),
    [
        ("raise ValueError('x')", "ok", 1),
        ("import sys\nsys.exit(3)", "ok", 3),
        ("import sys\nsys.exit('why')", "ok", 1),
        ("def f(:\n", "ok", 1),
        ("bytearray(1 << 30)", "out_of_memory", 72),
        ("while True: pass", "timeout", -9),
        ("import time\ntime.sleep(60)", "timeout", -9),
        ("print('x' * 10_000)", "output_limit", None),
        ("import socket\nsocket.socket()", "refused", 77),
        ("open('/usr/x', 'w')", "refused", 77),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed", -11),
    ],
)
async def test_every_end_has_its_type(
    launcher: JailLauncher, source: str, status: str, exit: int | None
) -> None:
    limits = JailLimits(wall_s=1.0, cpu_s=0.5, memory_bytes=128 * MIB, output_bytes=4096)
    found = await ran(launcher, source, limits=limits)
    assert found.status == status
    assert exit is None or found.exit_code == exit
    assert len(found.stdout) + len(found.stderr) <= 4096
    assert (found.error == "") == (status == "ok")


async def test_a_traceback_shows_the_program_and_nothing_of_ours(launcher: JailLauncher) -> None:
    found = await ran(launcher, "def f():\n    return 1 / 0\nf()")
    text = found.stderr.decode()
    assert 'File "main.py", line 2, in f' in text and "return 1 / 0" in text
    assert "guest" not in text and "/run/meshrl" not in text


async def test_a_program_is_a_main_module_with_threads_and_exits(launcher: JailLauncher) -> None:
    source = """
import atexit, threading, dataclasses, multiprocessing, subprocess, sys
@dataclasses.dataclass
class Point:
    x: int
atexit.register(print, "last")
threading.Thread(target=lambda: print("thread")).start()
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
    print(subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True).stdout)
    print(Point(3))
"""
    found = await ran(launcher, source)
    assert found.stderr == b"" and found.status == "ok"
    lines = found.stdout.decode().split("\n")
    assert sorted(lines[:4]) == sorted(["thread", "[1, 2]", "b'5\\n'", "Point(x=3)"])
    assert lines[4:] == ["last", ""]


async def test_a_shell_has_pipes_and_a_scratch_directory(launcher: JailLauncher) -> None:
    program = JailProgram("cd; seq 5 | tail -2 > f; cat f <(echo $((3 * 4)))", "shell")
    found = await launcher.run(program, LIMITS)
    assert (found.status, found.stdout) == ("ok", b"4\n5\n12\n")


async def test_each_call_starts_afresh(launcher: JailLauncher) -> None:
    source = """
import builtins, os, random
print(os.listdir("."), hasattr(builtins, "mark"), os.getpid())
open("left", "w").close()
builtins.mark = True
print(random.random())
"""
    found = await asyncio.gather(*(ran(launcher, source) for _ in range(6)))
    first = {each.stdout.splitlines()[0] for each in found}
    assert first == {b"[] False 2"}
    assert len({each.stdout.splitlines()[1] for each in found}) == 6


async def test_nothing_stays_open_after_many_calls(launcher: JailLauncher) -> None:
    bad = "import os\nif os.fork() == 0:\n    os.setsid()\nwhile True: print(1)"
    await asyncio.gather(*(ran(launcher, bad) for _ in range(4)))
    before = open_descriptors()
    for _ in range(5):
        await asyncio.gather(*(ran(launcher, "print(1)") for _ in range(3)), ran(launcher, bad))
    await closed_again(before)


def groups_of(launcher: JailLauncher) -> int:
    """How many control groups the launchers of this process have."""
    homes = cgroups.find_parents()
    assert homes is not None
    return len(list(homes.memory.glob(f"{cgroups.PREFIX}{os.getpid()}-*")))


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.needs("cgroups")
async def test_a_start_without_descriptors_keeps_none_and_no_group(launcher: JailLauncher) -> None:
    assert (await ran(launcher, "print(1)")).stdout == b"1\n"
    before, groups, failed = open_descriptors(), groups_of(launcher), 0
    users = len(launcher.resource_pool.free_user_indices)
    for count in range(12):
        with descriptors_left(count):
            try:
                await ran(launcher, "print(1)")
            except JailFailed as error:
                assert "Too many open files" in str(error)
                failed += 1
    assert failed >= 5, "a start takes more"
    assert (await ran(launcher, "print(2)")).stdout == b"2\n"
    await closed_again(before)
    assert (groups_of(launcher), len(launcher.resource_pool.free_user_indices)) == (groups, users)


@pytest.mark.needs("cgroups")
async def test_a_group_is_not_given_on_while_a_start_that_was_given_up_may_yet_take_it(
    launcher: JailLauncher,
) -> None:
    await ran(launcher, "print(1)")
    groups, started = groups_of(launcher), launcher.started_count
    os.kill(launcher.zygote_pid, signal.SIGSTOP)
    try:
        given_up = asyncio.create_task(ran(launcher, "print(1)"))
        while launcher.started_count == started:
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        second = asyncio.create_task(ran(launcher, "print(2)"))
        while launcher.started_count == started + 1:
            await asyncio.sleep(0)
        assert groups_of(launcher) == groups + 1, "the other is still the first one's"
    finally:
        os.kill(launcher.zygote_pid, signal.SIGCONT)
    assert (await second).stdout == b"2\n"
    found = await asyncio.gather(*(ran(launcher, f"print({n})") for n in range(2)))
    assert [each.stdout for each in found] == [b"0\n", b"1\n"]
    assert groups_of(launcher) == groups + 1, "both are given again"


async def test_when_the_zygote_is_killed_another_takes_its_place(launcher: JailLauncher) -> None:
    assert (await ran(launcher, "print(1)")).status == "ok"
    before = launcher.pid
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(scaled(60)):
        while True:
            with contextlib.suppress(JailFailed):  # of a call that the dying one still took
                found = await ran(launcher, "print(2)")
                if launcher.pid != before:
                    break
    assert (found.status, found.stdout) == ("ok", b"2\n")


async def test_a_call_that_is_given_up_leaves_no_process(launcher: JailLauncher) -> None:
    call = asyncio.create_task(ran(launcher, "import time\ntime.sleep(60)"))
    await guests_run(launcher)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(scaled(SOON_S)):
        while len(pythons(launcher)) > ZYGOTE:
            await asyncio.sleep(0.005)


async def test_a_guest_that_cannot_be_set_up_is_ours_to_answer_for(launcher: JailLauncher) -> None:
    limits = JailLimits(open_files=1 << 30)
    with pytest.raises(JailFailed, match="could not be set up"):
        await ran(launcher, "print(1)", limits=limits)


async def test_a_report_with_another_nonce_is_no_report(launcher: JailLauncher) -> None:
    jail = await launcher.open(JailProgram("print(1)"), LIMITS)
    jail.nonce = "0" * 32
    with pytest.raises(BadMessage, match="nonce"):
        await jail.receive_report(scaled(10))
    jail.close()


@pytest.mark.deep
async def test_a_busy_host_makes_no_program_late(launcher: JailLauncher) -> None:
    """Eight at once on few cores take far longer than their limit by the clock."""
    limits = JailLimits(wall_s=0.6, cpu_s=5.0, memory_bytes=128 * MIB)
    source = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
    found = await asyncio.gather(*(ran(launcher, source, limits=limits) for _ in range(8)))
    assert [(each.status, each.stdout) for each in found] == [("ok", b"done\n")] * 8


async def test_a_lagging_event_loop_makes_no_right_answer_late(launcher: JailLauncher) -> None:
    limits = JailLimits(wall_s=0.5, cpu_s=0.5, memory_bytes=128 * MIB)
    call = asyncio.create_task(ran(launcher, "print('in time')", limits=limits))
    await asyncio.sleep(0.05)
    time.sleep(1.5)  # noqa: ASYNC251  what is tested: the loop does nothing for three limits
    found = await call
    assert (found.status, found.stdout) == ("ok", b"in time\n")


async def test_another_interpreter_brings_its_packages(tmp_path: Path) -> None:
    base = Interpreter.default()
    real = Path(base.python).resolve()  # noqa: ASYNC240
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "brought.py").write_text("VALUE = 17\n")
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    (tmp_path / "venv" / "bin").mkdir()
    python = tmp_path / "venv" / "bin" / "python"
    python.symlink_to(real)
    places = (*base.directories, str(tmp_path / "venv"))
    interpreter = Interpreter(str(python), False, places, ("brought",))
    async with launching(tmp_path / "log", interpreter=interpreter) as launcher:
        found = await ran(launcher, "import brought\nprint(brought.VALUE)")
    assert (found.status, found.stdout) == ("ok", b"17\n"), found.stderr


def test_an_interpreter_below_what_else_is_shown_is_not_hidden_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "LINKS", (str(tmp_path),))
    place = str(tmp_path / "python")
    binds = list(interpreters.list_root_content(Interpreter(place, False, (place,))).binds)
    assert binds.index(str(tmp_path)) < binds.index(place)


async def test_launchers_share_no_control_group(launcher: JailLauncher, tmp_path: Path) -> None:
    homes, log = cgroups.find_parents(), tmp_path / "other.log"
    other = JailLauncher(SystemHost(), SystemClock(), "bwrap", Interpreter.default(), homes, log)
    assert (await ran(launcher, "print(1)")).stdout == b"1\n"
    assert (await ran(other, "print(2)")).stdout == b"2\n"
    await other.stop()  # with the groups that it has made
    assert (await ran(launcher, "print(3)")).stdout == b"3\n"


async def test_a_program_is_handed_nothing_but_its_three_streams(launcher: JailLauncher) -> None:
    found = await ran(launcher, "import os\nprint(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert found.stdout == b"[0, 1, 2, 3]\n"  # the last is of the listing itself


async def test_nor_is_it_by_a_sandbox_that_has_thousands_open(tmp_path: Path) -> None:
    """Whose zygote's control socket has a number as high."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 200), hard))
    async with launching() as launcher:
        with contextlib.ExitStack() as opened:
            opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(MANY):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            await launcher.start()
        await test_a_program_is_handed_nothing_but_its_three_streams(launcher)


async def test_a_jail_that_somebody_kills_is_ours_to_answer_for(launcher: JailLauncher) -> None:
    call = asyncio.create_task(ran(launcher, "import time\ntime.sleep(60)"))
    await guests_run(launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    with pytest.raises(JailFailed, match="without a report"):
        await call


async def test_a_stopped_zygote_is_replaced_and_its_calls_are_answered(tmp_path: Path) -> None:
    class Heard(ExitReporter):
        def record_exit(
            self, name: str, code: int, why: str, log: Path | None, job: str = ""
        ) -> None:
            heard.append(f"{name}: {why}")

    heard: list[str] = []
    waits, host = WaitTable(SystemClock()), SystemHost()
    launcher = JailLauncher(
        host, SystemClock(), "bwrap", Interpreter.default(), None, None, waits, Heard()
    )
    await launcher.start()
    try:
        before = await launcher.open(JailProgram("input(); print(1)"), LIMITS)
        stopped = launcher.zygote_pid
        os.kill(stopped, signal.SIGSTOP)
        calls = [asyncio.create_task(ran(launcher, f"print({n})")) for n in range(3)]
        named = f"the zygote (pid {stopped})"
        async with asyncio.timeout(scaled(SOON_S)):
            while named not in {wait["on"] for wait in waits.list_longest([])}:
                await asyncio.sleep(0.01)
            found = await asyncio.gather(*calls)
        assert [each.stdout for each in found] == [b"0\n", b"1\n", b"2\n"]
        assert launcher.zygote_pid not in (0, stopped)
        assert heard == [f"zygote: it was killed: somebody has stopped it (pid {stopped})"]
        assert (await before.finish()).status == "ok", "what it had begun ends as it would have"
        async with asyncio.timeout(scaled(SOON_S)):
            while read_start_time(stopped):
                await asyncio.sleep(0.01)
    finally:
        await launcher.stop()


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "tests",
    [
        {"function": "f", "cases": [{"args": [1], "output": 1}]},
        "from solution import f\ndef test_f():\n    assert f(1) == 1",
        [{"input": "", "output": "1"}],
    ],
    ids=["calls", "python", "stdin"],
)
async def test_a_killed_zygote_makes_no_answer_wrong(launcher: JailLauncher, tests: object) -> None:
    limits = JailLimits(wall_s=900.0, cpu_s=20.0, memory_bytes=128 * MIB)
    grading = CodeGrader(launcher, JailSlots(SystemClock(), 2), limits, {"case_s": 900.0})
    source = "import time\ntime.sleep({})\nprint(1)\ndef f(x): return x"
    row = {"tests": tests}

    def answered(after_s: int) -> list[dict[str, str]]:
        return [{"role": "model", "text": source.format(after_s)}]

    graded = asyncio.create_task(grading.compute_reward(row, answered(600)))
    await guests_run(launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    answer = await graded
    assert (answer.status, answer.value) == ("crashed", None)
    assert (await grading.compute_reward(row, answered(0))).value == 1.0


async def test_no_two_jails_draw_the_same_random_numbers(launcher: JailLauncher) -> None:
    source = (
        "import os, random, sys\nprint(random.random(), flush=True)\n"
        "if os.fork() == 0:\n    print(random.random(), flush=True)\n    os._exit(0)\nos.wait()"
    )
    ran = [await launcher.run(JailProgram(source), LIMITS) for _ in range(3)]
    drawn = [number for one in ran for number in one.stdout.split()]
    assert len(set(drawn)) == len(drawn) == 6
