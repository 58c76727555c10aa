"""What a hostile program is, and the blocks that several families are built of.

A program prints ESCAPED when it has done what it must not. It is contained when that word never
appears, when it ends as one of `ends`, and when what `runner` looks at outside is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY = ("ok", "timeout", "out_of_memory", "output_limit", "refused", "crashed")
SPENT = ("timeout", "out_of_memory", "refused", "crashed")
CANARY = "@CANARY@"  # stands for a file outside that every user may read
OWN = "@OWN@"  # for one that belongs to the user of the jails, where root does not make them
SECRET = "@SECRET@"  # for 24 bits, as 6 hexadecimal digits, that only the sender of a pair is told
NAME = "@NAME@"  # for a word that both programs of a pair know
SENT = "sent"  # what a sender prints once its word is on the way; it goes on until it is ended


@dataclass(frozen=True)
class Escape:
    name: str
    source: str
    ends: tuple[str, ...] = ANY
    mode: str = "program"


@dataclass(frozen=True)
class Pair:
    """Two programs in two jails at once. They talk when the receiver prints the sender's secret, or
    ESCAPED where the sender only has to be there to do harm.
    """

    name: str
    sender: str
    receiver: str


@dataclass(frozen=True)
class Left:
    """Cells of a session after which nothing of it may run until the next, which answers by type,
    and with `said` if that is given.
    """

    name: str
    cells: tuple[str, ...]
    said: str = ""


SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    typed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *typed)
    return result if result >= 0 else -ctypes.get_errno()
def called(number, *arguments):
    result = syscall(number, *arguments)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
"""


def opens_socket(call: str) -> str:
    return f"""
import socket
try:
    s = {call}
    print("ESCAPED", s)
except OSError as error:
    print("kept in", error)
"""


def refused_call(name: str, number: int, *arguments: object) -> Escape:
    """A system call (its number on x86-64) that must not succeed."""
    text = ", ".join(map(str, (number, *arguments)))
    source = (
        SYSCALL
        + f"""
result = syscall({text})
print("ESCAPED" if result >= 0 else "kept in", result)
"""
    )
    return Escape(name, source, ("ok",))


def reads(path: str) -> str:
    return f"""
try:
    with open({path!r}, "rb") as file:
        print("ESCAPED", file.read(64))
except OSError as error:
    print("kept in", error)
"""


def writes(path: str) -> str:
    return f"""
try:
    with open({path!r}, "ab") as file:
        file.write(b"x")
        file.flush()
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
"""


def tries(*attempts: str, setup: str = "") -> str:
    """Expressions, each of which must fail."""
    listed = ", ".join(f"({text!r}, lambda: {text})" for text in attempts)
    return f"""
import os
{setup}
for name, attempt in ({listed},):
    try:
        print("ESCAPED", name, attempt())
    except (OSError, ValueError) as error:
        print("kept in", name, error)
"""
