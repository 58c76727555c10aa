"""The first process in a runner's container: it carries the channels of a jail over its standard
input and output, and starts the jail's keeper.

What is outside speaks to it as `mux` says, after one frame that says what this jail is. The keeper
and the guest have sockets and pipes as in any jail. As the first process it ends the container, and
so whatever is left in it, when the keeper has ended or the outside has closed the channel.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from . import keeper, zygote
from .confinement import kernel
from .wire import frames, mux

DRAIN_S = 5.0  # for what was printed before the end to go out
LEFT_S = 1.0  # the same where processes may be left that hold the pipes: we are not the first


def main() -> NoReturn:
    incoming, outgoing = os.dup(0), os.dup(1)  # out of the way of everybody else's
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nor is the keeper, which is forked from here
    request = frames.receive(incoming)
    zygote.warm(request["warm"], "runner", request["searched_last"], usual="")
    place = request["scratch"]
    if not os.path.isdir(place):
        os.mkdir(place, 0o700)
        if os.getuid() == 0:
            with contextlib.suppress(OSError):  # the container has no other user
                os.chown(place, request["user"], request["user"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is left to us
    ends, fds = _channels(request["channels"])
    if os.fork() == 0:
        for fd in (incoming, outgoing, *ends.values()):
            os.close(fd)
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        keeper.keep(fds, request, "runner", proc)
    for fd in fds.values():
        os.close(fd)
    _carry(mux.Mux(incoming, outgoing), ends)
    if place != keeper.SCRATCH:
        shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _channels(names: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Our ends, and the jail's: pipes for the standard streams, sockets for the rest."""
    ours, theirs = {}, {}
    for name in names:
        if name == "stdin":
            theirs[name], ours[name] = os.pipe()
        elif name in ("stdout", "stderr"):
            ours[name], theirs[name] = os.pipe()
        else:
            one, other = socket.socketpair()
            ours[name], theirs[name] = one.detach(), other.detach()
    return ours, theirs


def _carry(link: mux.Mux, ends: dict[str, int]) -> None:
    """Until the keeper has ended, or the outside wants no more. What the guest has printed goes
    before the keeper's report, which is the last word.
    """
    keepers = ends.pop("keeper")
    link.attach(mux.KEEPER, writing=os.dup(keepers))
    link.attach(mux.CONTROL, took=lambda _: None)
    for name, fd in ends.items():
        number, reading = mux.NAMED[name], -1 if name == "stdin" else fd
        link.attach(number, reading, -1 if number in mux.OUTPUTS else fd)
    link.send(mux.CONTROL, frames.pack({"python": list(sys.version_info[:3])}))
    report = _report(link, keepers)
    alone = os.getpid() == 1
    if alone:
        with contextlib.suppress(OSError):  # there is nobody else
            os.kill(-1, signal.SIGKILL)
    end = time.monotonic() + (DRAIN_S if alone else LEFT_S)
    while not link.over and any(map(link.reads, mux.OUTPUTS)) and time.monotonic() < end:
        link.step(end - time.monotonic())
    link.send(mux.KEEPER, report)
    link.flush(DRAIN_S)


def _report(link: mux.Mux, keepers: int) -> bytes:
    """What the keeper says last; empty when the outside has closed the channel before."""
    report = bytearray()
    while not link.over:
        if keepers not in link.step(3600.0, [keepers]):
            continue
        part = frames.read_now(keepers, 1 << 16)
        if part == b"":
            break
        report += part or b""
    return bytes(report)
