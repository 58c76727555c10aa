"""Client of this host's fork server, which forks a process that has imported the needed modules.

Each process has one connection. The owner sends a request with the process's descriptors, the fork
server forks and returns the pid, and the owner sends go. If the owner closes the connection before
that, the child exits before it runs the program. When the child exits, the fork server sends its
exit status.
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

FORK_SERVER_ENV = (
    "MESHRL_FORK_SERVER"  # path of the fork server's socket; `off`: spawn every process
)
FORK_SERVER_OFF = "off"
ANSWER_TIMEOUT_S = 2.0  # seconds for a fork, which blocks the owner's event loop
MAX_REQUEST_BYTES = (
    120_000  # of a request, which is one message: below the size of a socket's buffer
)
MAX_DESCRIPTORS = 6  # per request
START_MESSAGE = b"go"


class ForkUnavailable(Exception):
    """Error raised when the fork server is missing, unable or rejects a request; spawn the process
    instead.
    """


@dataclass(frozen=True)
class ForkRequest:
    """Description of a process to fork.

    Its descriptors travel beside it, in the order of `descriptor_names`: `cwd`, `stdout`,
    `stderr`, and optionally `death` and `channel`.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    descriptor_names: list[str]
    executable: str
    niceness: int
    is_guarded: bool = False  # see `guard`

    @classmethod
    def decode(cls, message: bytes) -> ForkRequest:
        """Decode a request; raise ValueError or TypeError if the message is none."""
        return cls(**json.loads(message))

    def encode(self) -> bytes:
        """Encode the request; raise ForkUnavailable if it is too long for one message."""
        message = json.dumps(asdict(self)).encode()
        if len(message) > MAX_REQUEST_BYTES:
            raise ForkUnavailable(
                f"a fork request has {len(message)} bytes; the limit is {MAX_REQUEST_BYTES}"
            )
        return message


def select_fork_server(environment: Mapping[str, str]) -> Path | None:
    """Select the fork server for a process with this environment; None to spawn the process.

    A process under a debugger is spawned, because a debugger follows only processes that it
    started.
    """
    named = environment.get(FORK_SERVER_ENV, "")
    debugged = sys.gettrace() is not None or "pydevd" in sys.modules
    return Path(named) if named not in ("", FORK_SERVER_OFF) and not debugged else None


def shorten_socket_path(path: Path, directory: int) -> str:
    """Return a short name of the socket `path` that fits into a socket address.

    `directory` is an open descriptor of the socket's directory.
    """
    return f"/proc/self/fd/{directory}/{path.name}"


def is_same_user(connection: socket.socket) -> bool:
    """Return True if the peer process runs as this process's user."""
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", peer)
    return bool(uid == os.geteuid())


def connect(connection: socket.socket, fork_server: Path) -> None:
    """Connect to a fork server; raise OSError if it is missing or belongs to another user."""
    directory = os.open(fork_server.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(shorten_socket_path(fork_server, directory))
    finally:
        os.close(directory)
    if not is_same_user(connection):
        raise PermissionError("it belongs to another user")


def is_answering(fork_server: Path) -> bool:
    """Return True if a fork server rejects an invalid request within ANSWER_TIMEOUT_S, so it is
    serving.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connect(connection, fork_server)
            connection.send(b"{}")
            return bool(connection.recv(MAX_REQUEST_BYTES))
        except OSError:
            return False


class ForkedProcess:
    """Owner's end of a forked process's connection."""

    def __init__(self, connection: socket.socket, pid: int, guard_pid: int = 0) -> None:
        """Create the owner's end. `guard_pid` is the pid of the process's guard, whose exit counts
        as the process's.
        """
        self.pid, self.guard_pid = pid, guard_pid
        self._connection: socket.socket | None = connection
        self._status: int | None = None

    @classmethod
    def request(
        cls, fork_server: Path, request: ForkRequest, descriptors: Mapping[str, int]
    ) -> ForkedProcess:
        """Request a process that waits for `go`; raise ForkUnavailable with the reason if there is
        none.
        """
        message = request.encode()
        with contextlib.ExitStack() as on_failure:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(connection.close)
            try:
                connection.settimeout(ANSWER_TIMEOUT_S)
                connect(connection, fork_server)
                socket.send_fds(
                    connection, [message], [descriptors[n] for n in request.descriptor_names]
                )
                answer = json.loads(connection.recv(MAX_REQUEST_BYTES) or b"{}")
            except (OSError, ValueError) as error:
                raise ForkUnavailable(f"{fork_server}: {error}") from error
            if "pid" not in answer:
                raise ForkUnavailable(f"{fork_server}: {answer.get('refused', 'it has exited')}")
            connection.setblocking(False)
            on_failure.pop_all()
        return cls(connection, answer["pid"], answer.get("guard", 0))

    def start(self) -> None:
        """Let the process run its program; do nothing if it has exited."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(START_MESSAGE)

    def poll(self) -> int | None:
        """Return the exit status (negative: a signal) once the fork server has sent it, else
        None.
        """
        if self._status is None and self._connection is not None:
            try:
                report = self._connection.recv(MAX_REQUEST_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                report = b""
            if report:
                self._status = int(json.loads(report)["status"])
            self.close()
        return self._status

    @property
    def is_status_lost(self) -> bool:
        """True if the fork server exited before the process, so that no status will arrive."""
        return self._connection is None and self._status is None

    def fileno(self) -> int:
        """Return a descriptor that is readable once the status or the server's exit arrives; -1
        after that.
        """
        return -1 if self._connection is None else self._connection.fileno()

    def close(self) -> None:
        """Close the connection; a process that has not started its program exits."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
