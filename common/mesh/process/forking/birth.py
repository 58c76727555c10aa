"""Asks this host's nursery for a process: a fork of one that has imported what the process needs.

One connection a process. The owner sends an order with the process's descriptors, the nursery forks
and answers its pid, the owner says go. An owner that has given up by then closes the connection,
and the child ends before it has begun. At the end of the child its exit status comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

NURSERY_ENV = "MESHRL_NURSERY"  # path of the nursery's socket; `off`: every process is spawned
OFF = "off"
ANSWER_S = 2.0  # for a fork; an owner's loop stands still meanwhile
ORDER_LIMIT = 120_000  # bytes of an order, which is one message: below what a socket's buffer takes
DESCRIPTORS = 6  # most in an order
GO = b"go"


class NoBirth(Exception):
    """The nursery is not there, not able, or not willing; the process is to be spawned."""


@dataclass(frozen=True)
class ForkOrder:
    """What a forked process shall be. Its descriptors travel beside it, in the order of `passed`:
    `cwd`, `stdout`, `stderr`, and perhaps `death` and `channel`.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    passed: list[str]
    executable: str
    niceness: int
    guarded: bool = False  # see `guard`

    @classmethod
    def decode(cls, message: bytes) -> ForkOrder:
        """The order in a message; ValueError or TypeError if there is none."""
        return cls(**json.loads(message))

    def encode(self) -> bytes:
        """The message; NoBirth when it is too long for one."""
        message = json.dumps(asdict(self)).encode()
        if len(message) > ORDER_LIMIT:
            raise NoBirth(f"an order of {len(message)} bytes; the limit is {ORDER_LIMIT}")
        return message


def chosen(environment: Mapping[str, str]) -> Path | None:
    """The nursery that a process of this environment may come from; None: it is spawned, as it also
    is below a debugger, which sees what it has started itself only.
    """
    named = environment.get(NURSERY_ENV, "")
    debugged = sys.gettrace() is not None or "pydevd" in sys.modules
    return Path(named) if named not in ("", OFF) and not debugged else None


def short(path: Path, directory: int) -> str:
    """A name of the socket `path` that fits into an address, whatever the length of the path;
    `directory` is an open descriptor of its directory.
    """
    return f"/proc/self/fd/{directory}/{path.name}"


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user."""
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", peer)
    return bool(uid == os.geteuid())


def connect(connection: socket.socket, nursery: Path) -> None:
    """Connects to a nursery; OSError when it is not there, or another user's."""
    directory = os.open(nursery.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(short(nursery, directory))
    finally:
        os.close(directory)
    if not same_user(connection):
        raise PermissionError("it belongs to another user")


def answers(nursery: Path) -> bool:
    """Whether a nursery refuses what is no order, as it does while it serves; within ANSWER_S."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connect(connection, nursery)
            connection.send(b"{}")
            return bool(connection.recv(ORDER_LIMIT))
        except OSError:
            return False


class Birth:
    """The owner's end of a forked process's connection."""

    def __init__(self, connection: socket.socket, pid: int, guard: int = 0) -> None:
        """`guard`: the pid of the process's guard, whose end is told as its end."""
        self.pid, self.guard = pid, guard
        self._connection: socket.socket | None = connection
        self._status: int | None = None

    @classmethod
    def ask(cls, nursery: Path, order: ForkOrder, descriptors: Mapping[str, int]) -> Birth:
        """A process that waits for `go`; NoBirth says why there is none."""
        message = order.encode()
        with contextlib.ExitStack() as on_failure:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(connection.close)
            try:
                connection.settimeout(ANSWER_S)
                connect(connection, nursery)
                socket.send_fds(connection, [message], [descriptors[n] for n in order.passed])
                answer = json.loads(connection.recv(ORDER_LIMIT) or b"{}")
            except (OSError, ValueError) as error:
                raise NoBirth(f"{nursery}: {error}") from error
            if "pid" not in answer:
                raise NoBirth(f"{nursery}: {answer.get('refused', 'it has ended')}")
            connection.setblocking(False)
            on_failure.pop_all()
        return cls(connection, answer["pid"], answer.get("guard", 0))

    def go(self) -> None:
        """Lets the process begin; nothing happens if it has ended."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(GO)

    def poll(self) -> int | None:
        """The exit status (negative: a signal), once the nursery has told it."""
        if self._status is None and self._connection is not None:
            try:
                told = self._connection.recv(ORDER_LIMIT)
            except BlockingIOError:
                return None
            except OSError:
                told = b""
            if told:
                self._status = int(json.loads(told)["status"])
            self.close()
        return self._status

    @property
    def silent(self) -> bool:
        """Whether the nursery has ended before the process, so that nothing will be told."""
        return self._connection is None and self._status is None

    def fileno(self) -> int:
        """What becomes readable when the nursery tells the status, or ends; -1 after that."""
        return -1 if self._connection is None else self._connection.fileno()

    def close(self) -> None:
        """Closes the connection; a process that was not let go ends."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
