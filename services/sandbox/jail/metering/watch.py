"""Watch over a guest's time: the init process waits here for its end, or the end of its time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..wire import frames
from . import proc, usage
from .seccomp_listener import SeccompListener

MIN_POLL_S = 0.005  # the minimum between two checks of a guest's clocks
FIRST_POLL_S = 0.02  # from a call's start to the first: most have ended, and no limit is so short
UNSEEN_POLL_S = 0.03  # most between two checks once processes have come and gone unseen
POLL_COST_FACTOR = 20  # times the CPU time of a check: init of a large jail must not only check
MAX_SLOWDOWN, MAX_SLOWDOWN_EXTRA_S = (
    10,
    20.0,
)  # times its wall clock limit, and more: waits for cores included
SETUP_POLL_S = 0.1  # between two checks of a guest's set-up that takes long
DISK_WAIT_POLL_S = 0.05  # between two checks of a guest that waits for the disk
FROZEN_POLL_S = 3600.0  # between two checks of processes that cannot run
MIN_STOPPED_POLL_S, MAX_STOPPED_POLL_S = (
    0.05,
    2.0,
)  # between checks of processes stopped by a signal: ever longer
CORES = os.cpu_count() or 1  # cores that are online
MAX_STOPPED_CPU_S = (
    0.1  # most CPU time of a stopped one: it takes some to stop, and a timer may continue it
)


def read_steal_s() -> float:
    """Return the seconds in which this virtual machine's host ran others, as a mean over its cores.

    The kernel does not report which core it was.
    """
    try:
        with open("/proc/stat", "rb") as file:
            return parse_steal_s(file.readline(), CORES)
    except (OSError, IndexError):
        return 0.0


def parse_steal_s(line: bytes, cores: int) -> float:
    """Return the same from the first line of /proc/stat, which adds up ticks of so many cores."""
    return int(line.split()[8]) * usage.TICK_S / cores


class GuestDescriptors(NamedTuple):
    """Guest's first process, and descriptors that become readable."""

    pid: int
    channel_fd: int  # readable when the sandbox has sent a frame
    child_exit_fd: int  # when a process of the jail has ended
    setup_fd: int  # when the guest has been set up


