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

from . import init_process, zygote
from .confinement import syscalls
from .wire import frames, mux

DRAIN_S = 5.0  # for what was printed before the end to go out
SHARED_NAMESPACE_DRAIN_S = (
    1.0  # the same where processes may be left that hold the pipes: we are not the first
)


def main() -> NoReturn:
    incoming, outgoing = os.dup(0), os.dup(1)  # out of the way of everybody else's
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # nor is the keeper, which is forked from here
    request = frames.receive(incoming)
    zygote.preload(request["warm"], "runner", request["searched_last"], default_modules="")
    place = request["scratch"]
    if not os.path.isdir(place):
        os.mkdir(place, 0o700)
        if os.getuid() == 0:
            with contextlib.suppress(OSError):  # the container has no other user
                os.chown(place, request["user"], request["user"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is left to us
    ends, fds = _create_channels(request["channels"])
    if os.fork() == 0:
        for fd in (incoming, outgoing, *ends.values()):
            os.close(fd)
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        init_process.run_init(fds, request, "runner", proc)
    for fd in fds.values():
        os.close(fd)
    _forward(mux.Mux(incoming, outgoing), ends)
    if place != init_process.SCRATCH:
        shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _create_channels(names: Any) -> tuple[dict[str, int], dict[str, int]]:
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


def _forward(connection: mux.Mux, ends: dict[str, int]) -> None:
    """Until the keeper has ended, or the outside wants no more. What the guest has printed goes
    before the keeper's report, which is the last word.
    """
    keepers = ends.pop("keeper")
    connection.attach(mux.INIT, write_fd=os.dup(keepers))
    connection.attach(mux.CONTROL, on_data=lambda _: None)
    for name, fd in ends.items():
        number, reading = mux.CHANNELS_BY_NAME[name], -1 if name == "stdin" else fd
        connection.attach(number, reading, -1 if number in mux.OUTPUTS else fd)
    connection.send(mux.CONTROL, frames.pack({"python": list(sys.version_info[:3])}))
    report = _receive_report(connection, keepers)
    alone = os.getpid() == 1
    if alone:
        with contextlib.suppress(OSError):  # there is nobody else
            os.kill(-1, signal.SIGKILL)
    end = time.monotonic() + (DRAIN_S if alone else SHARED_NAMESPACE_DRAIN_S)
    while (
        not connection.is_closed
        and any(map(connection.is_readable, mux.OUTPUTS))
        and time.monotonic() < end
    ):
        connection.step(end - time.monotonic())
    connection.send(mux.INIT, report)
    connection.flush(DRAIN_S)


def _receive_report(connection: mux.Mux, init_fd: int) -> bytes:
    """What the keeper says last; empty when the outside has closed the channel before."""
    report = bytearray()
    while not connection.is_closed:
        if init_fd not in connection.step(3600.0, [init_fd]):
            continue
        part = frames.read_available(init_fd, 1 << 16)
        if part == b"":
            break
        report += part or b""
    return bytes(report)
