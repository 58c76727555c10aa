"""The seccomp filter of jails: the system calls that jailed code is refused.

A list of what is refused, not of what is allowed: interpreters and the libraries under them use
hundreds of calls, and what namespaces, limits and a read-only root contain need not be refused.
Refused are ways out (namespaces, mounts, keys, tracing, modules), large attack surfaces (io_uring,
bpf, userfaultfd, perf), all sockets but pairs, System V and POSIX message objects (they outlive
processes), and every call that is younger than this list. Calls of another architecture kill.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct
from dataclasses import dataclass

from . import kernel

ALLOW = 0x7FFF0000
KILL = 0x80000000
ERRNO = 0x00050000
LAST_KNOWN = 462  # mseal, of Linux 6.10; younger calls answer ENOSYS, as on an older kernel
BLOCK = 10  # calls

# BPF instructions (linux/filter.h): load a word of the call's record, jump, return.
LOAD, JUMP_EQUAL, JUMP_ABOVE, JUMP_SET, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16

NEW_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWTIME
)
AF_UNIX = 1
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # type into a terminal
ASK_PERSONALITY = 0xFFFFFFFF

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: number on x86-64, on arm64 (asm/unistd_64.h, asm-generic/unistd.h of Linux 6.1); -1: none
CALLS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listmount": (458, 458),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_getsetattr": (245, 185),
    "mq_notify": (244, 184),
    "mq_open": (240, 180),
    "mq_timedreceive": (243, 183),
    "mq_timedsend": (242, 182),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "remap_file_pages": (216, 234),
    "request_key": (249, 218),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "statmount": (457, 457),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, -1),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, -1),
    "userfaultfd": (323, 282),
    "ustat": (136, -1),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}


@dataclass(frozen=True)
class Refusal:
    """A call is answered with `error` when the low word of an argument is, or is not, something.

    `test`: "always"; "bits", any of `value` is set; "is" one of `values`; "is not" any of them.
    """

    call: str
    error: int = errno.EPERM
    test: str = "always"
    argument: int = 0
    values: tuple[int, ...] = ()


_CONDITIONAL = (
    Refusal("clone", test="bits", values=(NEW_NAMESPACES,)),
    Refusal("clone3", error=errno.ENOSYS),  # its flags are out of a filter's sight: use clone
    Refusal("ioctl", test="is", argument=1, values=(TIOCSTI, TIOCLINUX)),
    Refusal("personality", test="is not", values=(ASK_PERSONALITY,)),
    Refusal("prlimit64", test="is not", values=(0,)),  # others' limits; its own are bounded
    Refusal("socketpair", test="is not", values=(AF_UNIX,)),
)
_ONE_GROUP = ("setsid", "setpgid")  # where only a process group can be killed as a whole
JAIL = _CONDITIONAL + tuple(
    Refusal(name)
    for name in CALLS
    if name not in _ONE_GROUP and name not in {refusal.call for refusal in _CONDITIONAL}
)
ONE_GROUP = JAIL + tuple(Refusal(name) for name in _ONE_GROUP)


class Unsupported(Exception):
    """No filter for this machine."""


@functools.lru_cache(maxsize=4)  # a zygote makes them once, before it forks
def program(refusals: tuple[Refusal, ...], machine: str = "") -> bytes:
    """The filter for `machine` (default: this one), as an array of struct sock_filter.

    Numbers are sorted into blocks that a call above them jumps over: the kernel runs the filter for
    every call that there is when it is installed, which is once for each jail.
    """
    architecture, column = _architecture(machine or platform.machine())
    code = [
        _load(ARCHITECTURE_AT),
        _jump(JUMP_EQUAL, architecture, 1, 0),
        _return(KILL),
        _load(NUMBER_AT),
        _jump(JUMP_ABOVE, LAST_KNOWN, 0, 1),  # numbers of x32 are above it, too
        _return(ERRNO | errno.ENOSYS),
    ]
    known = {CALLS[refusal.call][column]: refusal for refusal in refusals}
    numbers = sorted(number for number in known if number >= 0)
    for start in range(0, len(numbers), BLOCK):
        block: list[bytes] = []
        for number in numbers[start : start + BLOCK]:
            body = _body(known[number])
            block += [_jump(JUMP_EQUAL, number, 0, len(body)), *body]
        block.append(_return(ALLOW))
        code += [_jump(JUMP_ABOVE, numbers[start : start + BLOCK][-1], len(block), 0), *block]
    return b"".join([*code, _return(ALLOW)])


def install(refusals: tuple[Refusal, ...]) -> None:
    """Refuses them to this process and all that it starts, for ever; takes PR_SET_NO_NEW_PRIVS."""
    code = program(refusals)
    kept = ctypes.create_string_buffer(code, len(code))
    record = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept))
    buffer = ctypes.create_string_buffer(record, len(record))
    PR_SET_SECCOMP, FILTER = 22, 2
    kernel.prctl(PR_SET_SECCOMP, FILTER, ctypes.addressof(buffer))


def _architecture(machine: str) -> tuple[int, int]:
    if machine not in ARCHITECTURES:
        raise Unsupported(f"no list of system calls for {machine}; there are x86_64 and aarch64")
    return ARCHITECTURES[machine]


def _body(refusal: Refusal) -> list[bytes]:
    refused = _return(ERRNO | refusal.error)
    if refusal.test == "always":
        return [refused]
    loaded, again = _load(ARGUMENTS_AT + 8 * refusal.argument), _load(NUMBER_AT)
    if refusal.test == "bits":
        return [loaded, _jump(JUMP_SET, refusal.values[0], 0, 1), refused, again]
    count = len(refusal.values)
    if refusal.test == "is":  # a match jumps to the refusal, the end past it
        tests = [_jump(JUMP_EQUAL, v, count - 1 - i, 0) for i, v in enumerate(refusal.values)]
        tests[-1] = _jump(JUMP_EQUAL, refusal.values[-1], 0, 1)
        return [loaded, *tests, refused, again]
    tests = [_jump(JUMP_EQUAL, v, count - i, 0) for i, v in enumerate(refusal.values)]
    return [loaded, *tests, refused, again]


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", LOAD, 0, 0, offset)


def _jump(test: int, value: int, then: int, otherwise: int) -> bytes:
    return struct.pack("HBBI", test, then, otherwise, value)


def _return(action: int) -> bytes:
    return struct.pack("HBBI", RETURN, 0, 0, action)
