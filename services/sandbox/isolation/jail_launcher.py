"""Starts jails: an outer jail holds a zygote, which is asked for one jail after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, PeerLost
from meshrl.common.mesh.process.ends import limits as host_limits
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.starting import Spawning
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.isolation.jails.jail import DRAIN_S, Jail, JailFailed, Ran
from meshrl.services.sandbox.isolation.jails.pipes import JailOutput, Pipe
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.jails.zygotes import Zygote, ZygoteSilent
from meshrl.services.sandbox.isolation.outer_jail import outer
from meshrl.services.sandbox.isolation.outer_jail.interpreters import JAIL, Interpreter
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.isolation.resources.cgroups import Homes
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.places import JailPlace, JailPlaces
from meshrl.services.sandbox.isolation.runners import leftovers, spawner
from meshrl.services.sandbox.outcomes import KILLED, Ends

WARM_S = 60.0  # for a zygote's start, on a busy host
SEND_S = 30.0
AT_ONCE = 1 << 14  # characters of a program that a socket's buffer surely holds
TRIES = 3  # attempts to start a jail, should its zygote have ended
STREAMS = ("stdin", "stdout", "stderr")
READABLE = (  # under Landlock, beside the interpreter
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"),
    *("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)


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
        waits: WaitTable | None = None,
        ends: Ends | None = None,
    ) -> None:
        self._host, self.clock, self._log = host, clock, log
        self.tier, self._interpreter = tier, interpreter
        self.places = JailPlaces(clock, homes, interpreter.runner, tier == "landlock")
        self._waits, self._ends = waits or WaitTable(clock), ends or Ends()
        self._zygote: Zygote | None = None
        self._starting = asyncio.Lock()
        self._folders: list[Path] = []  # of a runner's containers
        self.started = 0  # jails

    @property
    def pid(self) -> int:
        """The pid of the outer jail; 0 while there is none."""
        return self._zygote.child.pid if self._zygote is not None else 0

    @property
    def zygote(self) -> int:
        """The pid of what forks jails in it; 0 while there is none."""
        return self._zygote.pid if self._zygote is not None else 0

    async def start(self) -> None:
        """Makes the outer jail and its zygote, if there is none; JailFailed says why it cannot."""
        if self._zygote is not None and not self._zygote.ended:
            return
        async with self._starting:
            code = self._zygote.child.poll() if self._zygote is not None else None
            if code is None and self._zygote is not None and self._zygote.ended:
                code = KILLED  # its end is seen before its parent, the outer jail, has ended
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"exit status {code}"
                self._ends.saw("zygote", code, how, self._log)
            if self._zygote is None or code is not None:
                await self._start()

    async def _start(self) -> None:
        self._drop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given, control = self._interpreter, str(theirs.fileno())
        try:
            if given.runner:
                self._folders.append(leftovers.folder())
                module, first = spawner.__name__, [control, str(self._folders[-1])]
            else:
                module, first = outer.__name__, [self.tier, control]
            child = self._host.spawn(
                [sys.executable, "-m", module, *first, given.encoded()],
                name="zygote",
                log=self._log,
                how=Spawning(own_session=True, pass_fds=[theirs.fileno()]),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        zygote = Zygote(self._host, self.clock, child, ours, self._waits)
        with contextlib.ExitStack() as undone:
            undone.callback(zygote.kill)
            try:
                warm = await zygote.warmed(WARM_S)
            except (MeshError, OSError) as error:
                raise JailFailed(f"no zygote: {error}", where="sandbox") from error
            if not warm:
                raise JailFailed(
                    f"the outer jail ({self.tier}) ended at its start",
                    where="sandbox",
                    fix="its output is in the sandbox's log; `meshrl doctor` names what "
                    "this host has",
                )
            undone.pop_all()
        self._zygote = zygote

    def _drop(self) -> None:
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote = None

    def _ended(self, zygote: Zygote) -> None:
        if self._zygote is zygote:
            self._zygote = None
            self._ends.saw("zygote", zygote.child.poll() or KILLED, "it has ended", self._log)
            zygote.kill()

    async def run(self, program: Program, limits: JailLimits, stdin: bytes = b"") -> Ran:
        return await (await self.open(program, limits, stdin)).finish()

    async def open(
        self, program: Program, limits: JailLimits, stdin: bytes = b"", peer: int = -1
    ) -> Jail:
        """A jail in which `program` begins to run; the caller finishes or closes it.

        `peer` is a descriptor of the guest's, which stays the caller's.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._begun(program, limits, stdin, peer)
            except (BrokenPipeError, ConnectionResetError, ZygoteSilent) as error:
                if attempt == TRIES:
                    raise JailFailed(f"no jail: {error}", where="sandbox") from error
            except OSError as error:
                fix = host_limits.hit(error)
                raise JailFailed(f"no jail: {error}", where="sandbox", fix=fix) from error

    async def _begun(self, program: Program, limits: JailLimits, stdin: bytes, peer: int) -> Jail:
        """One that its zygote says it has forked, and that has what it is to run."""
        jail, zygote, answer = await self._asked(program, limits, stdin, peer)
        telling: asyncio.Task[None] | None = None
        try:
            if len(program.source or "") < AT_ONCE:
                await self._tell(jail, program)
            else:
                telling = asyncio.get_running_loop().create_task(self._tell(jail, program))
            await zygote.begun(answer)
            if telling is not None:
                await telling
        except BaseException as error:
            if telling is not None:
                telling.cancel()
            jail.close()
            if isinstance(error, ZygoteSilent) and self._zygote is zygote:
                self._zygote = None  # another takes its place; jails that it has begun go on
                self._ends.saw("zygote", KILLED, f"it was killed: {error.message}", self._log)
                zygote.retire()
            if isinstance(error, ConnectionResetError):
                self._ended(zygote)
            raise
        return jail

    async def _tell(self, jail: Jail, program: Program) -> None:
        with contextlib.suppress(PeerLost):  # its end says why
            await jail.keeper.send(self.clock, program.frame(jail.nonce), SEND_S)
            await jail.keeper.send(self.clock, {"nonce": jail.nonce}, SEND_S)

    async def _asked(
        self, program: Program, limits: JailLimits, stdin: bytes, peer: int
    ) -> tuple[Jail, Zygote, asyncio.Future[None]]:
        """A jail that a zygote has been asked for, and what will be its answer."""
        await self.start()
        zygote = self._zygote
        assert zygote is not None
        place = await self.places.take(limits, zygote.child.pid)
        with contextlib.ExitStack() as handed, contextlib.ExitStack() as undone:
            undone.callback(self.places.give_back, place)
            output = JailOutput(limits.output_bytes)
            undone.callback(output.close)
            pipes: dict[str, Pipe] = {}
            fds: dict[str, int] = {}
            for name in ("keeper", "cells") if program.speaks else ("keeper",):
                pipes[name] = pipe = Pipe()
                handed.callback(pipe.handed)
                undone.callback(pipe.close)
                fds[name] = pipe.theirs
            for name in STREAMS:
                fds[name] = _readable(stdin) if name == "stdin" else output.opened()
                handed.callback(os.close, fds[name])
            if peer >= 0:
                fds["peer"] = peer
            if place.group is not None:
                fds |= {f"group{number}": fd for number, fd in enumerate(place.group.lists)}
                if place.group.usage >= 0:
                    fds["usage"] = place.group.usage
            packet = json.dumps(self._request(limits, place, list(fds), program.stands)).encode()
            try:
                answer = zygote.send(packet, list(fds.values()), lambda: self.places.leave(place))
            except (BrokenPipeError, ConnectionResetError):
                self._ended(zygote)
                raise
            undone.pop_all()
        self.started += 1

        def ended() -> None:
            self.places.leave(place)
            zygote.left()

        keeper, cells = pipes["keeper"], pipes.get("cells")
        jail = Jail(self.clock, limits, keeper, cells, output, place.group, ended)
        return jail, zygote, answer

    def _request(
        self, limits: JailLimits, place: JailPlace, descriptors: list[str], stands: bool
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "limits": limits.document(),
            "descriptors": descriptors,
            "nice": self.places.nice,
            "counted": place.group is not None,
            "stands": stands,
            "user": place.user,
        }
        if place.scratch:
            own = (*self._interpreter.places, *self._interpreter.packages, JAIL)
            request |= {"scratch": place.scratch, "readable": [*READABLE, *own]}
        if not place.user and self.places.shares_users:
            request["limits"]["processes"] += _processes_of_user()
        return request

    async def stop(self) -> None:
        zygote = self._zygote
        self._drop()
        if zygote is not None:
            await zygote.child.wait(DRAIN_S)
        for folder in self._folders:
            await leftovers.settled(self.clock, folder)
        self._folders = []
        await self.places.stop()


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
    user = users.PLAIN_ID if os.getuid() == 0 else os.getuid()
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == user:
                count += process.num_threads()
    return count
