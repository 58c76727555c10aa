"""Jails: programs, limits, typed ends and complete cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
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
from meshrl.services.sandbox.isolation.outer_jail import launcher as outer_jail
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import ExitReporter
from tests.descriptors import await_closed, list_descriptors
from tests.load import scaled
from tests.unit.sandbox.launching import (
    SOON_S,
    ZYGOTE,
    list_pythons,
    open_launcher,
    wait_for_guests,
)

pytestmark = pytest.mark.needs("bwrap")
DESCRIPTOR_COUNT = 3000
LIMITS = JailLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=128 * MIB, output_bytes=4096)


async def run_program(
    launcher: JailLauncher, source: str, stdin: bytes = b"", limits: JailLimits = LIMITS
) -> ProgramResult:
    return await launcher.run(JailProgram(source), limits, stdin)


async def test_program_reads_input_and_returns_output(launcher: JailLauncher) -> None:
    source = "import sys\nprint(sys.stdin.read().upper())\nprint('oh', file=sys.stderr)"
    result = await run_program(launcher, source, b"hello")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (
        "ok",
        0,
        b"HELLO\n",
        b"oh\n",
    )
    assert 0 <= result.cpu_s < 2 and result.wall_s > 0


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
async def test_every_program_end_has_a_typed_status(
    launcher: JailLauncher, source: str, status: str, exit: int | None
) -> None:
    limits = JailLimits(wall_s=1.0, cpu_s=0.5, memory_bytes=128 * MIB, output_bytes=4096)
    result = await run_program(launcher, source, limits=limits)
    assert result.status == status
    assert exit is None or result.exit_code == exit
    assert len(result.stdout) + len(result.stderr) <= 4096
    assert (result.error == "") == (status == "ok")


async def test_traceback_shows_only_the_program(launcher: JailLauncher) -> None:
    result = await run_program(launcher, "def f():\n    return 1 / 0\nf()")
    text = result.stderr.decode()
    assert 'File "main.py", line 2, in f' in text and "return 1 / 0" in text
    assert "guest" not in text and "/run/meshrl" not in text


async def test_program_runs_as_main_module_with_threads_and_exit_functions(
    launcher: JailLauncher,
) -> None:
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
    result = await run_program(launcher, source)
    assert result.stderr == b"" and result.status == "ok"
    lines = result.stdout.decode().split("\n")
    assert sorted(lines[:4]) == sorted(["thread", "[1, 2]", "b'5\\n'", "Point(x=3)"])
    assert lines[4:] == ["last", ""]


async def test_shell_has_pipes_and_a_scratch_directory(launcher: JailLauncher) -> None:
    program = JailProgram("cd; seq 5 | tail -2 > f; cat f <(echo $((3 * 4)))", "shell")
    result = await launcher.run(program, LIMITS)
    assert (result.status, result.stdout) == ("ok", b"4\n5\n12\n")


async def test_each_call_starts_with_a_fresh_state(launcher: JailLauncher) -> None:
    source = """
