"""The first process of a jail: it closes the jail behind itself, starts the guest, watches it.

The guest runs what the model wrote. The keeper alone holds the channel to the sandbox, is not
dumpable (so the guest can neither trace it nor read its memory or descriptors), cannot be killed
from inside as it is the first process of its process namespace, and learns the nonce that its
report must carry only when the guest has been forked. When it ends, the kernel kills all the rest.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

from . import frames, guest, kernel, landlock, seccomp

SCRATCH = "/tmp"
HIDDEN = kernel.MS_NOSUID | kernel.MS_NODEV
LOOK_S = 0.005  # the least between two looks at the clocks of a guest
OUT_OF_TIME_GRACE_S = 1  # after SIGXCPU, which a program may handle, comes SIGKILL
SLOWEST, SLOWEST_S = 10, 20.0  # times its wall clock limit, and more: waiting for cores included
OWN_PROCESSES = 1  # the keeper itself counts among a jail's
SETUP_FAILED = 70
DESCRIPTORS = 1024  # more than a zygote ever has


def keep(fds: dict[str, int], request: dict[str, Any], tier: str) -> NoReturn:
    """Runs one jail from its closing to its end; never returns."""
    channel = fds["keeper"]
    try:
        _close_others(fds)
        wake = _wakes()
        if tier == "bwrap":
            _join_groups(fds)
            _namespaces(request["limits"])
            kernel.drop_capabilities()
            seccomp.install(seccomp.JAIL)
        else:
            _join_groups(fds)
            os.setsid()
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        program = frames.receive(channel)
        begun = time.monotonic()
        ready, closed = os.pipe()
        child = os.fork()
        if child == 0:
            _become_guest({**fds, "closed": closed}, request, program, tier)
        os.close(closed)
        for name, fd in fds.items():
            if name != "keeper":
                os.close(fd)
        nonce = frames.receive(channel)["nonce"]
        report = _Watch(child, channel, wake, request["limits"], begun, tier).until_ended()
        if not report["timeout"] and not os.read(ready, 1):
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


def _close_others(fds: dict[str, int]) -> None:
    """What a jail was not given: of the zygote, or of the keeper."""
    kept = sorted({0, 1, 2, *fds.values()})
    for before, after in zip(kept, [*kept[1:], DESCRIPTORS]):
        os.closerange(before + 1, after)


def _join_groups(fds: dict[str, int]) -> None:
    """The control groups of this jail, whose lists of processes came opened for writing."""
    for name in [name for name in fds if name.startswith("group")]:
        os.write(fds[name], b"0")
        os.close(fds.pop(name))


def _namespaces(limits: dict[str, Any]) -> None:
    """Mounts are made before the user namespace, which therefore cannot undo them."""
    kernel.unshare(kernel.CLONE_NEWNS)
    size, files = limits["scratch_bytes"], limits["files"]
    kernel.mount(
        "tmpfs", SCRATCH, "tmpfs", HIDDEN, f"size={size},nr_inodes={files},mode=700,huge=never"
    )
    kernel.mount("proc", "/proc", "proc", HIDDEN | kernel.MS_NOEXEC)
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_own_ids(user, group)
    kernel.write("/proc/sys/user/max_user_namespaces", "0")


def _become_guest(
    fds: dict[str, int], request: dict[str, Any], program: Any, tier: str
) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.close(fds.pop("keeper"))
        _close_others(fds)
        for place, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(fds[name], place)
            os.close(fds[name])
        scratch = request.get("scratch", SCRATCH)
        if tier == "bwrap":
            os.setsid()
        else:
            landlock.restrict(request["readable"], [scratch, "/dev/null"])
        limit(request["limits"], laps="cells" in fds or "peer" in fds)
        if tier != "bwrap":
            seccomp.install(seccomp.ONE_GROUP)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        os.chdir(scratch)
        environment(scratch)
        with open("/proc/self/oom_score_adj", "w") as file:  # before the keeper, if one must go
            file.write("1000")
    except OSError as error:
        if error.filename != "/proc/self/oom_score_adj":
            traceback.print_exc()
            os._exit(SETUP_FAILED)
    except ValueError:  # a limit beyond what may be set
        traceback.print_exc()
        os._exit(SETUP_FAILED)
    os.write(fds["closed"], b"y")
    os.close(fds["closed"])
    guest.run(program, fds.get("cells", -1), fds.get("peer", -1))


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
    ):
        resource.setrlimit(which, (soft, soft if hard is None else hard))


def environment(scratch: str) -> None:
    os.environ.clear()
    os.environ.update(
        {
            "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
            "HOME": scratch,
            "TMPDIR": scratch,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )


def _wakes() -> int:
    """A descriptor that becomes readable whenever a process of the jail ends."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def stolen() -> float:
    """Seconds in which the host of this virtual machine has run others on its cores."""
    try:
        with open("/proc/stat", "rb") as file:
            return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def _kill_rest(tier: str) -> None:
    """All others of the jail. By number: as the first process of a namespace, everybody."""
    try:
        if tier == "bwrap":
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(0, signal.SIGKILL)
    except ProcessLookupError:
        return


