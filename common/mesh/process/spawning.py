"""Process spawner: forks by the host's fork server where possible, else `exec`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.entry import child
from meshrl.common.mesh.process.entry.child import CHANNEL_FD
from meshrl.common.mesh.process.forking.fork_client import (
    ForkedProcess,
    ForkRequest,
    ForkUnavailable,
    select_fork_server,
)

FORK_SERVER_RETRY_S = 3.0  # without requests to a silent fork server: each blocks for 2 s


@dataclass(frozen=True)
class SpawnOptions:
    """Limits and ties of a process, and its channels to the process that spawns it."""

    own_session: bool = False
    die_with_parent: bool = True
    niceness: int = 0
    rlimits: Mapping[str, int] = field(default_factory=dict)  # by name without RLIMIT_, as "AS"
    has_channel: bool = (
        False  # a channel of frames: `meshrl.common.mesh.process.entry.child.ChildChannel`
    )
    pass_fds: Sequence[int] = ()  # they stay open in the process under their numbers
    # For processes that run a job's own code: all their descendants die with them and with the
    # spawning process, and their output is bounded (`meshrl.common.mesh.process.entry.guard`).
    is_guarded: bool = False


DEFAULT_OPTIONS = SpawnOptions()


@dataclass(frozen=True)
class SpawnRequest:
    """Request for a process; the fields are those of `Host.spawn`."""

    name: str
    argv: list[str]
    environment: dict[str, str]  # the complete environment
    log: Path | None = None
    options: SpawnOptions = DEFAULT_OPTIONS

    @property
    def module(self) -> str | None:
        """Module that the process runs in our interpreter; None for any other program."""
        return self.argv[2] if self.argv[:2] == [sys.executable, "-m"] else None

    @property
    def fork_server(self) -> Path | None:
        """Fork server that can fork the process; None to execute it."""
        plain = self.module is not None and not self.options.rlimits and not self.options.pass_fds
        return select_fork_server(self.environment) if plain else None

    def make_fork_request(self, descriptor_names: list[str]) -> ForkRequest:
        """Build the fork server's request for this process, with these descriptors."""
        assert self.module is not None
        return ForkRequest(
            module=self.module,
            arguments=self.argv[3:],
            environment=self.environment,
            descriptor_names=descriptor_names,
            executable=sys.executable,
            niceness=os.getpriority(os.PRIO_PROCESS, 0) + self.options.niceness,
            is_guarded=self.options.is_guarded,
        )


class Spawner:
    """Spawner of an owner's processes; those tied to the owner die when its pipe closes."""

    def __init__(self) -> None:
        # Only this process has the write end, so it closes at the exit of this process. None: no
        # child is tied to this process yet.
        self._death_pipe: tuple[int, int] | None = None
        self._fork_server_retry_at = 0.0

    def spawn(self, request: SpawnRequest) -> SystemChild:
        """Spawn the process.

        Raises Refused for a process that dies with its parent on any thread but the main one, and
        OSError if the spawn fails.
        """
        if (
            request.options.die_with_parent
            and threading.current_thread() is not threading.main_thread()
        ):
            # PDEATHSIG fires at the end of the spawning thread, not of the process.
            raise Refused(
                "only the main thread may spawn a child that exits with this process",
                where=request.name,
            )
        if request.options.is_guarded and not request.options.die_with_parent:
            raise ValueError(f"{request.name}: a guarded process must exit with its owner")
        ours: socket.socket | None = None
        with contextlib.ExitStack() as theirs:
            descriptors = {"stdout": 1, "stderr": 2}
            if request.log is not None:
                log = open_log(request.log)
                theirs.callback(os.close, log)
                descriptors |= {"stdout": log, "stderr": log}
            if request.options.die_with_parent:
                self._death_pipe = self._death_pipe or os.pipe()
                descriptors["death"] = self._death_pipe[0]
            if request.options.has_channel:
                ours, far = socket.socketpair()
                theirs.enter_context(far)
                ours.setblocking(False)
                descriptors["channel"] = far.fileno()
            birth = self._fork(request, descriptors)
            if birth is None:
                popen = execute(request, descriptors)
                return SystemChild(
                    request.name,
                    popen.pid,
                    popen=popen,
                    channel=ours,
                    leads_session=request.options.own_session and not request.options.is_guarded,
                    guard=popen.pid if request.options.is_guarded else 0,
                )
            child = SystemChild(
                request.name,
                birth.pid,
                forked=birth,
                channel=ours,
                leads_session=not request.options.is_guarded,
                guard=birth.guard_pid,
            )
            birth.start()
            return child

    def _fork(self, start: SpawnRequest, descriptors: Mapping[str, int]) -> ForkedProcess | None:
        """Fork the process by the fork server; return None if it is unavailable."""
        fork_server = start.fork_server
        if fork_server is None or time.monotonic() < self._fork_server_retry_at:
            return None
        here = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            passed = {"cwd": here, **descriptors}
            return ForkedProcess.request(fork_server, start.make_fork_request(list(passed)), passed)
        except ForkUnavailable as error:
            if isinstance(error.__cause__, TimeoutError):
                self._fork_server_retry_at = time.monotonic() + FORK_SERVER_RETRY_S
            return None
        finally:
            os.close(here)


def open_log(path: Path) -> int:
    """Open a file for appending and create its directory; return the descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def execute(start: SpawnRequest, descriptors: Mapping[str, int]) -> subprocess.Popen[bytes]:
    """Execute a process whose first code is `meshrl.common.mesh.process.entry.child`."""
    passed = list(start.options.pass_fds)
    if start.module is not None:
        first, program = ["-m", child.__name__], [f"module:{start.module}", *start.argv[3:]]
    else:  # without site-packages the interpreter starts in a third of the time
        first = ["-I", "-S", str(child.__file__)]
        program = [f"exec:{start.argv[0]}", *start.argv[1:]]
    options: list[str] = []
    environment = dict(start.environment)
    if "death" in descriptors:
        tie = (
            f"guard={descriptors['death']}" if start.options.is_guarded else f"parent={os.getpid()}"
        )
        options += [tie, f"death={descriptors['death']}"]
        passed.append(descriptors["death"])
    if "channel" in descriptors:
        environment[CHANNEL_FD] = str(descriptors["channel"])
        passed.append(descriptors["channel"])
    if start.options.niceness:
        options.append(f"nice={start.options.niceness}")
    options += [f"rlimit={name}:{value}" for name, value in start.options.rlimits.items()]
    return subprocess.Popen(
        [sys.executable, *first, *options, "--", *program],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=descriptors["stdout"],
        stderr=descriptors["stderr"],
        pass_fds=passed,
        start_new_session=start.options.own_session,
    )
