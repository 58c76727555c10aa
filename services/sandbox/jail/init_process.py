"""Init process of a jail: closes the jail behind itself, starts the guest, and watches it.

The guest runs the model's code. Only the init process has the channel to the sandbox. It is not
dumpable, so the guest can neither trace it nor read its memory or descriptors. It cannot be killed
from inside, as it is the first process of its process namespace. It reads the nonce of its report
only after forking the guest. When it ends, the kernel kills all the rest.
"""

from __future__ import annotations

# A fork copies the pages that it touches: the functions of `signal` use its enumerations.
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

from .confinement import landlock, seccomp, syscall_policy, syscalls
from .guests import guest
from .metering import seccomp_listener, usage, watch
from .wire import frames

SCRATCH = "/tmp"
MOUNT_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV
CPU_LIMIT_GRACE_S = 1  # SIGXCPU, which a program may handle, precedes SIGKILL
SIGNALS = 1024  # queued signals and timers: kernel memory that no other limit counts
OWN_PROCESSES = 1  # the init process itself counts among its user's
INIT_CHANNELS = ("keeper", "usage")  # descriptors that no guest gets
SETUP_FAILED_EXIT = 70
STOP_TIMEOUT_S, STOP_POLL_S = 1.0, 0.001  # longest wait until all have stopped, and poll interval
UNSETTABLE_LIMITS = (
    resource.RLIMIT_MSGQUEUE,
    resource.RLIMIT_SIGPENDING,
)  # as gVisor has them, and retains them


def run_init(fds: dict[str, int], request: dict[str, Any], tier: str, proc_fd: int) -> NoReturn:
    """Run one jail from confinement to its end; never returns. `proc_fd` is the zygote's /proc."""
    channel = fds["keeper"]
    try:
        _close_other_fds({0, 1, 2, proc_fd, *fds.values()}, proc_fd)
        policy = syscall_policy.select_policy(tier, request["counted"])
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # at each end of a process of the jail
        _signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        if tier == "bwrap":
            _enter_namespaces(request["limits"], request["user"], proc_fd)
            syscalls.drop_capabilities()
        else:
            if tier == "landlock":
                if request["user"]:
                    _switch_user(request["user"])
                syscalls.drop_capabilities()
            os.setsid()
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        # The policy applies to us, too: all later calls from here must be allowed.
        # In a runner only the guest is filtered, after it has switched to another user.
        has_listener = tier != "runner"
        listener = seccomp.install(policy, notify=True) if has_listener else -1

        def report_denied(number: int) -> None:
            if "cells" in fds:  # a session's report comes at its end, many cells later
                frames.send(channel, {"refuses": number})

        refused = seccomp_listener.SeccompListener(listener, report_denied)
        program = frames.receive(channel)
        ready, closed = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            if not has_listener:
                _switch_to_guest_user(request["user"])
                seccomp.install(policy)
            _become_guest({**fds, "closed": closed}, request, program, tier, proc_fd)
        os.close(proc_fd)
        os.close(closed)
        for name, fd in fds.items():
            if name not in INIT_CHANNELS:
                os.close(fd)
        cpu: usage.CgroupCpuTime | usage.ScannedCpuTime = (
            usage.CgroupCpuTime(fds["usage"])
            if "usage" in fds
            else usage.ScannedCpuTime(0 if tier == "bwrap" else os.getpgrp())
        )
        nonce = frames.receive(channel)["nonce"]

        together, settings = None, request["limits"]
        if not request["counted"]:
            only = usage.FIRST_PIDS if tier == "bwrap" else -1  # among the host's, any may be its
            most = settings["memory_bytes"]
            together = usage.MemoryLimitWatch(most, cpu.list_pids, usage.read_last_pid, only)
        watching = watch.GuestWatch(
            watch.GuestDescriptors(child, channel, wake, ready),
            settings,
            cpu,
            lambda number: _signal_all(number, tier, cpu),
            refused,
            together,
            request.get("stands", False),
        )
        report = {**watching.wait_for_exit(), "denied_calls": refused.denied_calls}
        if not watching.check_set_up():
            report = {"failed": f"a guest's setup failed: status {report['exit_code']}"}
        frames.send(channel, {"nonce": nonce, **report})
        if tier != "bwrap":  # there, the kernel kills the remaining processes
            _kill_rest(tier)
        os._exit(0)
    except frames.FrameChannelClosed:  # the sandbox has cancelled the jail
        _kill_rest(tier)
        os._exit(0)
    except BaseException:
        frames.send(channel, {"failed": traceback.format_exc(limit=3)})
        os._exit(SETUP_FAILED_EXIT)


