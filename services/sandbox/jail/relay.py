"""First process in a runner's container: carries a jail's channels, and starts its init process.

The channels use its standard input and output with the protocol of `mux`, after one frame that
describes the jail. The init process and the guest have sockets and pipes as in any jail. As the
first process it ends the container, and so all that is left in it, when the init process has ended
or the outside has closed the channel.
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

DRAIN_S = 5.0  # for output before the end to be sent
SHARED_NAMESPACE_DRAIN_S = (
    1.0  # the same where remaining processes may have the pipes: we are not the first
)


def main() -> NoReturn:
    incoming, outgoing = os.dup(0), os.dup(1)  # out of the way of all other descriptors
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # nor is init, which is forked from here
    request = frames.receive(incoming)
    zygote.preload(
        request["preloaded_modules"], "runner", request["searched_last"], default_modules=""
    )
    place = request["scratch"]
    if not os.path.isdir(place):
        os.mkdir(place, 0o700)
        if os.getuid() == 0:
            with contextlib.suppress(OSError):  # the container has no other user
                os.chown(place, request["user"], request["user"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
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
    """Create our ends, and the jail's: pipes for the standard streams, sockets for the rest."""
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
    """Forward data until the init process has ended, or the outside closes the channel.

    The guest's output precedes the init process's report, which comes last.
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
        with contextlib.suppress(OSError):  # there is no other process
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
    """Return the init process's report; empty when the outside has closed the channel before."""
    report = bytearray()
    while not connection.is_closed:
        if init_fd not in connection.step(3600.0, [init_fd]):
            continue
        part = frames.read_available(init_fd, 1 << 16)
        if part == b"":
            break
        report += part or b""
    return bytes(report)