class _Watch:
    """Waits for the end of the guest, or of its time.

    Time is CPU time, and wall time less what the guest waited for a core, or the machine for one of
    its host: load does not make a right answer late. The sandbox starts both anew with a frame, at
    each of several cases.
    """

    def __init__(
        self, child: int, channel: int, wake: int, limits: dict[str, Any], begun: float, tier: str
    ) -> None:
        self._child, self._channel, self._wake, self._tier = child, channel, wake, tier
        self._limits = limits
        self._begun = self._lap = begun
        self._lap_cpu = self._lap_queued = self._lap_all = 0.0
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(wake, select.POLLIN)
        self._lap_stolen = stolen()
        self._paused = False
        self._laps = 0

    def until_ended(self) -> dict[str, Any]:
        while True:
            ended = self._reaped()
            if ended is not None:
                return ended
            left, which = self._left()
            if left <= 0:
                return self._stopped(which)
            for fd, _ in self._poller.poll(1000 * max(left, LOOK_S)):
                if fd == self._wake:
                    os.read(self._wake, 4096)
                else:
                    self._told(frames.receive(self._channel))

    def _told(self, frame: Any) -> None:
        """`lap`: a new case begins; `pause`: nothing is asked of the guest until the next lap."""
        self._laps += 1
        self._paused = frame.get("pause", False)
        self._lap, self._lap_cpu = time.monotonic(), self._cpu()
        self._lap_queued, self._lap_all = self._queued(), self._cpu_of_all()
        self._lap_stolen = stolen()

    def _left(self) -> tuple[float, str]:
        if self._paused:
            return 3600.0, ""
        if time.monotonic() - self._lap > SLOWEST * self._limits["wall_s"] + SLOWEST_S:
            return -1.0, "wall"
        cpu = self._limits["cpu_s"] - (self._cpu() - self._lap_cpu)
        wall = self._limits["wall_s"] - (time.monotonic() - self._lap)
        if wall <= 0:
            cpu = min(cpu, self._limits["cpu_s"] - (self._cpu_of_all() - self._lap_all))
            wall += self._queued() - self._lap_queued + stolen() - self._lap_stolen
        return (cpu, "cpu") if cpu < wall else (wall, "wall")

    def _cpu(self) -> float:
        try:
            return time.clock_gettime(~self._child << 3 | 2)  # clock_getcpuclockid(3)
        except OSError:
            return self._lap_cpu

    def _cpu_of_all(self) -> float:
        """CPU time of the guest and its children: a bomb that waits for itself is not spared."""
        ticks, own, group = 0, str(os.getpid()), str(os.getpgrp()).encode()
        times = os.times()
        orphans = times.children_user + times.children_system
        for name in os.listdir("/proc"):
            if not name.isdigit() or name == own:
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # names need not be text
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if self._tier == "bwrap" or fields[2] == group:
                ticks += sum(map(int, fields[11:15]))  # its own, and of children that have ended
        return orphans + ticks / os.sysconf("SC_CLK_TCK")

    def _queued(self) -> float:
        try:
            with open(f"/proc/{self._child}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except OSError:
            return 0.0

    def _reaped(self) -> dict[str, Any] | None:
        """The report, if the guest has ended; its orphans are reaped on the way."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == 0:
                return None
            if pid == self._child:
                return self._report(os.waitstatus_to_exitcode(status), usage, "")

    def _stopped(self, which: str) -> dict[str, Any]:
        os.kill(self._child, signal.SIGKILL)
        _, status, usage = os.wait4(self._child, 0)
        return self._report(os.waitstatus_to_exitcode(status), usage, which)

    def _report(self, exit: int, usage: Any, timeout: str) -> dict[str, Any]:
        if exit == -signal.SIGXCPU:
            timeout = "cpu"
        return {
            "exit": exit,
            "timeout": timeout,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": time.monotonic() - self._begun,
            "laps": self._laps,
        }
