"""The first process of a jail: it closes the jail behind itself, starts the guest, watches it.

The guest runs what the model wrote. The keeper alone holds the channel to the sandbox, is not
dumpable (so the guest can neither trace it nor read its memory or descriptors), cannot be killed
from inside as it is the first process of its process namespace, and learns the nonce that its
report must carry only when the guest has been forked. When it ends, the kernel kills all the rest.
"""

from __future__ import annotations

# What a fork touches, it copies: the functions of `signal` go through its enumerations.
import _signal
import contextlib
import errno
import os
import resource
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from .confinement import allowed, kernel, landlock, seccomp
from .guests import guest
from .metering import refusals, usage, watch
from .wire import frames

SCRATCH = "/tmp"
HIDDEN = kernel.MS_NOSUID | kernel.MS_NODEV
OUT_OF_TIME_GRACE_S = 1  # after SIGXCPU, which a program may handle, comes SIGKILL
SIGNALS = 1024  # queued signals and timers: kernel memory that no other limit counts
OWN_PROCESSES = 1  # the keeper itself counts among its user's
OWN = ("keeper", "usage")  # descriptors that no guest gets
SETUP_FAILED = 70
STOPS_S, STANDS_LOOK_S = 1.0, 0.001  # most until all have stopped, and between looks whether
FIXED = (resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)  # as gVisor has them, and keeps them


def keep(fds: dict[str, int], request: dict[str, Any], tier: str, proc: int) -> NoReturn:
    """Runs one jail from its closing to its end; never returns. `proc` is the zygote's /proc."""
    channel = fds["keeper"]
    try:
        _close_others({0, 1, 2, proc, *fds.values()}, proc)
        policy = allowed.policy(tier, request["counted"])
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # at each end of a process of the jail
        _signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        if tier == "bwrap":
            _namespaces(request["limits"], request["user"], proc)
            kernel.drop_capabilities()
        else:
            if tier == "landlock":
                if request["user"]:
                    _become(request["user"])
                kernel.drop_capabilities()
            os.setsid()
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        # It holds for us, too: what we call from here on must be among what goes through.
        held = tier != "runner"  # else the guest alone, which becomes another user before
        listener = seccomp.install(policy, listen=True) if held else -1

        def said(number: int) -> None:
            if "cells" in fds:  # a session's report comes at its end, many cells later
                frames.send(channel, {"refuses": number})

        refused = refusals.Refusals(listener, said)
        program = frames.receive(channel)
        ready, closed = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            if not held:
                _become_plain(request["user"])
                seccomp.install(policy)
            _become_guest({**fds, "closed": closed}, request, program, tier, proc)
        os.close(proc)
        os.close(closed)
        for name, fd in fds.items():
            if name not in OWN:
                os.close(fd)
        cpu: usage.Grouped | usage.Scanned = (
            usage.Grouped(fds["usage"])
            if "usage" in fds
            else usage.Scanned(0 if tier == "bwrap" else os.getpgrp())
        )
        nonce = frames.receive(channel)["nonce"]

        together, settings = None, request["limits"]
        if not request["counted"]:
            only = usage.FIRST_PIDS if tier == "bwrap" else -1  # among the host's, any may be its
            most = settings["memory_bytes"]
            together = usage.WatchedMemory(most, cpu.members, usage.newest, only)
        watching = watch.GuestWatch(
            watch.WatchedGuest(child, channel, wake, ready),
            settings,
            cpu,
            lambda number: _signal_all(number, tier, cpu),
            refused,
            together,
            request.get("stands", False),
        )
        report = {**watching.until_ended(), "refused": refused.numbers}
        if not watching.set_up():
            report = {"failed": f"a guest could not be set up: status {report['exit']}"}
        frames.send(channel, {"nonce": nonce, **report})
        if tier != "bwrap":  # there, the kernel kills what is left
            _kill_rest(tier)
        os._exit(0)
    except frames.Closed:  # the sandbox wants no more of this
        _kill_rest(tier)
        os._exit(0)
    except BaseException:
        frames.send(channel, {"failed": traceback.format_exc(limit=3)})
        os._exit(SETUP_FAILED)


