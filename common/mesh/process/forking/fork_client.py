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

FORK_SERVER_ENV = "MESHRL_NURSERY"  # path of the nursery's socket; `off`: every process is spawned
FORK_SERVER_OFF = "off"
ANSWER_TIMEOUT_S = 2.0  # for a fork; an owner's loop stands still meanwhile
MAX_REQUEST_BYTES = (
    120_000  # bytes of an order, which is one message: below what a socket's buffer takes
)
MAX_DESCRIPTORS = 6  # most in an order
START_MESSAGE = b"go"


class ForkUnavailable(Exception):
    """The nursery is not there, not able, or not willing; the process is to be spawned."""


@dataclass(frozen=True)
class ForkRequest:
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
    def decode(cls, message: bytes) -> ForkRequest:
        """The order in a message; ValueError or TypeError if there is none."""
        return cls(**json.loads(message))

    def encode(self) -> bytes:
        """The message; NoBirth when it is too long for one."""
        message = json.dumps(asdict(self)).encode()
        if len(message) > MAX_REQUEST_BYTES:
            raise ForkUnavailable(
                f"an order of {len(message)} bytes; the limit is {MAX_REQUEST_BYTES}"
            )
        return message


def select_fork_server(environment: Mapping[str, str]) -> Path | None:
    """The nursery that a process of this environment may come from; None: it is spawned, as it also
    is below a debugger, which sees what it has started itself only.
    """
    named = environment.get(FORK_SERVER_ENV, "")
    debugged = sys.gettrace() is not None or "pydevd" in sys.modules
    return Path(named) if named not in ("", FORK_SERVER_OFF) and not debugged else None


def shorten_socket_path(path: Path, directory: int) -> str:
    """A name of the socket `path` that fits into an address, whatever the length of the path;
    `directory` is an open descriptor of its directory.
    """
    return f"/proc/self/fd/{directory}/{path.name}"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user."""
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", peer)
    return bool(uid == os.geteuid())


def connect(connection: socket.socket, fork_server: Path) -> None:
    """Connects to a nursery; OSError when it is not there, or another user's."""
    directory = os.open(fork_server.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(shorten_socket_path(fork_server, directory))
    finally:
        os.close(directory)
    if not is_same_user(connection):
        raise PermissionError("it belongs to another user")


def is_answering(fork_server: Path) -> bool:
    """Whether a nursery refuses what is no order, as it does while it serves; within ANSWER_S."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connect(connection, fork_server)
            connection.send(b"{}")
            return bool(connection.recv(MAX_REQUEST_BYTES))
        except OSError:
            return False


class ForkedProcess:
    """The owner's end of a forked process's connection."""

    def __init__(self, connection: socket.socket, pid: int, guard_pid: int = 0) -> None:
        """`guard`: the pid of the process's guard, whose end is told as its end."""
        self.pid, self.guard_pid = pid, guard_pid
        self._connection: socket.socket | None = connection
        self._status: int | None = None

    @classmethod
    def request(
        cls, fork_server: Path, request: ForkRequest, descriptors: Mapping[str, int]
    ) -> ForkedProcess:
        """A process that waits for `go`; NoBirth says why there is none."""
        message = request.encode()
        with contextlib.ExitStack() as on_failure:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(connection.close)
            try:
                connection.settimeout(ANSWER_TIMEOUT_S)
                connect(connection, fork_server)
                socket.send_fds(connection, [message], [descriptors[n] for n in request.passed])
                answer = json.loads(connection.recv(MAX_REQUEST_BYTES) or b"{}")
            except (OSError, ValueError) as error:
                raise ForkUnavailable(f"{fork_server}: {error}") from error
            if "pid" not in answer:
                raise ForkUnavailable(f"{fork_server}: {answer.get('refused', 'it has ended')}")
            connection.setblocking(False)
            on_failure.pop_all()
        return cls(connection, answer["pid"], answer.get("guard", 0))

    def start(self) -> None:
        """Lets the process begin; nothing happens if it has ended."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(START_MESSAGE)

    def poll(self) -> int | None:
        """The exit status (negative: a signal), once the nursery has told it."""
        if self._status is None and self._connection is not None:
            try:
                told = self._connection.recv(MAX_REQUEST_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                told = b""
            if told:
                self._status = int(json.loads(told)["status"])
            self.close()
        return self._status

    @property
    def is_status_lost(self) -> bool:
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
