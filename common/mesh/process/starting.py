"""Starts the processes of an owner: as forks of the host's nursery where it can, else by `exec`."""

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
from meshrl.common.mesh.process.entry import child
from meshrl.common.mesh.process.entry.child import CHANNEL_FD
from meshrl.common.mesh.process.forking.birth import Birth, ForkOrder, NoBirth, chosen
from meshrl.common.mesh.process.handle import SystemChild

ASK_AGAIN_S = 3.0  # a nursery that was silent is left alone for so long: each question takes 2 s


@dataclass(frozen=True)
class Spawning:
    """Bounds and ties of a process, and its channels to the process that spawns it."""

    own_session: bool = False
    die_with_parent: bool = True
    nice: int = 0
    rlimits: Mapping[str, int] = field(default_factory=dict)  # by name without RLIMIT_, as "AS"
    pipe: bool = False  # a channel of frames: `meshrl.common.mesh.process.entry.child.ChildChannel`
    pass_fds: Sequence[int] = ()  # that stay open in it under their numbers
    # It runs code of a job's author: all that it starts ends with it, and with the process that
    # spawns it, and its output is bounded (`meshrl.common.mesh.process.entry.guard`).
    guarded: bool = False


PLAIN = Spawning()


@dataclass(frozen=True)
class Start:
    """A process that is to be; the fields are `Host.spawn`'s."""

    name: str
    argv: list[str]
    environment: dict[str, str]  # all of it
    log: Path | None = None
    how: Spawning = PLAIN

    @property
    def module(self) -> str | None:
        """The module that it runs in an interpreter as ours; None for any other program."""
        return self.argv[2] if self.argv[:2] == [sys.executable, "-m"] else None

    @property
    def nursery(self) -> Path | None:
        """The nursery that it may be forked from; None: it is to be executed."""
        plain = self.module is not None and not self.how.rlimits and not self.how.pass_fds
        return chosen(self.environment) if plain else None

    def order(self, passed: list[str]) -> ForkOrder:
        """What a nursery is asked for, with these descriptors."""
        assert self.module is not None
        return ForkOrder(
            module=self.module,
            arguments=self.argv[3:],
            environment=self.environment,
            passed=passed,
            executable=sys.executable,
            niceness=os.getpriority(os.PRIO_PROCESS, 0) + self.how.nice,
            guarded=self.how.guarded,
        )


class Starter:
    """The owner of processes; those that are to die with it do so when its pipe closes."""

    def __init__(self) -> None:
        # Nobody else holds the write end, so it closes when this process is gone. None: there is
        # nobody yet who is to die with it.
        self._death: tuple[int, int] | None = None
        self._without_nursery_until = 0.0

    def start(self, start: Start) -> SystemChild:
        """The process. Refused from any thread but the main one where it dies with its parent;
        OSError when there is none to be had.
        """
        if start.how.die_with_parent and threading.current_thread() is not threading.main_thread():
            # PDEATHSIG fires at the end of the spawning thread, not of the process.
            raise Refused(
                "a child that dies with us is spawned by the main thread", where=start.name
            )
        if start.how.guarded and not start.how.die_with_parent:
            raise ValueError(f"{start.name}: a guarded process ends with its owner")
        ours: socket.socket | None = None
        with contextlib.ExitStack() as theirs:
            descriptors = {"stdout": 1, "stderr": 2}
            if start.log is not None:
                log = opened_log(start.log)
                theirs.callback(os.close, log)
                descriptors |= {"stdout": log, "stderr": log}
            if start.how.die_with_parent:
                self._death = self._death or os.pipe()
                descriptors["death"] = self._death[0]
            if start.how.pipe:
                ours, far = socket.socketpair()
                theirs.enter_context(far)
                ours.setblocking(False)
                descriptors["channel"] = far.fileno()
            birth = self._asked(start, descriptors)
            if birth is None:
                popen = executed(start, descriptors)
                return SystemChild(
                    start.name,
                    popen.pid,
                    popen=popen,
                    channel=ours,
                    leads_session=start.how.own_session and not start.how.guarded,
                    guard=popen.pid if start.how.guarded else 0,
                )
            child = SystemChild(
                start.name,
                birth.pid,
                birth=birth,
                channel=ours,
                leads_session=not start.how.guarded,
                guard=birth.guard,
            )
            birth.go()
            return child

    def _asked(self, start: Start, descriptors: Mapping[str, int]) -> Birth | None:
        """A fork of the nursery; None if there is none to be had."""
        nursery = start.nursery
        if nursery is None or time.monotonic() < self._without_nursery_until:
            return None
        here = os.open(".", os.O_PATH | os.O_DIRECTORY)
        try:
            passed = {"cwd": here, **descriptors}
            return Birth.ask(nursery, start.order(list(passed)), passed)
        except NoBirth as error:
            if isinstance(error.__cause__, TimeoutError):
                self._without_nursery_until = time.monotonic() + ASK_AGAIN_S
            return None
        finally:
            os.close(here)


def opened_log(path: Path) -> int:
    """A descriptor that appends to a file, whose directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def executed(start: Start, descriptors: Mapping[str, int]) -> subprocess.Popen[bytes]:
    """A process whose first code is `meshrl.common.mesh.process.entry.child`."""
    passed = list(start.how.pass_fds)
    if start.module is not None:
        first, program = ["-m", child.__name__], [f"module:{start.module}", *start.argv[3:]]
    else:  # without site-packages the interpreter starts in a third of the time
        first = ["-I", "-S", str(child.__file__)]
        program = [f"exec:{start.argv[0]}", *start.argv[1:]]
    options: list[str] = []
    environment = dict(start.environment)
    if "death" in descriptors:
        tie = f"guard={descriptors['death']}" if start.how.guarded else f"parent={os.getpid()}"
        options += [tie, f"death={descriptors['death']}"]
        passed.append(descriptors["death"])
    if "channel" in descriptors:
        environment[CHANNEL_FD] = str(descriptors["channel"])
        passed.append(descriptors["channel"])
    if start.how.nice:
        options.append(f"nice={start.how.nice}")
    options += [f"rlimit={name}:{value}" for name, value in start.how.rlimits.items()]
    return subprocess.Popen(
        [sys.executable, *first, *options, "--", *program],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=descriptors["stdout"],
        stderr=descriptors["stderr"],
        pass_fds=passed,
        start_new_session=start.how.own_session,
    )
