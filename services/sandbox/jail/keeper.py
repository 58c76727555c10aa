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
from .metering import memory, refusals, usage, watch
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
        wake = _wakes()
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
        refused = refusals.Refusals(listener, lambda number: _refuses(fds, number))
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
        cpu = _usage(fds, tier)
        nonce = frames.receive(channel)["nonce"]

        def signal_all(number: int) -> None:
            _signal_all(number, tier, cpu)

        settings = request["limits"]
        together = None if request["counted"] else _memory(settings["memory_bytes"], cpu, tier)
        watching = watch.GuestWatch(
            watch.WatchedGuest(child, channel, wake, ready),
            settings,
            cpu,
            signal_all,
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


def _refuses(fds: dict[str, int], number: int) -> None:
    """A session's sandbox is told at once: the report comes at its end, many cells later."""
    if "cells" in fds:
        frames.send(fds["keeper"], {"refuses": number})


def _close_others(kept: set[int], proc: int) -> None:
    """What a jail was not given: of the zygote, or of the keeper. The zygote's control socket has
    the number that it had in the sandbox, which may have thousands open.
    """
    listing = os.open("self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    for fd in set(map(int, os.listdir(listing))) - kept:
        os.closerange(fd, fd + 1)  # one of them was the listing's, and is closed


def _join_groups(fds: dict[str, int]) -> None:
    """The control groups of this jail, whose lists of processes came opened for writing. Only the
    guest joins: neither does it take its keeper's share of the cores, nor is the keeper frozen.
    """
    for name in [name for name in fds if name.startswith("group")]:
        os.write(fds[name], b"0")
        os.close(fds.pop(name))


def _namespaces(limits: dict[str, Any], user: int, proc: int) -> None:
    """Mounts are made before the user namespace, which therefore cannot undo them.

    In the jail /proc cannot be written: what we write there we write to the zygote's.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    if user:
        _become(user)
    size, files = limits["scratch_bytes"], limits["files"]
    kernel.mount(
        "tmpfs", SCRATCH, "tmpfs", HIDDEN, f"size={size},nr_inodes={files},mode=700,huge=never"
    )
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
        _go_first(proc)
        os.close(proc)
        _join_groups(fds)
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
    if os.getuid() != 0:
        return
    try:
        _become(user)
    except OSError:
        kernel.drop_capabilities()


def _go_first(proc: int) -> None:
    """If one must go because memory is short, then we before the keeper."""
    try:
        kernel.write("self/oom_score_adj", "1000", proc)
    except OSError as error:  # where this file is another user's
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise


def limit(limits: dict[str, Any], laps: bool) -> None:
    """Limits of one process; what all of a jail may use together is its control group's.

    The keeper watches CPU time. The kernel's limit, behind it, is of a whole life, so it cannot be
    set where a limit is of one lap among many.
    """
    cpu = resource.RLIM_INFINITY if laps else int(limits["cpu_s"]) + 1
    hard_cpu = cpu if laps else cpu + OUT_OF_TIME_GRACE_S
    for which, soft, hard in (
        (resource.RLIMIT_CPU, cpu, hard_cpu),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + OWN_PROCESSES, None),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["scratch_bytes"], limits["scratch_bytes"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, SIGNALS, SIGNALS),
    ):
        try:
            resource.setrlimit(which, (soft, soft if hard is None else hard))
        except ValueError:
            if which not in FIXED:
                raise


def environment() -> None:
    """That of guests, which the zygote has already."""
    os.environ.clear()
    os.environ.update(
        {
            "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
            "HOME": SCRATCH,
            "TMPDIR": SCRATCH,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )


def _wakes() -> int:
    """A descriptor that becomes readable whenever a process of the jail ends."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    _signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    return reading


def _memory(limit: int, cpu: usage.Grouped | usage.Scanned, tier: str) -> memory.Watched:
    only = usage.FIRST_PIDS if tier == "bwrap" else -1  # among the host's, any may be its
    return memory.Watched(limit, cpu.members, usage.newest, only)


def _usage(fds: dict[str, int], tier: str) -> usage.Grouped | usage.Scanned:
    """Where the CPU time of the jail is read."""
    if "usage" in fds:
        return usage.Grouped(fds["usage"])
    return usage.Scanned(0 if tier == "bwrap" else os.getpgrp())


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
    try:
        if tier == "bwrap":
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(0, signal.SIGKILL)
    except ProcessLookupError:
        return