def _close_other_fds(kept: set[int], proc_fd: int) -> None:
    """Close descriptors of the zygote, or the init process, that the jail must not have.

    The zygote's control socket has the number that it had in the sandbox, which may have thousands
    open.
    """
    listing = os.open("self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
    for fd in set(map(int, os.listdir(listing))) - kept:
        os.closerange(fd, fd + 1)  # one of them was the listing's, and is closed


def _enter_namespaces(limits: dict[str, Any], user: int, proc_fd: int) -> None:
    """Enter namespaces; mounts come before the user namespace, which therefore cannot undo them.

    In the jail /proc is read-only, so writes go to the zygote's.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    if user:
        _switch_user(user)
    room = f"size={limits['scratch_bytes']},nr_inodes={limits['max_files']}"
    syscalls.mount("tmpfs", SCRATCH, "tmpfs", MOUNT_FLAGS, f"{room},mode=700,huge=never")
    syscalls.mount("proc", "/proc", "proc", MOUNT_FLAGS | syscalls.MS_NOEXEC | syscalls.MS_RDONLY)
    user, group = os.getuid(), os.getgid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    syscalls.map_own_ids(user, group, proc_fd)
    syscalls.write_file("sys/user/max_user_namespaces", "0", proc_fd)


def _switch_user(user: int) -> None:
    """Switch to the jail's own user. The switch hides our files in /proc, which must still be
    written.
    """
    syscalls.switch_user(user)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)


def _become_guest(
    fds: dict[str, int], request: dict[str, Any], program: Any, tier: str, proc_fd: int
) -> NoReturn:
    try:
        _signal.set_wakeup_fd(-1)
        for number in (_signal.SIGCHLD, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        for name in INIT_CHANNELS:
            fds.pop(name, None)
        _close_other_fds({0, 1, 2, proc_fd, *fds.values()}, proc_fd)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        try:  # when memory is short, the guest goes before the init process
            syscalls.write_file("self/oom_score_adj", "1000", proc_fd)
        except OSError as error:  # where this file is another user's
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
        os.close(proc_fd)
        # Only the guest joins the jail's control groups, whose process lists these are: it takes
        # no share of the cores from its init process, which is not frozen with it.
        for name in [name for name in fds if name.startswith("group")]:
            os.write(fds[name], b"0")
            os.close(fds.pop(name))
        if request["nice"]:  # irrevocable
            os.nice(request["nice"])
        for place, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(fds[name], place)
            os.close(fds[name])
        scratch = request.get("scratch", SCRATCH)
        if tier == "landlock":
            landlock.restrict(request["readable"], [scratch, "/dev/null"])
        elif tier == "bwrap":
            os.setsid()
        set_limits(request["limits"], has_laps="cells" in fds or "peer" in fds)
        os.chdir(scratch)
        if scratch != SCRATCH:
            os.environ.update(HOME=scratch, TMPDIR=scratch)
    except (OSError, ValueError):  # ValueError: a limit beyond the permitted maximum
        traceback.print_exc()
        os._exit(SETUP_FAILED_EXIT)
    os.write(fds["closed"], repr(time.monotonic()).encode())
    os.close(fds["closed"])
    guest.run(program, fds.get("cells", -1), fds.get("peer", -1))


def _switch_to_guest_user(user: int) -> None:
    """Switch to the guest's own user, where the init process is root in a container.

    The guest cannot access the init process then. Where the container has no other user, the guest
    at least has no capabilities.
    """
    if os.getuid() == 0:
        try:
            _switch_user(user)
        except OSError:
            syscalls.drop_capabilities()


def set_limits(limits: dict[str, Any], has_laps: bool) -> None:
    """Set the limits of one process; the control group bounds all of a jail together.

    The init process watches CPU time. The kernel's limit is for the whole life of a process, so it
    cannot be set where a limit is for one lap among many.
    """
    cpu = resource.RLIM_INFINITY if has_laps else int(limits["cpu_s"]) + 1
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
        grace = CPU_LIMIT_GRACE_S if which == resource.RLIMIT_CPU and not has_laps else 0
        try:
            resource.setrlimit(which, (most, most + grace))
        except ValueError:
            if which not in UNSETTABLE_LIMITS:
                raise


def set_guest_environment() -> None:
    """Set the environment of guests, which the zygote has already."""
    path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    os.environ.clear()
    os.environ.update(PATH=path, HOME=SCRATCH, TMPDIR=SCRATCH, LANG="C.UTF-8")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):
        os.environ[name] = "1"


def _signal_all(
    signal_number: int, tier: str, cpu: usage.CgroupCpuTime | usage.ScannedCpuTime
) -> None:
    """Signal all other processes of the jail.

    In a process namespace, one call reaches every process. Otherwise repeated scans find the
    processes of its group, which none can leave, until a scan finds no new one. A process that is
    stopped in the middle of a fork stops after it, and the child, not yet visible, continues. So
    all processes must be stopped before the last scan counts.
    """
    if tier == "bwrap":
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal_number)
        return
    reported: set[int] = set()
    all_stopped, until = False, time.monotonic() + STOP_TIMEOUT_S
    while True:
        found = cpu.list_stopped()
        fresh = found.keys() - reported
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        reported |= fresh
        if not fresh and (all_stopped or time.monotonic() > until):
            return
        all_stopped = signal_number != signal.SIGSTOP or all(found.values())
        if not fresh and not all_stopped:
            time.sleep(STOP_POLL_S)


def _kill_rest(tier: str) -> None:
    """Kill all other processes of the jail: of its process namespace, or else of its group."""
    with contextlib.suppress(ProcessLookupError):
        if tier == "bwrap":
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(0, signal.SIGKILL)
