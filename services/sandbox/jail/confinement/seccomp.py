"""Makes a seccomp filter of a policy, and installs it.

Numbers are sorted into ranges that are answered alike, and found by halving: when a filter is
installed, which is once for each jail, the kernel runs it for every call that there is, to know
those that it need not be asked about. Calls of another architecture kill; calls younger than the
table answer ENOSYS, as on an older kernel.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct

from . import kernel
from .allowed import CallCase, CallPolicy
from .calls import LAST, architecture, numbers

ALLOW = 0x7FFF0000
TELL = 0x7FC00000  # SECCOMP_RET_USER_NOTIF: whoever listens answers
ERRNO = 0x00050000
KILL = 0x80000000
SET_MODE_FILTER, NEW_LISTENER = 1, 1 << 3

# BPF instructions (linux/filter.h): load a word of the call's record, mask it, jump, return.
LOAD, AND, JUMP, JUMP_EQUAL, JUMP_ABOVE, RETURN = 0x20, 0x54, 0x05, 0x15, 0x25, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
INSTRUCTION = 8  # bytes
FARTHEST = 254  # instructions that a conditional jump passes over; it can 255


def program(policy: CallPolicy, told: bool = True, machine: str = "") -> bytes:
    """The filter for `machine` (default: this one), as an array of struct sock_filter.

    `told`: refused calls go to a listener; else they are answered with EPERM.
    """
    expected, _ = architecture(machine)
    known = numbers(machine)
    refused = TELL if told else ERRNO | errno.EPERM
    bodies = {number: _return(refused) for number in range(LAST + 1)}
    bodies.update((known[name], _return(ALLOW)) for name in policy.always if name in known)
    for name, error in policy.answered:
        if name in known:
            bodies[known[name]] = _return(ERRNO | error)
    for name, cases in policy.cases:
        if name in known:
            bodies[known[name]] = b"".join(_case(case) for case in cases) + _return(refused)
    ranges: list[tuple[int, bytes]] = []  # the first number, and what all up to the next get
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
            _Decisions(ranges).code,
        ]
    )


def install(policy: CallPolicy, listen: bool = False) -> int:
    """Holds this process, and all that it starts, to the policy for ever; takes
    PR_SET_NO_NEW_PRIVS.

    Returns the descriptor that tells of refused calls, which it is the caller's to answer; -1 when
    nobody is to listen, or this kernel, or a filter above us that has a listener, does not let us.
    """
    if listen:
        try:
            return _install(policy, True)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBUSY):
                raise
    _install(policy, False)
    return -1


def _install(policy: CallPolicy, told: bool) -> int:
    number, record, _ = prepared(policy, told)
    how = ctypes.c_long(SET_MODE_FILTER), ctypes.c_long(NEW_LISTENER if told else 0)
    return kernel.called("syscall", number, *how, record)


@functools.lru_cache(maxsize=8)  # a zygote makes them once, before it forks
def prepared(policy: CallPolicy, told: bool) -> tuple[ctypes.c_long, bytes, object]:
    """The number of seccomp(2), a struct sock_fprog, and the filter that it points to, which must
    live as long.
    """
    code = program(policy, told)
    kept = ctypes.create_string_buffer(code, len(code))
    record = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept))
    return ctypes.c_long(numbers()["seccomp"]), record, kept


class _Decisions:
    """Which range a number is in, found by halving. A jump goes forwards only, and not far, so the
    instructions are made from the last to the first: returns that are near are shared.
    """

    def __init__(self, ranges: list[tuple[int, bytes]]) -> None:
        self._backwards: list[bytes] = []
        self._returns: dict[bytes, int] = {}  # the place of each, counted from the end
        self._tree(ranges)
        self.code = b"".join(reversed(self._backwards))

    def _tree(self, ranges: list[tuple[int, bytes]]) -> int | bytes:
        """The place of its first instruction; or that itself, where it is the only one."""
        if len(ranges) == 1:
            body = ranges[0][1]
            if len(body) == INSTRUCTION:
                return body
            for at in reversed(range(0, len(body), INSTRUCTION)):
                self._backwards.append(body[at : at + INSTRUCTION])
            return len(self._backwards)
        middle = len(ranges) // 2
        high, low = self._tree(ranges[middle:]), self._tree(ranges[:middle])
        above, below = self._near(high), self._near(low)
        here, last = len(self._backwards), ranges[middle][0] - 1
        self._backwards.append(_jump(JUMP_ABOVE, last, here - above, here - below))
        return here + 1

    def _near(self, aim: int | bytes) -> int:
        """A place from which it goes on as from that one, near enough for a jump."""
        here = len(self._backwards)
        place = self._returns.get(aim) if isinstance(aim, bytes) else aim
        if place is not None and here - place <= FARTHEST:
            return place
        if isinstance(aim, bytes):
            self._backwards.append(aim)
            self._returns[aim] = here + 1
        else:
            self._backwards.append(struct.pack("HBBI", JUMP, 0, 0, here - aim))
        return here + 1


def _case(case: CallCase) -> bytes:
    """Returns where all its tests hold; goes on behind itself where one does not."""
    code = _return(ALLOW if case.error is None else ERRNO | case.error)
    for test in reversed(case.tests):
        count, beyond = len(test.values), len(code) // 8
        code = b"".join(
            [
                _load(ARGUMENTS_AT + 8 * test.argument),
                struct.pack("HBBI", AND, 0, 0, test.mask) if test.mask != 0xFFFFFFFF else b"",
                *(
                    _jump(JUMP_EQUAL, value, count - 1 - place + (beyond if test.none else 0), 0)
                    for place, value in enumerate(test.values[:-1])
                ),
                _jump(JUMP_EQUAL, test.values[-1], *((beyond, 0) if test.none else (0, beyond))),
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
