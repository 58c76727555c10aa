"""Compilation of a policy to a seccomp filter, and its installation.

Numbers are sorted into ranges with the same answer, and found by bisection. At installation, once
for each jail, the kernel runs the filter for every existing call, to find those that it may always
allow. Calls of another architecture kill; calls newer than the table answer ENOSYS, as on an older
kernel.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct

from . import syscalls
from .syscall_policy import SyscallPolicy, SyscallRule
from .syscall_table import LAST, find_architecture, list_numbers

ALLOW = 0x7FFF0000
USER_NOTIFY = 0x7FC00000  # SECCOMP_RET_USER_NOTIF: the listener answers
ERRNO = 0x00050000
KILL = 0x80000000
SET_MODE_FILTER, NEW_LISTENER = 1, 1 << 3

# BPF instructions (linux/filter.h): load a word of the call's record, mask it, jump, return.
LOAD, AND, JUMP, JUMP_EQUAL, JUMP_ABOVE, RETURN = 0x20, 0x54, 0x05, 0x15, 0x25, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
INSTRUCTION_BYTES = 8  # bytes
MAX_JUMP = 254  # instructions that a conditional jump passes over; it can 255


def compile_filter(policy: SyscallPolicy, notify: bool = True, machine: str = "") -> bytes:
    """Compile the filter for `machine` (default: this one), as an array of struct sock_filter.

    With `notify`, a listener receives denied calls; else they are answered with EPERM.
    """
    expected, _ = find_architecture(machine)
    known = list_numbers(machine)
    refused = USER_NOTIFY if notify else ERRNO | errno.EPERM
    bodies = {number: _return(refused) for number in range(LAST + 1)}
    bodies.update((known[name], _return(ALLOW)) for name in policy.allowed_calls if name in known)
    for name, error in policy.fixed_errors:
        if name in known:
            bodies[known[name]] = _return(ERRNO | error)
    for name, cases in policy.rules:
        if name in known:
            bodies[known[name]] = b"".join(_encode_rule(case) for case in cases) + _return(refused)
    ranges: list[tuple[int, bytes]] = []  # the first number, and the answer for all up to the next
    for number in range(LAST + 1):
        if not ranges or ranges[-1][1] != bodies[number]:
            ranges.append((number, bodies[number]))
    return b"".join(
        [
            _load(ARCHITECTURE_AT),
            _jump(JUMP_EQUAL, expected, 1, 0),
            _return(KILL),
            _load(NUMBER_AT),
            _jump(JUMP_ABOVE, LAST, 0, 1),  # numbers of x32 are above it, too
            _return(ERRNO | errno.ENOSYS),
            _DecisionTree(ranges).code,
        ]
    )


def install(policy: SyscallPolicy, notify: bool = False) -> int:
    """Apply the policy to this process and its children for ever; sets PR_SET_NO_NEW_PRIVS.

    Returns the descriptor of denied calls, which the caller must answer. It is -1 without `notify`,
    or where this kernel, or an outer filter with a listener, permits no listener.
    """
    if notify:
        try:
            return _install_prepared(policy, True)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBUSY):
                raise
    _install_prepared(policy, False)
    return -1


def _install_prepared(policy: SyscallPolicy, notify: bool) -> int:
    number, record, _ = prepare_filter(policy, notify)
    how = ctypes.c_long(SET_MODE_FILTER), ctypes.c_long(NEW_LISTENER if notify else 0)
    return syscalls.call_libc("syscall", number, *how, record)


@functools.lru_cache(maxsize=8)  # a zygote makes them once, before it forks
def prepare_filter(policy: SyscallPolicy, notify: bool) -> tuple[ctypes.c_long, bytes, object]:
    """Return the number of seccomp(2), a struct sock_fprog, and the filter that it points to.

    The caller must retain the filter as long as the struct.
    """
    code = compile_filter(policy, notify)
    filter_buffer = ctypes.create_string_buffer(code, len(code))
    record = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(filter_buffer))
    return ctypes.c_long(list_numbers()["seccomp"]), record, filter_buffer


class _DecisionTree:
    """Decision tree that finds the range of a number by bisection.

    Jumps go forwards only, and not far, so the instructions are made from the last to the first.
    Nearby returns are shared.
    """

    def __init__(self, ranges: list[tuple[int, bytes]]) -> None:
        self._reversed_instructions: list[bytes] = []
        self._return_positions: dict[bytes, int] = {}  # the position of each, counted from the end
        self._build(ranges)
        self.code = b"".join(reversed(self._reversed_instructions))

    def _build(self, ranges: list[tuple[int, bytes]]) -> int | bytes:
        """Build a subtree and return its position, or its only instruction."""
        if len(ranges) == 1:
            body = ranges[0][1]
            if len(body) == INSTRUCTION_BYTES:
                return body
            for at in reversed(range(0, len(body), INSTRUCTION_BYTES)):
                self._reversed_instructions.append(body[at : at + INSTRUCTION_BYTES])
            return len(self._reversed_instructions)
        middle = len(ranges) // 2
        high, low = self._build(ranges[middle:]), self._build(ranges[:middle])
        above, below = self._within_jump(high), self._within_jump(low)
        here, last = len(self._reversed_instructions), ranges[middle][0] - 1
        self._reversed_instructions.append(_jump(JUMP_ABOVE, last, here - above, here - below))
        return here + 1

    def _within_jump(self, target: int | bytes) -> int:
        """Return an equivalent position near enough for a jump."""
        here = len(self._reversed_instructions)
        place = self._return_positions.get(target) if isinstance(target, bytes) else target
        if place is not None and here - place <= MAX_JUMP:
            return place
        if isinstance(target, bytes):
            self._reversed_instructions.append(target)
            self._return_positions[target] = here + 1
        else:
            self._reversed_instructions.append(struct.pack("HBBI", JUMP, 0, 0, here - target))
        return here + 1


def _encode_rule(rule: SyscallRule) -> bytes:
    """Encode a rule: it returns where all its tests hold, and continues after itself otherwise."""
    code = _return(ALLOW if rule.error is None else ERRNO | rule.error)
    for test in reversed(rule.tests):
        count, beyond = len(test.values), len(code) // 8
        code = b"".join(
            [
                _load(ARGUMENTS_AT + 8 * test.argument_index),
                struct.pack("HBBI", AND, 0, 0, test.mask) if test.mask != 0xFFFFFFFF else b"",
                *(
                    _jump(JUMP_EQUAL, value, count - 1 - place + (beyond if test.negated else 0), 0)
                    for place, value in enumerate(test.values[:-1])
                ),
                _jump(JUMP_EQUAL, test.values[-1], *((beyond, 0) if test.negated else (0, beyond))),
                code,
            ]
        )
    return code


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", LOAD, 0, 0, offset)


def _jump(test: int, value: int, then: int, otherwise: int) -> bytes:
    return struct.pack("HBBI", test, then, otherwise, value)


def _return(action: int) -> bytes:
    return struct.pack("HBBI", RETURN, 0, 0, action)
