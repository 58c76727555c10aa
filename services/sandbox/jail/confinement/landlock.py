"""Landlock: a process drops its own access to files, without namespaces or privileges.

The tier below bubblewrap, for hosts that refuse user namespaces (Docker's default profile). The
numbers are those of linux/landlock.h; the kernel's ABI version determines which of them it
supports.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from .syscalls import call_libc

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
VERSION_FLAG = 1
PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
# Rights on files in writable directories: no devices, no sockets, no requests to drivers.
NEVER_ALLOWED = 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15
# Bits of file access, of TCP, and of scopes (abstract sockets, signals) by the ABI that has them.
FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TCP_SINCE, TCP = 4, 3
SCOPES_SINCE, SCOPES = 6, 3
MIN_ABI = 3  # the first with truncation rights: below it, files that may be read can be emptied
TIER_MIN_ABI = (
    SCOPES_SINCE  # below, jails that share a user can signal each other and their init processes
)


def read_abi() -> int:
    """Return the ABI version of this kernel; 0: no Landlock."""
    try:
        flag = ctypes.c_uint(VERSION_FLAG)
        return call_libc("syscall", ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), flag)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process and its children to these files, and to signals inside the jail.

    Sets PR_SET_NO_NEW_PRIVS.
    """
    version = read_abi()
    everything = FILES[max(known for known in FILES if known <= version)]
    size = 24 if version >= SCOPES_SINCE else 16 if version >= TCP_SINCE else 8
    attributes = struct.pack("QQQ", everything, TCP, SCOPES)[:size]  # the kernel reads no more
    ruleset = _syscall(CREATE_RULESET, attributes, size, 0)
    try:
        for paths, access in ((readable, READ), (writable, everything & ~NEVER_ALLOWED)):
            for path in paths:
                _add_rule(ruleset, path, access)
        _syscall(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= FILE_ONLY
        _syscall(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", access, place), 0)
    finally:
        os.close(place)


def _syscall(number: int, *arguments: int | bytes) -> int:
    typed = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    return call_libc("syscall", ctypes.c_long(number), *typed)
