"""The filter, call by call: as the kernel applies it, and as it reads on both architectures."""

from __future__ import annotations

import errno
import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from services.sandbox.jail import seccomp

ROOT = Path(__file__).parents[4]
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD_FLAGS = 0x003D0F00
NEW_USER = 0x10000000

# Calls that must go through, by their numbers: read, mmap, execve, wait4, kill, openat, exit_group.
ALLOWED = {"x86_64": [0, 9, 59, 61, 62, 257, 231], "aarch64": [63, 222, 221, 260, 129, 56, 94]}


def verdict(
    refusals: tuple[seccomp.Refusal, ...],
    machine: str,
    number: int,
    *arguments: int,
    architecture: int = 0,
) -> int:
    """What the program returns for a call, by an interpreter of the few instructions it has."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    architecture = architecture or MACHINES[machine][0]
    record = struct.pack("iIQ6Q", number, architecture, 0, *(v & (1 << 64) - 1 for v in values))
    code = seccomp.program(refusals, machine)
    steps = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    at = accumulator = 0
    while True:
        kind, then, otherwise, value = steps[at]
        at += 1
        if kind == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("I", record, value)
        elif kind == seccomp.RETURN:
            return int(value)
        else:
            truth = {
                seccomp.JUMP_EQUAL: accumulator == value,
                seccomp.JUMP_ABOVE: accumulator > value,
                seccomp.JUMP_SET: bool(accumulator & value),
            }[kind]
            at += then if truth else otherwise


@pytest.mark.parametrize(
    ("machine", "refusal"),
    [
        pytest.param(machine, refusal, id=f"{machine}-{refusal.call}")
        for machine, (_, column) in MACHINES.items()
        for refusal in seccomp.ONE_GROUP
        if seccomp.CALLS[refusal.call][column] >= 0
    ],
)
def test_each_refused_call_gets_its_error(machine: str, refusal: seccomp.Refusal) -> None:
    number = seccomp.CALLS[refusal.call][MACHINES[machine][1]]
    arguments = {"bits": [NEW_USER], "is not": [7], "is": [0, *refusal.values[:1]]}
    given = arguments.get(refusal.test, [])
    assert verdict(seccomp.ONE_GROUP, machine, number, *given) == ERRNO | refusal.error


@pytest.mark.parametrize("machine", MACHINES)
def test_all_other_calls_go_through(machine: str) -> None:
    refused = {seccomp.CALLS[r.call][MACHINES[machine][1]] for r in seccomp.JAIL}
    for number in range(seccomp.LAST_KNOWN + 1):
        if number not in refused:
            assert verdict(seccomp.JAIL, machine, number) == ALLOW, number
    for number in ALLOWED[machine]:
        assert verdict(seccomp.JAIL, machine, number) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_depend_on_an_argument(machine: str) -> None:
    column = MACHINES[machine][1]

    def found(name: str, *arguments: int) -> int:
        return verdict(seccomp.JAIL, machine, seccomp.CALLS[name][column], *arguments)

    assert found("clone", CLONE_THREAD_FLAGS) == ALLOW
    assert found("clone", CLONE_THREAD_FLAGS | 0x40000000) == ERRNO | errno.EPERM
    assert found("socketpair", 1) == ALLOW
    assert found("socketpair", 2) == ERRNO | errno.EPERM
    assert found("prlimit64", 0) == ALLOW
    assert found("prlimit64", 1) == ERRNO | errno.EPERM
    assert found("ioctl", 0, 0x5401) == ALLOW  # ask what a terminal is set to
    assert found("ioctl", 0, 0x5412) == ERRNO | errno.EPERM
    assert found("ioctl", 0, 0x541C) == ERRNO | errno.EPERM
    assert found("personality", 0xFFFFFFFF) == ALLOW
    assert found("personality", 0x0040000) == ERRNO | errno.EPERM
    assert found("clone3") == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_the_future_and_of_other_architectures(machine: str) -> None:
    refusals = seccomp.JAIL
    assert verdict(refusals, machine, seccomp.LAST_KNOWN + 1) == ERRNO | errno.ENOSYS
    assert verdict(refusals, machine, 0x40000000 + 1) == ERRNO | errno.ENOSYS
    assert verdict(refusals, machine, 1, architecture=0x40000003) == KILL


def test_a_machine_without_a_list_is_named() -> None:
    with pytest.raises(seccomp.Unsupported, match="riscv64"):
        seccomp.program(seccomp.JAIL, "riscv64")


PROBE = """
import ctypes, json, sys
from services.sandbox.jail import kernel, seccomp
numbers = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
seccomp.install(seccomp.ONE_GROUP)
found = {}
for name, (number, arguments) in numbers.items():
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    found[name] = ctypes.get_errno() if result < 0 else 0
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="no list for this machine")
def test_the_kernel_refuses_them_call_by_call() -> None:
    column = MACHINES[platform.machine()][1]
    arguments = {"bits": [NEW_USER], "is not": [7], "always": [0]}
    asked = {
        refusal.call: (
            seccomp.CALLS[refusal.call][column],
            arguments.get(refusal.test) or [0, refusal.values[0]],
        )
        for refusal in seccomp.ONE_GROUP
        if seccomp.CALLS[refusal.call][column] >= 0
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(asked)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    expected = {refusal.call: refusal.error for refusal in seccomp.ONE_GROUP}
    assert json.loads(done.stdout) == {name: expected[name] for name in asked}
