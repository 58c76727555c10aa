"""The filter, call by call: as the kernel applies it, and as it reads on both architectures."""

from __future__ import annotations

import errno
import json
import platform
import struct
from typing import Any

import pytest

from meshrl.services.sandbox.jail.confinement import seccomp, syscall_policy, syscall_table
from meshrl.services.sandbox.jail.confinement.syscall_policy import SyscallPolicy
from tests.unit.sandbox.launching import printed

MACHINES = syscall_table.ARCHITECTURES
ALLOW, KILL, ERRNO, TELL = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
POLICIES = {
    "jail": syscall_policy.NAMESPACE_POLICY,
    "uncounted": syscall_policy.NAMESPACE_POLICY_WITHOUT_CGROUP,
    "group": syscall_policy.PROCESS_GROUP_POLICY,
}

# read, mmap, execve, wait4, kill, openat, exit_group; ptrace, mount, bpf, io_setup, inotify_init1.
ALLOWED = {"x86_64": [0, 9, 59, 61, 62, 257, 231], "aarch64": [63, 222, 221, 260, 129, 56, 94]}
REFUSED = {"x86_64": [101, 165, 321, 206, 294], "aarch64": [117, 40, 280, 0, 26]}


def verdict(
    policy: SyscallPolicy,
    machine: str,
    number: int,
    *arguments: int,
    architecture: int = 0,
    told: bool = True,
) -> int:
    """What the program returns for a call, by an interpreter of the few instructions it has."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    architecture = architecture or MACHINES[machine][0]
    record = struct.pack("iIQ6Q", number, architecture, 0, *(v & (1 << 64) - 1 for v in values))
    code = seccomp.compile_filter(policy, told, machine)
    steps = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        kind, then, otherwise, value = steps[at]
        at += 1
        if kind == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("I", record, value)
        elif kind == seccomp.AND:
            accumulator &= value
        elif kind == seccomp.JUMP:
            at += value
        elif kind == seccomp.RETURN:
            return int(value)
        else:
            truth = {
                seccomp.JUMP_EQUAL: accumulator == value,
                seccomp.JUMP_ABOVE: accumulator > value,
            }[kind]
            at += then if truth else otherwise


@pytest.mark.rotating(3)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_each_call_gets_what_its_policy_says(policy: SyscallPolicy, machine: str) -> None:
    answers, cases = dict(policy.fixed_errors), dict(policy.rules)
    names = {number: name for name, number in syscall_table.list_numbers(machine).items()}
    for number in range(syscall_table.LAST + 1):
        name = names.get(number, "")
        if name in cases:
            continue
        expected = TELL
        if name in policy.allowed_calls:
            expected = ALLOW
        elif name in answers:
            expected = ERRNO | answers[name]
        assert verdict(policy, machine, number) == expected, name
        if expected == TELL:
            assert verdict(policy, machine, number, told=False) == ERRNO | errno.EPERM
    assert {verdict(policy, machine, number) for number in ALLOWED[machine]} == {ALLOW}
    assert {verdict(policy, machine, number) for number in REFUSED[machine]} == {TELL}


def test_every_name_of_a_policy_is_a_call_and_is_in_one_list() -> None:
    known = {row.split()[0] for row in syscall_table.TABLE.split(";")}
    for policy in POLICIES.values():
        lists = [*policy.allowed_calls, *dict(policy.fixed_errors), *dict(policy.rules)]
        assert len(lists) == len(set(lists)) and set(lists) <= known


THREAD, NEW_NET = 0x003D0F00, 0x40000000
# call, arguments, verdict in namespaces of its own, and among the host's processes if different
DEPENDS: list[tuple[Any, ...]] = [
    ("clone", [THREAD], ALLOW),
    ("clone", [THREAD | NEW_NET], TELL),
    ("clone3", [], ERRNO | errno.ENOSYS),
    ("socketpair", [1, 1 | 0o2000000], ALLOW),  # a stream, closed on exec
    ("socketpair", [1, 2], TELL),  # datagrams
    ("socketpair", [2, 1], TELL),
    ("socket", [1, 1 | 0o2004000], ERRNO | errno.EPERM),  # the C library's look for nscd
    ("socket", [1, 1 | 0o2000000], TELL),
    ("socket", [2, 1], TELL),
    ("sendto", [3, 0, 1, 0x4000], ALLOW),
    ("sendto", [3, 0, 1, 0x4001], TELL),  # out of band
    ("recvfrom", [3, 0, 1, 1], TELL),
    ("sendmsg", [3, 0, 0], TELL),  # descriptors on their way count by user
    ("fadvise64", [3, 0, 0, 2], ALLOW),
    ("fadvise64", [3, 0, 0, 4], ERRNO),  # drops what others read, too
    ("preadv2", [3, 0, 1, 0, 0, 0], ALLOW),
    ("preadv2", [3, 0, 1, 0, 0, 8], ERRNO | errno.EOPNOTSUPP),  # says what is in memory
    ("fcntl", [3, 1031, 1 << 20], ERRNO | errno.EPERM),
    ("fchmodat", [], ALLOW, TELL),
    ("utimensat", [], ALLOW, TELL),
    ("recvmsg", [3, 0, 0x40000000], ALLOW),
    ("recvmsg", [3, 0, 1], TELL),
    ("prlimit64", [0], ALLOW),
    ("prlimit64", [1], TELL),
    ("prlimit64", [7], ALLOW, TELL),
    ("sched_setaffinity", [0], ALLOW),
    ("sched_setaffinity", [1], TELL),
    ("sched_setaffinity", [7], ALLOW, TELL),
    ("setpriority", [0, 0, 5], ALLOW),
    ("setpriority", [0, 1, 5], TELL),
    ("setpriority", [2, 0, 5], TELL),  # all of the user's
    ("ioctl", [0, 0x5401], ERRNO | errno.ENOTTY),
    ("ioctl", [0, 0x5412], ERRNO | errno.ENOTTY),  # TIOCSTI
    ("ioctl", [0, 0x541B], ALLOW),  # FIONREAD
    ("fcntl", [0, 1030], ALLOW),
    *(("fcntl", [0, command], ERRNO) for command in (6, 7, 37, 38)),  # locks
    ("fcntl", [0, 5], ERRNO | errno.EINVAL),  # F_GETLK
    ("fcntl", [0, 36], ERRNO | errno.EINVAL),  # F_OFD_GETLK
    ("fcntl", [0, 1024], TELL),  # F_SETLEASE
    ("fcntl", [0, 1026], TELL),  # F_NOTIFY
    ("fcntl", [0, 8], TELL),  # F_SETOWN
    ("personality", [0xFFFFFFFF], ALLOW),
    ("personality", [0x0040000], TELL),
    ("prctl", [15], ALLOW),  # a name
    ("prctl", [22], ERRNO | errno.EINVAL),  # a filter
    ("setsockopt", [3, 1, 7], ALLOW),
    ("setsockopt", [3, 1, 26], TELL),  # SO_ATTACH_FILTER
    ("setsockopt", [3, 1, 16], TELL),  # SO_PASSCRED
    ("memfd_create", [], ALLOW, TELL),
    ("setsid", [], ALLOW, TELL),
    ("flock", [0, 2], ERRNO),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_depend_on_an_argument_or_the_tier(machine: str) -> None:
    for name, arguments, own, *other in DEPENDS:
        number = syscall_table.list_numbers(machine)[name]
        assert (
            verdict(syscall_policy.select_policy("bwrap", True), machine, number, *arguments) == own
        ), name
        among = verdict(
            syscall_policy.select_policy("landlock", False), machine, number, *arguments
        )
        assert among == (other[0] if other else own), name
    memfd = syscall_table.list_numbers(machine)["memfd_create"]
    assert verdict(syscall_policy.select_policy("bwrap", False), machine, memfd) == TELL


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_the_future_and_of_other_architectures(machine: str) -> None:
    policy = syscall_policy.NAMESPACE_POLICY
    assert verdict(policy, machine, syscall_table.LAST + 1) == ERRNO | errno.ENOSYS
    assert verdict(policy, machine, 0x40000000 + 1) == ERRNO | errno.ENOSYS
    assert verdict(policy, machine, 1, architecture=0x40000003) == KILL


def test_a_machine_without_a_list_is_named() -> None:
    with pytest.raises(syscall_table.UnsupportedMachine, match="riscv64"):
        seccomp.compile_filter(syscall_policy.NAMESPACE_POLICY, True, "riscv64")


PROBE = """
import ctypes, json, sys
from meshrl.services.sandbox.jail.confinement import seccomp, syscall_policy, syscalls
asked = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(syscall_policy.PROCESS_GROUP_POLICY)
found = {}
for name, number in asked.items():
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    found[name] = ctypes.get_errno() if result < 0 else 0
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no list for this machine")
def test_the_kernel_refuses_them_call_by_call() -> None:
    policy, numbers = syscall_policy.PROCESS_GROUP_POLICY, syscall_table.list_numbers()
    passing = {*policy.allowed_calls, *dict(policy.rules)}
    asked = {name: number for name, number in numbers.items() if name not in passing}
    answers = dict(policy.fixed_errors)
    assert json.loads(printed(PROBE, json.dumps(asked))) == {
        name: answers.get(name, errno.EPERM) for name in asked
    }
