"""Forbidden channels between jails, to the init process and into the kernel."""

from __future__ import annotations

import json
import platform

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import ProgramResult
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.jail.confinement import syscall_table
from tests.unit.sandbox.launching import PLAIN, open_launcher, run_program

LIMITS = JailLimits(wall_s=60.0, cpu_s=5.0, memory_bytes=256 * MIB, open_files=128)
PROGRAM = """
import ctypes, fcntl, json, os, signal, socket, struct, time
NUMBERS = json.loads({numbers!r})
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    typed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(NUMBERS[name]), *typed) < 0:
        raise OSError(ctypes.get_errno(), name)
shared = os.open("/usr/bin/env", os.O_RDONLY)
lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
one, other = socket.socketpair()
room = ctypes.create_string_buffer(4096)
tries = {{
    "aio": lambda: call("io_setup", 8, ctypes.byref(ctypes.c_ulong())),
    "a descriptor of a process": lambda: call("pidfd_open", os.getpid(), 0),
    "out of band": lambda: one.send(b"x", socket.MSG_OOB),
    "out of band, received": lambda: other.recv(1, socket.MSG_OOB),
    "a queued signal": lambda: call("rt_sigqueueinfo", os.getpid(), 0, room),
    "the locks of others": lambda: fcntl.fcntl(shared, fcntl.F_GETLK, lock),
    "the open file locks of others": lambda: fcntl.fcntl(shared, 36, lock),
    "lease": lambda: fcntl.fcntl(shared, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "directory notification": lambda: fcntl.fcntl(os.open("/usr", 0), fcntl.F_NOTIFY, 1),
    "inotify": lambda: call("inotify_init1", 0),
    "fanotify": lambda: call("fanotify_init", 0x200, 0),
    "real time": lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
    "a class of the keeper": lambda: os.sched_setscheduler({keeper}, 5, os.sched_param(0)),
    "cores of the keeper": lambda: os.sched_setaffinity({keeper}, [0]),
    "priority of the keeper": lambda: os.setpriority(os.PRIO_PROCESS, {keeper}, 19),
    "priority of the user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "limits of the keeper": lambda: call("prlimit64", {keeper}, 0, 0, room),
    "comparison": lambda: call("kcmp", os.getpid(), {keeper}, 1, 0, 0),
    "a handle": lambda: call("name_to_handle_at", -100, b"/usr", room, room, 0),
    "pages to a pipe": lambda: call("vmsplice", os.pipe()[1], room, 1, 0),
    "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "a name by credentials": lambda: one.setsockopt(1, 16, 1),
    "a socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    "page cache": lambda: call("mincore", 0, 0, room),
    "user faults": lambda: call("userfaultfd", 1),
    "a filter": lambda: call("seccomp", 1, 8, room),
    "priority of input": lambda: call("ioprio_set", 1, 0, 0),
    "a trigger": lambda: os.open("/proc/pressure/cpu", os.O_RDWR),
    "a device": lambda: os.mknod("device", 0o600 | 0o20000, os.makedev(1, 3)),
    "devices": lambda: len(os.listdir("/dev")) < 12 or print("devices"),
}}
done = []
for name, attempt in tries.items():
    try:
        attempt()
    except OSError:
        continue
    done.append(name)
print(json.dumps(done))
"""
EXPECTED_DENIED = {
    *("io_setup", "sendto", "recvfrom", "rt_sigqueueinfo", "fcntl", "inotify_init1"),
    *("fanotify_init", "sched_setscheduler", "sched_setaffinity", "setpriority", "prlimit64"),
    *("kcmp", "name_to_handle_at", "socketpair", "setsockopt", "socket", "userfaultfd", "seccomp"),
    "ioprio_set",
}


async def run_attempts(tier: str) -> ProgramResult:
    keeper = "1" if tier == "bwrap" else "os.getppid()"
    source = PROGRAM.format(numbers=json.dumps(syscall_table.list_numbers()), keeper=keeper)
    async with open_launcher(tier=tier) as launcher:
        return await launcher.run(JailProgram(source), LIMITS)


pytestmark = pytest.mark.skipif(
    platform.machine() not in syscall_table.ARCHITECTURES, reason="no list for this machine"
)


@pytest.mark.needs("bwrap")
async def test_forbidden_channels_are_denied_and_named_in_namespaces() -> None:
    result = await run_attempts("bwrap")
    assert (result.status, json.loads(result.stdout)) == ("ok", ["devices"]), result
    assert set(result.denied_calls) == EXPECTED_DENIED


LOCKS = """
import fcntl, os, sqlite3
for name in ("/dev/null", "/usr/bin/env", "own"):
    fds = [os.open(name, os.O_RDWR | os.O_CREAT if name == "own" else 0) for _ in "12"]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
both = os.open("own", os.O_RDWR)
fcntl.lockf(both, fcntl.LOCK_EX | fcntl.LOCK_NB)
child = os.fork()
if child == 0:
    fcntl.lockf(both, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "kept"
for mode in ("delete", "truncate", "wal"):
    link = sqlite3.connect("base-" + mode)
    link.execute("pragma locking_mode=" + ("exclusive" if mode == "wal" else "normal"))
    assert link.execute("pragma journal_mode=" + mode).fetchone() == (mode,)
    link.execute("create table t (x)")
    link.executemany("insert into t values (?)", [(1,), (2,)])
    link.commit()
    link.execute("insert into t values (3)")
    link.rollback()
    print(link.execute("select sum(x) from t").fetchone()[0])
    link.close()
"""


async def test_file_locks_are_granted_without_being_held(launcher: JailLauncher) -> None:
    result = await launcher.run(JailProgram(LOCKS), LIMITS)
    assert (result.status, result.stdout, result.denied_calls) == ("ok", b"3\n" * 3, ()), (
        result.stderr
    )


MARKS = """
import os, sys
for name in ("null", "zero", "full", "random", "urandom"):
    path = "/dev/" + name
    os.read(os.open(path, os.O_RDONLY), 1)
    if name != "full":
        os.write(os.open(path, os.O_WRONLY | os.O_TRUNC), b"x")
    for act in (os.utime, lambda path: os.chmod(path, os.stat(path).st_mode & 0o777)):
        try:
            act(path)
            print("changed", path)
        except OSError as error:
            print(error.errno)
"""


@pytest.mark.needs("bwrap")
async def test_devices_can_be_written_but_their_nodes_not_changed(launcher: JailLauncher) -> None:
    result = await launcher.run(JailProgram(MARKS), LIMITS)
    assert (result.status, set(result.stdout.split())) == ("ok", {b"30"}), result


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock", "root")
def test_forbidden_channels_are_denied_without_namespaces() -> None:
    status, opened, denied = json.loads(run_program(MAIN, become=PLAIN))
    assert (status, opened, set(denied)) == ("ok", [], EXPECTED_DENIED)


MAIN = """
import asyncio, json
from tests.unit.sandbox.jail import test_closed
ran = asyncio.run(test_closed.run_attempts("landlock"))
print(json.dumps([ran.status, json.loads(ran.stdout or b'["none"]'), ran.denied_calls]))
"""
