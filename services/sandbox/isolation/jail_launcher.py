"""Starts jails: an outer jail holds a zygote, which is asked for one jail after the other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.clock import Clock
from common.errors import MeshError, PeerLost
from common.process.handle import Child
from common.process.host import Host
from services.sandbox.isolation.cgroups import Cgroup, Homes
from services.sandbox.isolation.jails import DRAIN_S, Jail, JailFailed, Ran
from services.sandbox.isolation.limits import JailLimits
from services.sandbox.isolation.outer import PLAIN_ID, Outer
from services.sandbox.isolation.pipes import Output, Pipe

WARM_S = 60.0  # for a zygote's start, on a busy host
SEND_S = 30.0
TRIES = 3  # attempts to start a jail, should its zygote have ended
LEAVING_S, LEAVING_LOOKS = 0.002, 500  # for a free control group to become empty
STREAMS = ("stdin", "stdout", "stderr")
OVERHEAD_PROCESSES = 1  # the keeper
OVERHEAD_BYTES = 16 << 20  # what a fork and its kernel structures add to a control group


@dataclass(frozen=True)
class Interpreter:
    """What runs jailed Python."""

    python: str
    isolated: bool  # only the standard library
    places: tuple[str, ...]  # where it and its packages lie
    warm: tuple[str, ...] = ()

    @classmethod
    def own(cls) -> Interpreter:
        """Ours, without the packages of our environment."""
        base = os.path.realpath(sys.base_prefix)
        python = os.path.join(base, "bin", f"python{sys.version_info.major}")
        return cls(python, True, () if base.startswith("/usr") else (base,))


class JailLauncher:
    """Starts jails of one kind of interpreter."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        tier: str,
        interpreter: Interpreter,
        homes: Homes | None,
        log: Path | None = None,
    ) -> None:
        self._host, self.clock, self._log = host, clock, log
        self.tier, self._interpreter, self._homes = tier, interpreter, homes
        self._zygote: Child | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._groups: deque[Cgroup] = deque()
        self._made: list[Cgroup] = []
        self._numbers = itertools.count()
        self.started = 0  # jails

    @property
    def pid(self) -> int:
        """The pid of the outer jail; 0 while there is none."""
        return self._zygote.pid if self._zygote is not None else 0

    async def start(self) -> None:
        """Makes the outer jail and its zygote; JailFailed says why it cannot."""
        async with self._starting:
            if self._zygote is None or self._zygote.poll() is not None:
                await self._start()

    async def _start(self) -> None:
        self._drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        interpreter = self._interpreter
        outer = Outer(
            self.tier,
            theirs.fileno(),
            interpreter.python,
            interpreter.isolated,
            interpreter.places,
            interpreter.warm,
        )
        try:
            self._zygote = self._host.spawn(
                [sys.executable, "-m", "services.sandbox.isolation.outer", outer.argument()],
                name="zygote",
                log=self._log,
                own_session=True,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control = ours
        try:
            async with self.clock.timeout(WARM_S, "the start of a zygote"):
                word = await asyncio.get_running_loop().sock_recv(ours, 16)
        except (MeshError, OSError) as error:
            self._drop()
            raise JailFailed(f"no zygote: {error}", where="sandbox") from error
        if word != b"warm":
            self._drop()
            raise JailFailed(
                f"the outer jail ({self.tier}) ended at its start",
                where="sandbox",
                fix="its output is in the sandbox's log; `meshrl doctor` names what this host has",
            )

    def _drop(self) -> None:
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote = None
        if self._control is not None:
            self._control.close()
            self._control = None

    async def run(self, program: dict[str, Any], limits: JailLimits, stdin: bytes = b"") -> Ran:
        """A program in a fresh jail, to its end."""
        jail = await self.open(program, limits, stdin)
        return await jail.finish()

    async def open(
        self,
        program: dict[str, Any],
        limits: JailLimits,
        stdin: bytes = b"",
        *,
        cells: bool = False,
        peer: int = -1,
    ) -> Jail:
        """A jail in which `program` begins to run; the caller finishes or closes it.

        With `cells` it has a pipe to the guest beside the keeper's. `peer` is a descriptor of the
        guest's, which stays the caller's.
        """
        for attempt in range(1, TRIES + 1):
            try:
                jail = await self._opened(limits, stdin, cells, peer)
                break
            except (BrokenPipeError, ConnectionResetError) as error:  # the zygote has ended
                if attempt == TRIES:
                    raise JailFailed(f"no jail: {error}", where="sandbox") from error
                self._drop()
            except OSError as error:
                raise JailFailed(f"no jail: {error}", where="sandbox") from error
        try:
            if program["mode"] == "tests":
                program = {**program, "nonce": jail.nonce}
            await jail.keeper.send(self.clock, program, SEND_S)
            await jail.keeper.send(self.clock, {"nonce": jail.nonce}, SEND_S)
        except PeerLost:
            pass  # its end says why
        except BaseException:
            jail.close()
            raise
        return jail

    async def _opened(self, limits: JailLimits, stdin: bytes, cells: bool, peer: int) -> Jail:
        await self.start()
        assert self._control is not None
        group = await self._group(limits)
        scratch = ""
        output = Output(limits.output_bytes)
        pipes = [Pipe()]
        fds: dict[str, int] = {}
        given: list[int] = []
        try:
            given.append(_readable(stdin))
            given.append(output.opened())
            given.append(output.opened())
            fds = {"keeper": pipes[0].theirs, **dict(zip(STREAMS, given, strict=True))}
            if cells:
                pipes.append(Pipe())
                fds["cells"] = pipes[1].theirs
            if peer >= 0:
                fds["peer"] = peer
            for number, fd in enumerate(group.lists if group else ()):
                fds[f"group{number}"] = fd
            request: dict[str, Any] = {"limits": limits.document(), "descriptors": list(fds)}
            if self.tier != "bwrap":
                scratch = self._scratch()
                request |= {"scratch": scratch, "readable": self._readable()}
                request["limits"]["processes"] += _processes_of_user()
            packet = json.dumps(request).encode()
            socket.send_fds(self._control, [packet], list(fds.values()))
        except BaseException:
            for pipe in pipes:
                pipe.close()
            output.close()
            self._given_back(group, scratch)
            raise
        finally:
            for fd in given:
                os.close(fd)
            for pipe in pipes:
                pipe.handed()
        self.started += 1
        other = pipes[1] if cells else None

        def ended() -> None:
            self._given_back(group, scratch)

        return Jail(self.clock, limits, pipes[0], other, output, group, ended)

    def _readable(self) -> list[str]:
        interpreter = self._interpreter
        own = str(Path(__file__).parents[1] / "jail")
        places = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
        devices = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
        return [*places, *devices, *interpreter.places, own]

    def _scratch(self) -> str:
        """A directory on disk, where no mount namespace gives one in memory."""
        scratch = tempfile.mkdtemp(prefix="meshrl-jail-")
        if os.getuid() == 0:
            os.chown(scratch, PLAIN_ID, PLAIN_ID)
        return scratch

    async def _group(self, limits: JailLimits) -> Cgroup | None:
        """One that no jail is in. The last processes of a jail leave it a moment after its end."""
        if self._homes is None:
            return None
        group = self._empty_group()
        for _ in range(LEAVING_LOOKS):
            if group is not None or not self._groups:
                break
            await self.clock.sleep(LEAVING_S)
            group = self._empty_group()
        if group is None:
            group = Cgroup(self._homes, f"meshrl-jail-{os.getpid()}-{next(self._numbers)}")
            self._made.append(group)
        group.limit(limits.memory_bytes + OVERHEAD_BYTES, limits.processes + OVERHEAD_PROCESSES)
        return group

    def _empty_group(self) -> Cgroup | None:
        for _ in range(len(self._groups)):
            group = self._groups.popleft()
            if group.empty():
                return group
            self._groups.append(group)
        return None

    def _given_back(self, group: Cgroup | None, scratch: str) -> None:
        if group is not None:
            self._groups.append(group)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)

    async def stop(self) -> None:
        zygote = self._zygote
        self._drop()
        if zygote is not None:
            await zygote.wait(DRAIN_S)
        for group in self._made:
            for _ in range(100):
                if group.empty():
                    break
                await self.clock.sleep(0.02)
            group.remove()
        self._made, self._groups = [], deque()


def _readable(content: bytes) -> int:
    """A descriptor that reads `content`, and then the end."""
    if not content:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _processes_of_user() -> int:
    """Threads that the limit of a jail's user counts already, where it is not the jail's own."""
    user = PLAIN_ID if os.getuid() == 0 else os.getuid()
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == user:
                count += process.num_threads()
    return count
