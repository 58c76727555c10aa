"""Zygote: a warm interpreter that forks an init process for each jail, which forks the guest.

It runs inside of the outer jail of bubblewrap: no network, a read-only root, its own processes.
Each jail has one packet on the control socket: its limits as JSON, with its descriptors, the init
process's first. A packet returns on it for each request that is done, so that a stopped zygote is
detected; a jail answers on its own descriptors. Each jail has process, mount and user namespaces of
its own. Every jail can read what this process has in memory, so it has only modules.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, Callable, NoReturn

from . import init_process
from .confinement import seccomp, syscall_policy, syscalls
from .guests import guest, pytest_suite
from .wire import frames

PACKET = 1 << 16  # bytes of a request
DESCRIPTORS = 16  # most descriptors of one packet
DONE = b"done"

# Common first imports of programs. Each costs every jail, whose pages are copied.
PRELOADED_MODULES = (
    "abc array bisect cmath collections contextlib copy dataclasses enum functools heapq io "
    "itertools json linecache math operator random re string sys time traceback types typing"
)


RunForked = Callable[[bytes, "list[int]"], None]  # never returns


def serve(control: socket.socket, run_forked: RunForked, prepare: Callable[[], None]) -> None:
    """Call `prepare`, and `run_forked` in a fork, for each packet."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forked processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(b"warm")
    while True:
        packet, fds = receive_packet(control)
        if not packet:
            return
        try:
            prepare()
            # Before anything that only the jail needs: both copy the pages that they touch.
            if os.fork() == 0:
                run_forked(packet, fds)
        except OSError as error:
            send_failure(fds[0], error)
        finally:
            for fd in fds:
                os.close(fd)
        control.send(DONE)


def _serve_jails(control: socket.socket, tier: str) -> None:
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    users = syscalls.list_mapped_users()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if tier == "bwrap" else -1

    def prepare() -> None:
        if own >= 0:  # back to its own namespace first: one namespace can be unshared only once
            syscalls.call_libc("setns", own, syscalls.CLONE_NEWPID)
            syscalls.unshare(syscalls.CLONE_NEWPID)

    def begin(packet: bytes, fds: list[int]) -> NoReturn:
        request = frames.parse(packet)
        if not any(request["user"] in each for each in users):
            request["user"] = 0
        init_process.run_init(dict(zip(request["descriptors"], fds)), request, tier, proc)

    serve(control, begin, prepare)


def receive_packet(control: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a packet and its descriptors; Python 3.8 has no socket.recv_fds."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(DESCRIPTORS * fds.itemsize)
    packet, ancillary, _, _ = control.recvmsg(PACKET, room)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return packet, list(fds)


def send_failure(fd: int, error: OSError) -> None:
    """Send the reason why there is no jail; the sandbox counts it as its own failure."""
    text = f"no jail could be forked: {error}"
    if error.errno == errno.EAGAIN:
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        text += f"; all jails together may have {most} processes and threads (RLIMIT_NPROC)"
    with contextlib.suppress(frames.FrameChannelClosed):
        frames.send(fd, {"failed": text})


def preload(
    packages: Any, tier: str, fallback_directory: str = "", default_modules: str = PRELOADED_MODULES
) -> None:
    """Import modules in advance; jails do not search `fallback_directory` for missing ones."""
    register = os.register_at_fork  # seeding at each fork is a fifth of its cost: only guests seed
    os.register_at_fork = lambda **hooks: None
    try:
        import random  # noqa: F401
    finally:
        os.register_at_fork = register
    if fallback_directory:
        sys.path.append(fallback_directory)
    for name in [*default_modules.split(), *packages]:
        try:
            __import__(name)
        except ImportError as error:
            print(f"zygote: {error}", file=sys.stderr)
    if "pytest" in packages:
        pytest_suite.preload(fallback_directory)
    if fallback_directory:
        sys.path.remove(fallback_directory)
    for counted in (True, False):
        seccomp.prepare_filter(syscall_policy.select_policy(tier, counted), True)
    guest.create_streams()
    init_process.set_guest_environment()
    gc.collect()
    gc.freeze()  # collections in a jail must not touch, and so copy, shared pages


def main() -> None:
    """Start the zygote.

    Arguments are CONTROL_FD, TIER, a JSON list of modules to import beside the usual ones, and a
    directory to search last for them.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[2] == "bwrap":  # the nodes in /dev are the host's: a change would affect others
        for device in os.scandir("/dev"):
            if not device.is_symlink():
                syscalls.remount_read_only(device.path)
    preload(json.loads(sys.argv[3]), sys.argv[2], sys.argv[4])
    _serve_jails(control, sys.argv[2])
