"""Launcher of jails: an outer jail holds a zygote, which forks one jail for each request."""

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
from meshrl.common.mesh.process.diagnosis import host_limits as host_limits
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.isolation.jails.jail import DRAIN_S, Jail, JailFailed, ProgramResult
from meshrl.services.sandbox.isolation.jails.pipes import JailOutput, Pipe
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.jails.zygote_client import ZygoteClient, ZygoteUnresponsive
from meshrl.services.sandbox.isolation.outer_jail import launcher
from meshrl.services.sandbox.isolation.outer_jail.interpreters import JAIL_PACKAGE, Interpreter
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.isolation.resources.cgroups import CgroupParents
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.resource_pool import (
    JailResourcePool,
    JailResources,
)
from meshrl.services.sandbox.isolation.runners import container_cleanup, spawner
from meshrl.services.sandbox.outcomes import KILLED_EXIT_CODE, ExitReporter

WARM_S = 60.0  # for a zygote's start, on a busy host
SEND_S = 30.0
INLINE_SEND_CHARACTERS = 1 << 14  # characters of a program that a socket's buffer always holds
TRIES = 3  # attempts to start a jail, if its zygote has ended
STREAMS = ("stdin", "stdout", "stderr")
READABLE = (  # under Landlock, beside the interpreter
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"),
    *("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
)


class JailLauncher:
    """Launcher of jails with one kind of interpreter."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        tier: str,
        interpreter: Interpreter,
        cgroup_parents: CgroupParents | None,
        log: Path | None = None,
        waits: WaitTable | None = None,
        exit_reporter: ExitReporter | None = None,
    ) -> None:
        self._host, self.clock, self._log = host, clock, log
        self.tier, self._interpreter = tier, interpreter
        self.resource_pool = JailResourcePool(
            clock, cgroup_parents, interpreter.runner, tier == "landlock"
        )
        self._waits, self._exit_reporter = (
            waits or WaitTable(clock),
            exit_reporter or ExitReporter(),
        )
        self._zygote: ZygoteClient | None = None
        self._start_lock = asyncio.Lock()
        self._container_directories: list[Path] = []  # of a runner's containers
        self.started_count = 0  # jails

    @property
    def pid(self) -> int:
        """The pid of the outer jail; 0 without one."""
        return self._zygote.child.pid if self._zygote is not None else 0

    @property
    def zygote_pid(self) -> int:
        """The pid of the process that forks jails in it; 0 without one."""
        return self._zygote.pid if self._zygote is not None else 0

    async def start(self) -> None:
        """Start the outer jail and its zygote, if there is none; JailFailed has the reason of a
        failure.
        """
        if self._zygote is not None and not self._zygote.has_exited:
            return
        async with self._start_lock:
            code = self._zygote.child.poll() if self._zygote is not None else None
            if code is None and self._zygote is not None and self._zygote.has_exited:
                code = KILLED_EXIT_CODE  # it ends before its parent, the outer jail
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"exit status {code}"
                self._exit_reporter.record_exit("zygote", code, how, self._log)
            if self._zygote is None or code is not None:
                await self._start_zygote()

    async def _start_zygote(self) -> None:
        self._kill_zygote()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given, control = self._interpreter, str(theirs.fileno())
        try:
            if given.runner:
                self._container_directories.append(container_cleanup.create_directory())
                module, first = spawner.__name__, [control, str(self._container_directories[-1])]
            else:
                module, first = launcher.__name__, [self.tier, control]
            child = self._host.spawn(
                [sys.executable, "-m", module, *first, given.encode()],
                name="zygote",
                log=self._log,
                options=SpawnOptions(own_session=True, pass_fds=[theirs.fileno()]),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        zygote = ZygoteClient(self._host, self.clock, child, ours, self._waits)
        with contextlib.ExitStack() as undone:
            undone.callback(zygote.kill)
            try:
                warm = await zygote.wait_ready(WARM_S)
            except (MeshError, OSError) as error:
                raise JailFailed(f"no zygote could be started: {error}", where="sandbox") from error
            if not warm:
                raise JailFailed(
                    f"the outer jail ({self.tier}) exited during its start",
                    where="sandbox",
                    fix=(
                        "Read the sandbox's log, and run `meshrl doctor` for the capabilities "
                        "of this host"
                    ),
                )
            undone.pop_all()
        self._zygote = zygote

    def _kill_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote = None

    def _zygote_exited(self, zygote: ZygoteClient) -> None:
        if self._zygote is zygote:
            self._zygote = None
            self._exit_reporter.record_exit(
                "zygote",
                zygote.child.poll() or KILLED_EXIT_CODE,
                "the zygote has exited",
                self._log,
            )
            zygote.kill()

    async def run(
        self, program: JailProgram, limits: JailLimits, stdin: bytes = b""
    ) -> ProgramResult:
        return await (await self.open(program, limits, stdin)).finish()

    async def open(
        self, program: JailProgram, limits: JailLimits, stdin: bytes = b"", peer: int = -1
    ) -> Jail:
        """Start `program` in a jail, which the caller finishes or closes.

        `peer` is a descriptor for the guest; it remains the caller's.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._open_once(program, limits, stdin, peer)
            except (BrokenPipeError, ConnectionResetError, ZygoteUnresponsive) as error:
                if attempt == TRIES:
                    raise JailFailed(
                        f"no jail could be started: {error}", where="sandbox"
                    ) from error
            except OSError as error:
                fix = host_limits.explain_hit_limit(error)
                raise JailFailed(
                    f"no jail could be started: {error}", where="sandbox", fix=fix
                ) from error

    async def _open_once(
        self, program: JailProgram, limits: JailLimits, stdin: bytes, peer: int
    ) -> Jail:
        """Start a jail: its zygote has forked it, and it has its program."""
        jail, zygote, answer = await self._request_jail(program, limits, stdin, peer)
        telling: asyncio.Task[None] | None = None
        try:
            if len(program.source or "") < INLINE_SEND_CHARACTERS:
                await self._send_program(jail, program)
            else:
                telling = asyncio.get_running_loop().create_task(self._send_program(jail, program))
            await zygote.wait_forked(answer)
            if telling is not None:
                await telling
        except BaseException as error:
            if telling is not None:
                telling.cancel()
            jail.close()
            if isinstance(error, ZygoteUnresponsive) and self._zygote is zygote:
                self._zygote = None  # another replaces it; jails that it has forked continue
                self._exit_reporter.record_exit(
                    "zygote", KILLED_EXIT_CODE, f"the zygote was killed: {error.message}", self._log
                )
                zygote.retire()
            if isinstance(error, ConnectionResetError):
                self._zygote_exited(zygote)
            raise
        return jail

    async def _send_program(self, jail: Jail, program: JailProgram) -> None:
        with contextlib.suppress(PeerLost):  # its exit has the reason
            await jail.init_channel.send(self.clock, program.to_frame(jail.nonce), SEND_S)
            await jail.init_channel.send(self.clock, {"nonce": jail.nonce}, SEND_S)

    async def _request_jail(
        self, program: JailProgram, limits: JailLimits, stdin: bytes, peer: int
    ) -> tuple[Jail, ZygoteClient, asyncio.Future[None]]:
        """Request a jail; return the jail, its zygote and the future of the zygote's answer."""
        await self.start()
        zygote = self._zygote
        assert zygote is not None
        place = await self.resource_pool.acquire(limits, zygote.child.pid)
        with contextlib.ExitStack() as handed, contextlib.ExitStack() as undone:
            undone.callback(self.resource_pool.release, place)
            output = JailOutput(limits.output_bytes)
            undone.callback(output.close)
            pipes: dict[str, Pipe] = {}
            fds: dict[str, int] = {}
            for name in ("keeper", "cells") if program.has_guest_channel else ("keeper",):
                pipes[name] = pipe = Pipe()
                handed.callback(pipe.close_jail_end)
                undone.callback(pipe.close)
                fds[name] = pipe.jail_fd
            for name in STREAMS:
                fds[name] = _open_content(stdin) if name == "stdin" else output.open_stream()
                handed.callback(os.close, fds[name])
            if peer >= 0:
                fds["peer"] = peer
            if place.cgroup is not None:
                fds |= {f"group{number}": fd for number, fd in enumerate(place.cgroup.member_fds)}
                if place.cgroup.usage_fd >= 0:
                    fds["usage"] = place.cgroup.usage_fd
            packet = json.dumps(
                self._build_request(limits, place, list(fds), program.starts_clock_paused)
            ).encode()
            try:
                answer = zygote.request_jail(
                    packet, list(fds.values()), lambda: self.resource_pool.drop_reference(place)
                )
            except (BrokenPipeError, ConnectionResetError):
                self._zygote_exited(zygote)
                raise
            undone.pop_all()
        self.started_count += 1

        def release_resources() -> None:
            self.resource_pool.drop_reference(place)
            zygote.jail_ended()

        keeper, cells = pipes["keeper"], pipes.get("cells")
        jail = Jail(self.clock, limits, keeper, cells, output, place.cgroup, release_resources)
        return jail, zygote, answer

    def _build_request(
        self,
        limits: JailLimits,
        resources: JailResources,
        descriptors: list[str],
        starts_clock_paused: bool,
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "limits": limits.to_document(),
            "descriptors": descriptors,
            "nice": self.resource_pool.guest_nice,
            "counted": resources.cgroup is not None,
            "stands": starts_clock_paused,
            "user": resources.user_id,
        }
        if resources.scratch_path:
            own = (*self._interpreter.directories, *self._interpreter.packages, JAIL_PACKAGE)
            request |= {"scratch": resources.scratch_path, "readable": [*READABLE, *own]}
        if not resources.user_id and self.resource_pool.shares_users:
            request["limits"]["processes"] += _count_user_threads()
        return request

    async def stop(self) -> None:
        zygote = self._zygote
        self._kill_zygote()
        if zygote is not None:
            await zygote.child.wait(DRAIN_S)
        for folder in self._container_directories:
            await container_cleanup.wait_and_remove(self.clock, folder)
        self._container_directories = []
        await self.resource_pool.stop()


def _open_content(content: bytes) -> int:
    """Return a descriptor that reads `content`, and then the end."""
    if not content:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _count_user_threads() -> int:
    """Count threads that the limit of a jail's user already includes, where jails share a user."""
    user = users.PLAIN_ID if os.getuid() == 0 else os.getuid()
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == user:
                count += process.num_threads()
    return count