import builtins, os, random
print(os.listdir("."), hasattr(builtins, "mark"), os.getpid())
open("left", "w").close()
builtins.mark = True
print(random.random())
"""
    results = await asyncio.gather(*(run_program(launcher, source) for _ in range(6)))
    first = {result.stdout.splitlines()[0] for result in results}
    assert first == {b"[] False 2"}
    assert len({result.stdout.splitlines()[1] for result in results}) == 6


async def test_many_calls_leak_no_descriptors(launcher: JailLauncher) -> None:
    forking_program = "import os\nif os.fork() == 0:\n    os.setsid()\nwhile True: print(1)"
    await asyncio.gather(*(run_program(launcher, forking_program) for _ in range(4)))
    before = list_descriptors()
    for _ in range(5):
        await asyncio.gather(
            *(run_program(launcher, "print(1)") for _ in range(3)),
            run_program(launcher, forking_program),
        )
    await await_closed(before)


def count_groups(launcher: JailLauncher) -> int:
    """Return how many control groups the launchers of this process have."""
    homes = cgroups.find_parents()
    assert homes is not None
    return len(list(homes.memory.glob(f"{cgroups.PREFIX}{os.getpid()}-*")))


@contextlib.contextmanager
def limit_free_descriptors(count: int) -> Iterator[None]:
    """Limit the descriptors that this process may still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors[0] + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                descriptors.append(os.dup(descriptors[0]))
        for _ in range(count):
            os.close(descriptors.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in descriptors:
            os.close(fd)


@pytest.mark.needs("cgroups")
async def test_failed_start_without_descriptors_leaks_nothing(launcher: JailLauncher) -> None:
    assert (await run_program(launcher, "print(1)")).stdout == b"1\n"
    before, groups, failed = list_descriptors(), count_groups(launcher), 0
    users = len(launcher.resource_pool.free_user_indices)
    for count in range(12):
        with limit_free_descriptors(count):
            try:
                await run_program(launcher, "print(1)")
            except JailFailed as error:
                assert "Too many open files" in str(error)
                failed += 1
    assert failed >= 5, "a start takes more"
    assert (await run_program(launcher, "print(2)")).stdout == b"2\n"
    await await_closed(before)
    assert (count_groups(launcher), len(launcher.resource_pool.free_user_indices)) == (
        groups,
        users,
    )


@pytest.mark.needs("cgroups")
async def test_group_of_a_cancelled_start_is_not_reused_while_in_use(
    launcher: JailLauncher,
) -> None:
    await run_program(launcher, "print(1)")
    groups, started = count_groups(launcher), launcher.started_count
    os.kill(launcher.zygote_pid, signal.SIGSTOP)
    try:
        cancelled = asyncio.create_task(run_program(launcher, "print(1)"))
        while launcher.started_count == started:
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        second = asyncio.create_task(run_program(launcher, "print(2)"))
        while launcher.started_count == started + 1:
            await asyncio.sleep(0)
        assert count_groups(launcher) == groups + 1, "the other is still the first one's"
    finally:
        os.kill(launcher.zygote_pid, signal.SIGCONT)
    assert (await second).stdout == b"2\n"
    results = await asyncio.gather(*(run_program(launcher, f"print({n})") for n in range(2)))
    assert [result.stdout for result in results] == [b"0\n", b"1\n"]
    assert count_groups(launcher) == groups + 1, "both are given again"


async def test_killed_zygote_is_replaced(launcher: JailLauncher) -> None:
    assert (await run_program(launcher, "print(1)")).status == "ok"
    before = launcher.pid
    os.kill(before, signal.SIGKILL)
    async with asyncio.timeout(scaled(60)):
        while True:
            # Raised for a call that the dying zygote still accepted.
            with contextlib.suppress(JailFailed):
                result = await run_program(launcher, "print(2)")
                if launcher.pid != before:
                    break
    assert (result.status, result.stdout) == ("ok", b"2\n")


async def test_cancelled_call_leaves_no_process(launcher: JailLauncher) -> None:
    call = asyncio.create_task(run_program(launcher, "import time\ntime.sleep(60)"))
    await wait_for_guests(launcher)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(scaled(SOON_S)):
        while len(list_pythons(launcher)) > ZYGOTE:
            await asyncio.sleep(0.005)


async def test_failed_guest_setup_raises_jail_failed(launcher: JailLauncher) -> None:
    limits = JailLimits(open_files=1 << 30)
    with pytest.raises(JailFailed, match="a guest's setup failed"):
        await run_program(launcher, "print(1)", limits=limits)


async def test_report_with_a_wrong_nonce_is_rejected(launcher: JailLauncher) -> None:
    jail = await launcher.open(JailProgram("print(1)"), LIMITS)
    jail.nonce = "0" * 32
    with pytest.raises(BadMessage, match="nonce"):
        await jail.receive_report(scaled(10))
    jail.close()


@pytest.mark.deep
async def test_busy_host_causes_no_timeout(launcher: JailLauncher) -> None:
    """Check eight programs at once on few cores, which take longer than the wall limit."""
    limits = JailLimits(wall_s=0.6, cpu_s=5.0, memory_bytes=128 * MIB)
    source = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
    results = await asyncio.gather(
        *(run_program(launcher, source, limits=limits) for _ in range(8))
    )
    assert [(result.status, result.stdout) for result in results] == [("ok", b"done\n")] * 8


async def test_blocked_event_loop_causes_no_timeout(launcher: JailLauncher) -> None:
    limits = JailLimits(wall_s=0.5, cpu_s=0.5, memory_bytes=128 * MIB)
    call = asyncio.create_task(run_program(launcher, "print('in time')", limits=limits))
    await asyncio.sleep(0.05)
    time.sleep(1.5)  # noqa: ASYNC251  what is tested: the loop does nothing for three limits
    result = await call
    assert (result.status, result.stdout) == ("ok", b"in time\n")


async def test_other_interpreter_has_its_packages(tmp_path: Path) -> None:
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
    directories = (*base.directories, str(tmp_path / "venv"))
    interpreter = Interpreter(str(python), False, directories, ("brought",))
    async with open_launcher(tmp_path / "log", interpreter=interpreter) as launcher:
        result = await run_program(launcher, "import brought\nprint(brought.VALUE)")
    assert (result.status, result.stdout) == ("ok", b"17\n"), result.stderr


def test_interpreter_below_a_mounted_link_is_mounted_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "LINKS", (str(tmp_path),))
    python_path = str(tmp_path / "python")
    binds = list(
        interpreters.list_root_content(Interpreter(python_path, False, (python_path,))).binds
    )
    assert binds.index(str(tmp_path)) < binds.index(python_path)


async def test_launchers_share_no_control_group(launcher: JailLauncher, tmp_path: Path) -> None:
    homes, log = cgroups.find_parents(), tmp_path / "other.log"
    other = JailLauncher(SystemHost(), SystemClock(), "bwrap", Interpreter.default(), homes, log)
    assert (await run_program(launcher, "print(1)")).stdout == b"1\n"
    assert (await run_program(other, "print(2)")).stdout == b"2\n"
    await other.stop()  # with its groups
    assert (await run_program(launcher, "print(3)")).stdout == b"3\n"


