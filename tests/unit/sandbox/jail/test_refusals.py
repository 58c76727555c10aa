"""System calls that the filter denied, named in the result beyond the program's reach."""

from __future__ import annotations

import errno
import time

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import ProgramResult
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.jail.confinement import syscall_policy
from meshrl.services.sandbox.jail.metering import seccomp_listener
from meshrl.services.sandbox.loaded_job import format_result
from meshrl.services.sandbox.sessions import Sessions
from tests.load import scaled

pytestmark = pytest.mark.needs("bwrap")
LIMITS = JailLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=256 * MIB, output_bytes=4096)
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return ctypes.get_errno() if result < 0 else 0
"""


async def run_program(launcher: JailLauncher, source: str, mode: str = "program") -> ProgramResult:
    return await launcher.run(JailProgram(source, mode), LIMITS)


async def test_denied_call_that_ended_the_program_is_named(launcher: JailLauncher) -> None:
    result = await run_program(launcher, "import socket\nsocket.socket()")
    assert (result.status, result.denied_calls) == ("refused", ("socket",))
    assert result.error == "the program attempted an operation that the sandbox denies: socket"


async def test_denied_calls_are_named_once_and_in_order(launcher: JailLauncher) -> None:
    source = """
import os, socket
for _ in range(3):
    for ask in (lambda: os.chroot("/"), socket.socket, lambda: os.setuid(0)):
        try:
            ask()
        except PermissionError as error:
            print(error.errno)
if os.fork() == 0:
    os.close(1)
    os.setns(0, 0) if hasattr(os, "setns") else None
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        os._exit(0)
os.wait()
"""
    result = await run_program(launcher, source)
    assert (result.status, result.error, result.stdout) == ("ok", "", b"1\n" * 9)
    assert result.denied_calls == ("chroot", "socket", "setuid", "sched_setscheduler")
    assert format_result(result)["refused"] == list(result.denied_calls)


async def test_program_without_denied_calls_names_none(launcher: JailLauncher) -> None:
    result = await run_program(
        launcher, "id; ls -l / > /dev/null; cp -a /etc/alternatives /tmp", "shell"
    )
    assert (result.status, result.denied_calls) == ("ok", ())
    assert "refused" not in format_result(result)


@pytest.mark.rotating(3)
async def test_flood_of_denied_calls_ends_in_time(launcher: JailLauncher) -> None:
    source = (
        CALL
        + """
import os
os.fork(), os.fork()
seen = set()
while True:
    found = call(101, 0, 0, 0, 0)
    if found not in seen:
        seen.add(found)
        os.write(1, b"%d\\n" % found)
"""
    )
    start_s = time.monotonic()
    limits = JailLimits(wall_s=10.0, cpu_s=0.5, memory_bytes=256 * MIB)
    result = await launcher.run(JailProgram(source), limits)
    assert (result.status, result.denied_calls) == ("timeout", ("ptrace",))
    # EPERM, then ENOSYS: the call is never executed.
    assert set(result.stdout.split()) <= {b"1", b"38"}
    assert b"38" in result.stdout.split() and time.monotonic() - start_s < scaled(30)


async def test_program_cannot_become_the_seccomp_listener(launcher: JailLauncher) -> None:
    source = (
        CALL
        + """
print(call(317, 1, 8, 0), call(317, 0, 0, 0), call(157, 22, 2, 0))
import fcntl
for fd in range(3, 64):
    try:
        fcntl.ioctl(fd, 0xC0502100, bytearray(80))
        print("heard")
    except OSError:
        pass
"""
    )
    result = await run_program(launcher, source)
    assert (result.stdout, result.denied_calls) == (b"1 1 22\n", ("seccomp",))


async def test_each_cell_names_its_own_denied_calls(launcher: JailLauncher) -> None:
    sessions = Sessions(launcher, launcher.clock, LIMITS, 2, 60.0)
    try:
        cells = ["import socket, os", "socket.socket()", "1", "socket.socket()", "os.chroot('/')"]
        results = [await sessions.run("one", cell) for cell in cells]
    finally:
        sessions.close()
    assert [each.denied_calls for each in results] == [
        (),
        ("socket",),
        (),
        ("socket",),
        ("chroot",),
    ]
    assert [each.status for each in results] == ["ok", "refused", "ok", "refused", "refused"]
    assert results[-1].error == "the program attempted an operation that the sandbox denies: chroot"


def test_interrupted_seccomp_answer_is_repeated() -> None:
    """Check an answer that waits for a lock, which a signal interrupts."""
    requests: list[int] = []
    sent: list[tuple[int, ...]] = []

    def ioctl(fd: int, what: int, record: bytearray | bytes) -> None:
        requests.append(what)
        if what == syscall_policy.SECCOMP_NOTIF_RECV:
            assert isinstance(record, bytearray)
            record[:] = seccomp_listener.NOTIFICATION.pack(7, 1, 0, 101)
        elif requests.count(what) < 3:
            raise InterruptedError(errno.EINTR, "a signal")
        else:
            sent.append(seccomp_listener.ANSWER.unpack(record))

    denied_numbers: list[int] = []
    seccomp_listener.SeccompListener(-1, denied_numbers.append, ioctl).deny_pending()
    assert sent == [(7, 0, -errno.EPERM, 0)] and denied_numbers == [101]
    assert requests == [syscall_policy.SECCOMP_NOTIF_RECV] + 3 * [syscall_policy.SECCOMP_NOTIF_SEND]


PROC_LIMITS = JailLimits(wall_s=60.0, cpu_s=20.0, memory_bytes=256 * MIB, output_bytes=8192)


async def test_no_file_in_proc_can_be_opened_for_writing(launcher: JailLauncher) -> None:
    """Check /proc: a trigger on /proc/pressure, for example, would be a channel between jails."""
    source = """
import os
opened = []
for place, folders, names in os.walk("/proc"):
    folders[:] = [name for name in folders if name not in ("task", "net", "fd", "map_files")]
    for name in names:
        try:
            os.close(os.open(os.path.join(place, name), os.O_WRONLY | os.O_NONBLOCK))
            opened.append(os.path.join(place, name))
        except OSError:
            pass
print(opened)
print(open("/proc/self/oom_score_adj").read(), open("/proc/sys/user/max_user_namespaces").read())
"""
    result = await launcher.run(JailProgram(source), PROC_LIMITS)
    assert result.stdout == b"[]\n1000\n 0\n\n", result
