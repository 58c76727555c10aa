"""One host: commands in it, its files as this machine sees them, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from loadtests.namespaces import groups
from loadtests.namespaces.init import HOME

RUN_S = 300.0
# A command is in its host's groups, and begins where commands of that host do.
ENTER = f'for group in $1; do echo 0 >"$group"; done; shift; cd {HOME}; exec "$@"'
END_S = 15.0  # limit for a command to exit after its signal


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


class Failed(RuntimeError):
    """A command in a host has ended with another status than 0."""


@dataclass
class Host:
    """A host that is up. `init`: pid of its first process, as this machine sees it."""

    name: str
    number: int
    address: str
    init: int
    groups: list[Path] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def path(self, inside: str | Path) -> Path:
        """Return the path on this machine of a file of the host, while the host is up."""
        return Path(f"/proc/{self.init}/root") / str(inside).lstrip("/")

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the host, without its init process."""
        found = []
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace:
                    found.append(process)
        return [process for process in found if process.pid != self.init]

    async def run(self, *words: str, check: bool = True, timeout_s: float = RUN_S) -> Ran:
        """Run a command, with this program's `meshrl` and `python`; return its result.

        Failed if its status is not 0 and `check`.
        """
        async with self.started(*words, pipes=True) as command, asyncio.timeout(timeout_s):
            out, err = await command.communicate()
        status = command.returncode if command.returncode is not None else -1
        if status and check:
            raise Failed(f"{' '.join(words)} on {self.name} ends with {status}: {err.decode()}")
        return Ran(status, out.decode(), err.decode())

    @contextlib.asynccontextmanager
    async def started(
        self, *words: str, log: str = "", pipes: bool = False
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Start a command, and end it with the block if it has not exited.

        Its output goes to the file `log` in the host, to pipes, or nowhere.
        """
        with contextlib.ExitStack() as opened:
            where = asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL
            if log:
                where = opened.enter_context(self.path(HOME).joinpath(log).open("ab")).fileno()
            command = await asyncio.create_subprocess_exec(
                *self._entering(words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=where,
                stderr=where,
                env=self.environment,
            )
        try:
            yield command
        finally:
            await asyncio.shield(_kill_processes(command))

    def signal(self, command: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """Send a signal to a command itself, not to its `nsenter` parent."""
        for child in _below(command.pid)[:1]:
            child.send_signal(number)

    def _entering(self, words: Sequence[str]) -> list[str]:
        match words[0]:
            case "python":
                words = [sys.executable, *words[1:]]
            case "meshrl":
                words = [sys.executable, "-m", "meshrl", *words[1:]]
        spaces = [f"--{one}" for one in ("net", "mount", "uts", "ipc", "pid")]
        entering = ["sh", "-c", ENTER, "sh", " ".join(groups.entered(self.groups)), *words]
        return ["nsenter", f"--target={self.init}", *spaces, *entering]


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


async def _kill_processes(command: asyncio.subprocess.Process) -> None:
    """Kill a command's remaining processes.

    `nsenter` is stopped first, so that it starts no unseen process. It must reap the command
    afterwards: a host ends only when all its processes are reaped.
    """
    if command.returncode is not None:
        return
    async with asyncio.timeout(END_S):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            nsenter = psutil.Process(command.pid)
            nsenter.suspend()
            while nsenter.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                await asyncio.sleep(0.001)
            below = _below(command.pid)
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if not below:
                nsenter.kill()
            while command.returncode is None:  # it stops itself when a command was stopped
                nsenter.resume()
                await asyncio.sleep(0.01)
        await command.wait()