def _close_others(kept: set[int], proc: int) -> None:
    """What a jail was not given: of the zygote, or of the keeper. The zygote's control socket has
    the number that it had in the sandbox, which may have thousands open.
    """
    listing = os.open("self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    for fd in set(map(int, os.listdir(listing))) - kept:
        os.closerange(fd, fd + 1)  # one of them was the listing's, and is closed


def _namespaces(limits: dict[str, Any], user: int, proc: int) -> None:
    """Mounts are made before the user namespace, which therefore cannot undo them.

    In the jail /proc cannot be written: what we write there we write to the zygote's.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    if user:
        _become(user)
    room = f"size={limits['scratch_bytes']},nr_inodes={limits['files']}"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", HIDDEN, f"{room},mode=700,huge=never")
    kernel.mount("proc", "/proc", "proc", HIDDEN | kernel.MS_NOEXEC | kernel.MS_RDONLY)
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_own_ids(user, group, proc)
    kernel.write("sys/user/max_user_namespaces", "0", proc)


def _become(user: int) -> None:
    """The jail's own user. A change hides our files in /proc, which are still to be written."""
    kernel.become(user)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _become_guest(
    fds: dict[str, int], request: dict[str, Any], program: Any, tier: str, proc: int
) -> NoReturn:
    try:
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGCHLD, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        for name in OWN:
            fds.pop(name, None)
        _close_others({0, 1, 2, proc, *fds.values()}, proc)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        try:  # if one must go because memory is short, then we before the keeper
            kernel.write("self/oom_score_adj", "1000", proc)
        except OSError as error:  # where this file is another user's
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
        os.close(proc)
        # The guest alone joins the jail's control groups, whose lists of processes these are: it
        # takes none of its keeper's share of the cores, nor is the keeper frozen.
        for name in [name for name in fds if name.startswith("group")]:
            os.write(fds[name], b"0")
            os.close(fds.pop(name))
        if request["nice"]:  # which nobody can take back
            os.nice(request["nice"])
        for place, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(fds[name], place)
            os.close(fds[name])
        scratch = request.get("scratch", SCRATCH)
        if tier == "landlock":
            landlock.restrict(request["readable"], [scratch, "/dev/null"])
        elif tier == "bwrap":
            os.setsid()
        limit(request["limits"], laps="cells" in fds or "peer" in fds)
        os.chdir(scratch)
        if scratch != SCRATCH:
            os.environ.update(HOME=scratch, TMPDIR=scratch)
    except (OSError, ValueError):  # ValueError: a limit beyond what may be set
        traceback.print_exc()
        os._exit(SETUP_FAILED)
    os.write(fds["closed"], repr(time.monotonic()).encode())
    os.close(fds["closed"])
    guest.run(program, fds.get("cells", -1), fds.get("peer", -1))


def _become_plain(user: int) -> None:
    """The guest's own user, where the keeper is root in a container: it cannot reach the keeper.
    Where the container has no other user, it has no capabilities, at least.
    """
    if os.getuid() == 0:
        try:
            _become(user)
        except OSError:
            kernel.drop_capabilities()


def limit(limits: dict[str, Any], laps: bool) -> None:
    """Limits of one process; what all of a jail may use together is its control group's.

    The keeper watches CPU time. The kernel's limit, behind it, is of a whole life, so it cannot be
    set where a limit is of one lap among many.
    """
    cpu = resource.RLIM_INFINITY if laps else int(limits["cpu_s"]) + 1
    for which, most in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + OWN_PROCESSES),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, SIGNALS),
    ):
        grace = OUT_OF_TIME_GRACE_S if which == resource.RLIMIT_CPU and not laps else 0
        try:
            resource.setrlimit(which, (most, most + grace))
        except ValueError:
            if which not in FIXED:
                raise


def environment() -> None:
    """That of guests, which the zygote has already."""
    path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    os.environ.clear()
    os.environ.update(PATH=path, HOME=SCRATCH, TMPDIR=SCRATCH, LANG="C.UTF-8")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):
        os.environ[name] = "1"


def _signal_all(number: int, tier: str, cpu: usage.Grouped | usage.Scanned) -> None:
    """To all others of the jail: as the first process of a namespace, everybody; else whoever is
    in our group of processes, which none can leave. Those that were begun meanwhile are next: who
    is told to stop in the midst of a fork does so after it, and its child, which nobody can see by
    then, goes on. So all must stand before nobody is new.
    """
    if tier == "bwrap":
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)
        return
    told: set[int] = set()
    stood, until = False, time.monotonic() + STOPS_S
    while True:
        found = cpu.standing()
        fresh = found.keys() - told
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= fresh
        if not fresh and (stood or time.monotonic() > until):
            return
        stood = number != signal.SIGSTOP or all(found.values())
        if not fresh and not stood:
            time.sleep(STANDS_LOOK_S)


def _kill_rest(tier: str) -> None:
    """All others of the jail. By number: as the first process of a namespace, everybody."""
    with contextlib.suppress(ProcessLookupError):
        if tier == "bwrap":
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(0, signal.SIGKILL)