class GuestWatch:
    """Watch that waits for the end of the guest, or of its time.

    Time is CPU time of all the jail's processes, and wall time. Wall time excludes waits of the
    jail for a core, or of the machine for one of its host, so that load does not make a right
    answer late. A frame of the sandbox restarts both, for each of several cases. Between two calls
    it pauses them, and the jail's processes: a control group freezes them from outside, else a
    signal from here stops them. `signal_all` reaches all of them and no other process.
    """

    def __init__(
        self,
        guest: GuestDescriptors,
        limits: dict[str, Any],
        cpu: usage.CgroupCpuTime | usage.ScannedCpuTime,
        signal_all: Callable[[int], None],
        listener: SeccompListener,
        memory: usage.MemoryLimitWatch | None,
        clock_paused: bool,
    ) -> None:
        """Create a watch; `clock_paused`: the wall clock stands until a lap, or `turn`."""
        self._pid, self._channel_fd, self._child_exit_fd = (
            guest.pid,
            guest.channel_fd,
            guest.child_exit_fd,
        )
        self._limits, self._cpu, self._signal_all = limits, cpu, signal_all
        self._listener, self._memory = listener, memory
        self._setup_fd, self._is_set_up = guest.setup_fd, False
        self._started_at = self._lap_started_at = time.monotonic()
        self._parallel = max(1, min(os.cpu_count() or 1, limits["processes"]))
        self._total_cpu_s = self._lap_cpu_s = 0.0
        self._lap_ran_s = self._lap_queued_s = 0.0
        self._lap_steal_s: float | None = None  # until the first check
        self._paused = self._stopped = False
        self._stopped_poll_s = MIN_STOPPED_POLL_S
        self._laps = 0
        self._next_poll_at = self._lap_started_at + FIRST_POLL_S  # when the clocks are read again
        self._clock_paused_s = 0.0  # of this lap, while the wall clock stood
        self._clock_paused_since: tuple[float, float, float] | None = None  # since when it stands
        if clock_paused:
            self._lap_steal_s = read_steal_s()
            self._clock_paused_since = (self._lap_started_at, 0.0, self._lap_steal_s)
        self._report_at_exit: dict[str, Any] | None = None  # the report, once the guest has ended
        self._poller = select.poll()
        for fd in (guest.channel_fd, guest.child_exit_fd, listener.fd):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)

    def wait_for_exit(self) -> dict[str, Any]:
        while True:
            if (report := self._reap()) is not None:
                return report
            now = time.monotonic()
            if self._memory is not None and now >= self._memory.next_check_at and not self._stopped:
                if self._memory.check_over_limit():
                    return {**self._kill(""), "out_of_memory": True}
                now = time.monotonic()
            if now >= self._next_poll_at:
                cpu_started_s = time.thread_time()
                remaining_s, which = self._compute_time_left()
                if remaining_s <= 0:
                    return self._kill(which)
                if self._cpu.has_unseen and not self._paused:
                    remaining_s = min(remaining_s, UNSEEN_POLL_S)
                now, took = time.monotonic(), time.thread_time() - cpu_started_s
                self._next_poll_at = now + max(remaining_s, MIN_POLL_S, POLL_COST_FACTOR * took)
            next_look = self._next_poll_at
            if self._memory is not None and not self._stopped:
                next_look = min(next_look, self._memory.next_check_at)
            for fd, _ in self._poller.poll(1000 * max(next_look - now, 0)):
                if fd == self._child_exit_fd:
                    os.read(self._child_exit_fd, 4096)
                elif fd == self._listener.fd:
                    self._listener.deny_pending()
                    if self._listener.fd < 0:
                        self._poller.unregister(fd)
                else:
                    self._apply_frame(frames.receive(self._channel_fd))

    def check_set_up(self) -> bool:
        """Return whether the guest has been set up; the set-up is not its program's time."""
        if not self._is_set_up:
            with contextlib.suppress(BlockingIOError):
                if content := os.read(self._setup_fd, 64):
                    self._is_set_up, self._started_at = True, float(content)
                    self._lap_started_at = max(self._lap_started_at, self._started_at)
        return self._is_set_up

    def _apply_frame(self, frame: Any) -> None:
        """Apply a frame of the sandbox.

        `lap` starts a new case. `pause` stops the guest until the next lap; `stop`: only the init
        process stops the jail. `turn`: whether another jail waits for this one; the wall clock
        stands otherwise.
        """
        if "lap" not in frame:
            self._set_clock_running(frame["turn"])
            return
        self._laps += 1
        self._listener.start_lap()
        resumes, self._paused = self._paused, bool(frame.get("pause", False))
        if self._paused and frame.get("stop", False):
            self._signal_all(signal.SIGSTOP)
            self._stopped, self._stopped_poll_s = True, MIN_STOPPED_POLL_S
        self._reap()  # their earlier usage is before the pause, not in it
        self._total_cpu_s = self._cpu.read_s(charged=not resumes)
        if not resumes:  # else from the pause on: time used during it counts
            self._lap_cpu_s = self._total_cpu_s
        self._lap_started_at = time.monotonic()
        self._lap_ran_s, self._lap_queued_s = self._read_main_thread_s()
        self._lap_steal_s = None
        self._clock_paused_s, self._clock_paused_since = 0.0, None
        self._set_clock_running(frame.get("turn", True))
        self._next_poll_at = self._lap_started_at + FIRST_POLL_S
        if self._stopped and not self._paused:
            self._stopped = False
            self._signal_all(signal.SIGCONT)

    def _set_clock_running(self, running: bool) -> None:
        """Start or stop the wall clock; waits for a core while it stands are not deducted from it
        either.
        """
        now = (time.monotonic(), self._read_main_thread_s()[1], read_steal_s())
        if self._lap_steal_s is None:
            self._lap_steal_s = now[2]
        if not running:
            self._clock_paused_since = self._clock_paused_since or now
        elif self._clock_paused_since is not None:
            since, queued, steal_s = self._clock_paused_since
            self._clock_paused_s += now[0] - since
            self._lap_queued_s += now[1] - queued
            self._lap_steal_s += now[2] - steal_s
            self._clock_paused_since = None
        self._next_poll_at = 0.0

    def _compute_time_left(self) -> tuple[float, str]:
        """Return the seconds until the next check; if none are left, also the limit that was
        exceeded.
        """
        if self._paused and not self._stopped:
            return FROZEN_POLL_S, ""
        self._total_cpu_s = self._cpu.read_s(charged=not self._paused)
        used = self._total_cpu_s - self._lap_cpu_s
        if self._paused:
            self._signal_all(signal.SIGSTOP)
            self._stopped_poll_s = min(2 * self._stopped_poll_s, MAX_STOPPED_POLL_S)
            return (self._stopped_poll_s if used < MAX_STOPPED_CPU_S else -1.0), "cpu"
        if self._lap_steal_s is None:
            self._lap_steal_s = read_steal_s()
        ready = self.check_set_up()
        elapsed = time.monotonic() - self._lap_started_at
        if elapsed > MAX_SLOWDOWN * self._limits["wall_s"] + MAX_SLOWDOWN_EXTRA_S:
            return -1.0, "starved"
        cpu, wall = (
            self._limits["cpu_s"] - used,
            self._limits["wall_s"] - elapsed + self._clock_paused_s,
        )
        if self._clock_paused_since is not None:
            wall = self._limits["wall_s"]
        if wall <= 0:
            wall = wall + self._uncharged_wait_s(used) if ready else SETUP_POLL_S
            if wall <= 0 and self._is_waiting_for_disk():
                wall = DISK_WAIT_POLL_S
        return (cpu / self._parallel, "cpu") if cpu < wall else (wall, "wall")

    def _uncharged_wait_s(self, used_s: float) -> float:
        """Return this lap's seconds in which the interpreter waited for a core that no one else
        had.

        Other processes or threads of the jail have run at most for the time that they have used.
        """
        lost = read_steal_s() - (self._lap_steal_s or 0.0)
        if self._cpu.has_unseen:
            return lost
        ran, queued = self._read_main_thread_s()
        others = max(0.0, used_s - (ran - self._lap_ran_s))
        return lost + max(0.0, queued - self._lap_queued_s - others)

    def _is_waiting_for_disk(self) -> bool:
        """Return whether the first thread waits uninterruptibly, and not for a child.

        A sleeping program is interruptible; the parent of a `vfork` is not, and has a child.
        """
        state = proc.read_stat(self._pid)[:1]
        try:
            with open(f"/proc/{self._pid}/task/{self._pid}/children", "rb") as file:
                return state == [b"D"] and not file.read()
        except OSError:
            return False

    def _read_main_thread_s(self) -> tuple[float, float]:
        """Return the seconds that its first thread has run, and has waited for a core."""
        return proc.read_schedstat_s(str(self._pid))

    def _reap(self) -> dict[str, Any] | None:
        """Reap orphans, and return the report if the guest has ended."""
        with contextlib.suppress(ChildProcessError):
            while self._report_at_exit is None:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    self._report_at_exit = self._build_report(status, used, "")
        return self._report_at_exit

    def _kill(self, timeout: str) -> dict[str, Any]:
        self._signal_all(signal.SIGKILL)
        _, status, used = os.wait4(self._pid, 0)
        return self._build_report(status, used, timeout)

    def _build_report(self, status: int, used: Any, timeout: str) -> dict[str, Any]:
        # os.waitstatus_to_exitcode, which Python 3.8 does not have.
        exit = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if exit == -signal.SIGXCPU:
            timeout = "cpu"
        self.check_set_up()
        if isinstance(self._cpu, usage.CgroupCpuTime):
            self._total_cpu_s = self._cpu.read_s()
        return {
            "exit_code": exit,
            "timeout": timeout,
            "cpu_s": max(self._total_cpu_s, used.ru_utime + used.ru_stime),
            "wall_s": time.monotonic() - self._started_at,
            "laps": self._laps,
        }