async def test_program_inherits_only_its_three_streams(launcher: JailLauncher) -> None:
    result = await run_program(
        launcher, "import os\nprint(sorted(map(int, os.listdir('/proc/self/fd'))))"
    )
    assert result.stdout == b"[0, 1, 2, 3]\n"  # the last one is of the listing itself


async def test_program_inherits_no_descriptors_of_a_sandbox_with_thousands(tmp_path: Path) -> None:
    """Check a sandbox whose zygote's control socket has a high descriptor number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTOR_COUNT + 200), hard))
    async with open_launcher() as launcher:
        with contextlib.ExitStack() as stack:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(DESCRIPTOR_COUNT):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            await launcher.start()
        await test_program_inherits_only_its_three_streams(launcher)


async def test_externally_killed_jail_raises_jail_failed(launcher: JailLauncher) -> None:
    call = asyncio.create_task(run_program(launcher, "import time\ntime.sleep(60)"))
    await wait_for_guests(launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    with pytest.raises(JailFailed, match="without a report"):
        await call


async def test_stopped_zygote_is_replaced_and_its_calls_are_answered(tmp_path: Path) -> None:
    class RecordingReporter(ExitReporter):
        def record_exit(
            self, name: str, code: int, why: str, log: Path | None, job: str = ""
        ) -> None:
            exits.append(f"{name}: {why}")

    exits: list[str] = []
    waits, host = WaitTable(SystemClock()), SystemHost()
    launcher = JailLauncher(
        host, SystemClock(), "bwrap", Interpreter.default(), None, None, waits, RecordingReporter()
    )
    await launcher.start()
    try:
        before = await launcher.open(JailProgram("input(); print(1)"), LIMITS)
        stopped_pid = launcher.zygote_pid
        os.kill(stopped_pid, signal.SIGSTOP)
        calls = [asyncio.create_task(run_program(launcher, f"print({n})")) for n in range(3)]
        wait_name = f"the zygote (pid {stopped_pid})"
        async with asyncio.timeout(scaled(SOON_S)):
            while wait_name not in {wait["on"] for wait in waits.list_longest([])}:
                await asyncio.sleep(0.01)
            results = await asyncio.gather(*calls)
        assert [result.stdout for result in results] == [b"0\n", b"1\n", b"2\n"]
        assert launcher.zygote_pid not in (0, stopped_pid)
        assert exits == [
            f"zygote: the zygote was killed: it has been stopped by a signal (pid {stopped_pid})"
        ]
        assert (await before.finish()).status == "ok", "what it had begun ends as it would have"
        async with asyncio.timeout(scaled(SOON_S)):
            while read_start_time(stopped_pid):
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
async def test_killed_zygote_does_not_score_an_answer(
    launcher: JailLauncher, tests: object
) -> None:
    limits = JailLimits(wall_s=900.0, cpu_s=20.0, memory_bytes=128 * MIB)
    grader = CodeGrader(launcher, JailSlots(SystemClock(), 2), limits, {"case_s": 900.0})
    source = "import time\ntime.sleep({})\nprint(1)\ndef f(x): return x"
    row = {"tests": tests}

    def make_answer(after_s: int) -> list[dict[str, str]]:
        return [{"role": "model", "text": source.format(after_s)}]

    grading_task = asyncio.create_task(grader.compute_reward(row, make_answer(600)))
    await wait_for_guests(launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    answer = await grading_task
    assert (answer.status, answer.value) == ("crashed", None)
    assert (await grader.compute_reward(row, make_answer(0))).value == 1.0


async def test_jails_draw_different_random_numbers(launcher: JailLauncher) -> None:
    source = (
        "import os, random, sys\nprint(random.random(), flush=True)\n"
        "if os.fork() == 0:\n    print(random.random(), flush=True)\n    os._exit(0)\nos.wait()"
    )
    results = [await launcher.run(JailProgram(source), LIMITS) for _ in range(3)]
    numbers = [number for one in results for number in one.stdout.split()]
    assert len(set(numbers)) == len(numbers) == 6


def test_bytecode_is_written_once_for_each_version_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "guests").mkdir()
    source = tmp_path / "guests" / "guest.py"
    (tmp_path / "invalid.py").write_text("def f(:")
    cached = Path(importlib.util.cache_from_source(str(source)))
    versions = []
    for text, modified_at_s in (("x = 1", 100), ("x = 1", 100), ("x = 23", 2**32)):
        source.write_text(text)
        os.utime(source, (modified_at_s, modified_at_s))
        outer_jail.write_bytecode(tmp_path)
        versions.append((cached.stat().st_ino, cached.read_bytes()))
    assert versions[0] == versions[1]
    assert versions[1][1] != versions[2][1]
