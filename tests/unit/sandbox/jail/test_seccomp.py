"""Seccomp filter, call by call: applied by the kernel, and compiled for both architectures."""

from __future__ import annotations

import errno
import json
import platform
import struct
from typing import Any

import pytest

from meshrl.services.sandbox.jail.confinement import seccomp, syscall_policy, syscall_table
from meshrl.services.sandbox.jail.confinement.syscall_policy import SyscallPolicy
from tests.unit.sandbox.launching import run_program

MACHINES = syscall_table.ARCHITECTURES
ALLOW, KILL, ERRNO, NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
POLICIES = {
    "jail": syscall_policy.NAMESPACE_POLICY,
    "uncounted": syscall_policy.NAMESPACE_POLICY_WITHOUT_CGROUP,
    "group": syscall_policy.PROCESS_GROUP_POLICY,
}

# read, mmap, execve, wait4, kill, openat, exit_group; ptrace, mount, bpf, io_setup, inotify_init1.
ALLOWED = {"x86_64": [0, 9, 59, 61, 62, 257, 231], "aarch64": [63, 222, 221, 260, 129, 56, 94]}
DENIED = {"x86_64": [101, 165, 321, 206, 294], "aarch64": [117, 40, 280, 0, 26]}


def run_filter(
    policy: SyscallPolicy,
    machine: str,
    number: int,
    *arguments: int,
    architecture: int = 0,
    reports_denied: bool = True,
) -> int:
    """Return the filter's verdict for a call, by interpreting its few kinds of instructions."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    architecture = architecture or MACHINES[machine][0]
    record = struct.pack("iIQ6Q", number, architecture, 0, *(v & (1 << 64) - 1 for v in values))
    code = seccomp.compile_filter(policy, reports_denied, machine)
    steps = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        opcode, on_true, on_false, value = steps[at]
        at += 1
        if opcode == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("I", record, value)
        elif opcode == seccomp.AND:
            accumulator &= value
        elif opcode == seccomp.JUMP:
            at += value
        elif opcode == seccomp.RETURN:
            return int(value)
        else:
            truth = {
                seccomp.JUMP_EQUAL: accumulator == value,
                seccomp.JUMP_ABOVE: accumulator > value,
            }[opcode]
            at += on_true if truth else on_false


@pytest.mark.rotating(3)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_each_call_gets_its_policys_verdict(policy: SyscallPolicy, machine: str) -> None:
    answers, cases = dict(policy.fixed_errors), dict(policy.rules)
    names = {number: name for name, number in syscall_table.list_numbers(machine).items()}
    for number in range(syscall_table.LAST + 1):
        name = names.get(number, "")
        if name in cases:
            continue
        expected = NOTIFY
        if name in policy.allowed_calls:
            expected = ALLOW
        elif name in answers:
            expected = ERRNO | answers[name]
        assert run_filter(policy, machine, number) == expected, name
        if expected == NOTIFY:
            assert run_filter(policy, machine, number, reports_denied=False) == ERRNO | errno.EPERM
    assert {run_filter(policy, machine, number) for number in ALLOWED[machine]} == {ALLOW}
    assert {run_filter(policy, machine, number) for number in DENIED[machine]} == {NOTIFY}


def test_policy_names_are_known_calls_listed_once() -> None:
    known = {row.split()[0] for row in syscall_table.TABLE.split(";")}
    for policy in POLICIES.values():
        lists = [*policy.allowed_calls, *dict(policy.fixed_errors), *dict(policy.rules)]
        assert len(lists) == len(set(lists)) and set(lists) <= known


THREAD, NEW_NET = 0x003D0F00, 0x40000000
# call, arguments, verdict in namespaces, and verdict among the host's processes if different
CONDITIONAL_CALLS: list[tuple[Any, ...]] = [
    ("clone", [THREAD], ALLOW),
    ("clone", [THREAD | NEW_NET], NOTIFY),
    ("clone3", [], ERRNO | errno.ENOSYS),
    ("socketpair", [1, 1 | 0o2000000], ALLOW),  # a stream, closed on exec
    ("socketpair", [1, 2], NOTIFY),  # datagrams
    ("socketpair", [2, 1], NOTIFY),
    ("socket", [1, 1 | 0o2004000], ERRNO | errno.EPERM),  # the C library's lookup of nscd
    ("socket", [1, 1 | 0o2000000], NOTIFY),
    ("socket", [2, 1], NOTIFY),
    ("sendto", [3, 0, 1, 0x4000], ALLOW),
    ("sendto", [3, 0, 1, 0x4001], NOTIFY),  # out of band
    ("recvfrom", [3, 0, 1, 1], NOTIFY),
    ("sendmsg", [3, 0, 0], NOTIFY),  # descriptors in flight count per user
    ("fadvise64", [3, 0, 0, 2], ALLOW),
    ("fadvise64", [3, 0, 0, 4], ERRNO),  # drops other processes' cached data too
    ("preadv2", [3, 0, 1, 0, 0, 0], ALLOW),
    ("preadv2", [3, 0, 1, 0, 0, 8], ERRNO | errno.EOPNOTSUPP),  # reveals the page cache
    ("fcntl", [3, 1031, 1 << 20], ERRNO | errno.EPERM),
    ("fchmodat", [], ALLOW, NOTIFY),
    ("utimensat", [], ALLOW, NOTIFY),
    ("recvmsg", [3, 0, 0x40000000], ALLOW),
    ("recvmsg", [3, 0, 1], NOTIFY),
    ("prlimit64", [0], ALLOW),
    ("prlimit64", [1], NOTIFY),
    ("prlimit64", [7], ALLOW, NOTIFY),
    ("sched_setaffinity", [0], ALLOW),
    ("sched_setaffinity", [1], NOTIFY),
    ("sched_setaffinity", [7], ALLOW, NOTIFY),
    ("setpriority", [0, 0, 5], ALLOW),
    ("setpriority", [0, 1, 5], NOTIFY),
    ("setpriority", [2, 0, 5], NOTIFY),  # all processes of the user
    ("ioctl", [0, 0x5401], ERRNO | errno.ENOTTY),
    ("ioctl", [0, 0x5412], ERRNO | errno.ENOTTY),  # TIOCSTI
    ("ioctl", [0, 0x541B], ALLOW),  # FIONREAD
    ("fcntl", [0, 1030], ALLOW),
    *(("fcntl", [0, command], ERRNO) for command in (6, 7, 37, 38)),  # locks
    ("fcntl", [0, 5], ERRNO | errno.EINVAL),  # F_GETLK
    ("fcntl", [0, 36], ERRNO | errno.EINVAL),  # F_OFD_GETLK
    ("fcntl", [0, 1024], NOTIFY),  # F_SETLEASE
    ("fcntl", [0, 1026], NOTIFY),  # F_NOTIFY
    ("fcntl", [0, 8], NOTIFY),  # F_SETOWN
    ("personality", [0xFFFFFFFF], ALLOW),
    ("personality", [0x0040000], NOTIFY),
    ("prctl", [15], ALLOW),  # a name
    ("prctl", [22], ERRNO | errno.EINVAL),  # a filter
    ("setsockopt", [3, 1, 7], ALLOW),
    ("setsockopt", [3, 1, 26], NOTIFY),  # SO_ATTACH_FILTER
    ("setsockopt", [3, 1, 16], NOTIFY),  # SO_PASSCRED
    ("memfd_create", [], ALLOW, NOTIFY),
    ("setsid", [], ALLOW, NOTIFY),
    ("flock", [0, 2], ERRNO),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_verdicts_depend_on_arguments_and_tier(machine: str) -> None:
    for name, arguments, in_namespace, *on_host_if_different in CONDITIONAL_CALLS:
        number = syscall_table.list_numbers(machine)[name]
        assert (
            run_filter(syscall_policy.select_policy("bwrap", True), machine, number, *arguments)
            == in_namespace
        ), name
        on_host = run_filter(
            syscall_policy.select_policy("landlock", False), machine, number, *arguments
        )
        assert on_host == (on_host_if_different[0] if on_host_if_different else in_namespace), name
    memfd = syscall_table.list_numbers(machine)["memfd_create"]
    assert run_filter(syscall_policy.select_policy("bwrap", False), machine, memfd) == NOTIFY


@pytest.mark.parametrize("machine", MACHINES)
def test_unknown_calls_and_other_architectures_are_denied(machine: str) -> None:
    policy = syscall_policy.NAMESPACE_POLICY
    assert run_filter(policy, machine, syscall_table.LAST + 1) == ERRNO | errno.ENOSYS
    assert run_filter(policy, machine, 0x40000000 + 1) == ERRNO | errno.ENOSYS
    assert run_filter(policy, machine, 1, architecture=0x40000003) == KILL


def test_unsupported_machine_is_named() -> None:
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
def test_kernel_denies_each_call_of_the_policy() -> None:
    policy, numbers = syscall_policy.PROCESS_GROUP_POLICY, syscall_table.list_numbers()
    allowed_names = {*policy.allowed_calls, *dict(policy.rules)}
    denied_numbers = {name: number for name, number in numbers.items() if name not in allowed_names}
    answers = dict(policy.fixed_errors)
    assert json.loads(run_program(PROBE, json.dumps(denied_numbers))) == {
        name: answers.get(name, errno.EPERM) for name in denied_numbers
    }
