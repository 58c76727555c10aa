"""What the filter refused is in the outcome by name, out of the program's reach."""

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


async def ran(launcher: JailLauncher, source: str, mode: str = "program") -> ProgramResult:
    return await launcher.run(JailProgram(source, mode), LIMITS)


async def test_what_ended_a_program_is_named(launcher: JailLauncher) -> None:
    found = await ran(launcher, "import socket\nsocket.socket()")
    assert (found.status, found.denied_calls) == ("refused", ("socket",))
    assert found.error == "it asked for what the sandbox refuses: socket"


async def test_what_a_program_lacked_is_named_in_order_and_once(launcher: JailLauncher) -> None:
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
    found = await ran(launcher, source)
    assert (found.status, found.error, found.stdout) == ("ok", "", b"1\n" * 9)
    assert found.denied_calls == ("chroot", "socket", "setuid", "sched_setscheduler")
    assert format_result(found)["refused"] == list(found.denied_calls)


async def test_nothing_is_named_of_a_program_that_asked_for_nothing(launcher: JailLauncher) -> None:
    found = await ran(launcher, "id; ls -l / > /dev/null; cp -a /etc/alternatives /tmp", "shell")
    assert (found.status, found.denied_calls) == ("ok", ())
    assert "refused" not in format_result(found)


@pytest.mark.rotating(3)
async def test_a_flood_of_refused_calls_ends_in_time_and_is_refused(launcher: JailLauncher) -> None:
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
    begun = time.monotonic()
    limits = JailLimits(wall_s=10.0, cpu_s=0.5, memory_bytes=256 * MIB)
    found = await launcher.run(JailProgram(source), limits)
    assert (found.status, found.denied_calls) == ("timeout", ("ptrace",))
    assert set(found.stdout.split()) <= {b"1", b"38"}  # EPERM, then ENOSYS: never done
    assert b"38" in found.stdout.split() and time.monotonic() - begun < scaled(30)


async def test_a_program_cannot_listen_instead_of_its_keeper(launcher: JailLauncher) -> None:
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
    found = await ran(launcher, source)
    assert (found.stdout, found.denied_calls) == (b"1 1 22\n", ("seccomp",))


async def test_each_cell_of_a_session_names_its_own(launcher: JailLauncher) -> None:
    sessions = Sessions(launcher, launcher.clock, LIMITS, 2, 60.0)
    try:
        cells = ["import socket, os", "socket.socket()", "1", "socket.socket()", "os.chroot('/')"]
        ran = [await sessions.run("one", cell) for cell in cells]
    finally:
        sessions.close()
    assert [each.denied_calls for each in ran] == [(), ("socket",), (), ("socket",), ("chroot",)]
    assert [each.status for each in ran] == ["ok", "refused", "ok", "refused", "refused"]
    assert ran[-1].error == "it asked for what the sandbox refuses: chroot"


def test_a_signal_between_call_and_answer_leaves_nobody_waiting() -> None:
    """A listener's answer waits for a lock, and a signal to the keeper ends that wait."""
    asked: list[int] = []
    sent: list[tuple[int, ...]] = []

    def ioctl(fd: int, what: int, record: bytearray | bytes) -> None:
        asked.append(what)
        if what == syscall_policy.SECCOMP_NOTIF_RECV:
            assert isinstance(record, bytearray)
            record[:] = seccomp_listener.NOTIFICATION.pack(7, 1, 0, 101)
        elif asked.count(what) < 3:
            raise InterruptedError(errno.EINTR, "a signal")
        else:
            sent.append(seccomp_listener.ANSWER.unpack(record))

    said: list[int] = []
    seccomp_listener.SeccompListener(-1, said.append, ioctl).deny_pending()
    assert sent == [(7, 0, -errno.EPERM, 0)] and said == [101]
    assert asked == [syscall_policy.SECCOMP_NOTIF_RECV] + 3 * [syscall_policy.SECCOMP_NOTIF_SEND]


PROC_LIMITS = JailLimits(wall_s=60.0, cpu_s=20.0, memory_bytes=256 * MIB, output_bytes=8192)


async def test_nothing_in_proc_can_be_opened_for_writing(launcher: JailLauncher) -> None:
    """A trigger on /proc/pressure, say, is a channel between jails."""
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
    found = await launcher.run(JailProgram(source), PROC_LIMITS)
    assert found.stdout == b"[]\n1000\n 0\n\n", found
