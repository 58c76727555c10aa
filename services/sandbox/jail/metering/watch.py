"""Watches a guest's time: the keeper waits here for the guest's end, or the end of its time."""

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

MIN_POLL_S = 0.005  # the least between two looks at the clocks of a guest
FIRST_POLL_S = 0.02  # from a call's begin to the first: most have ended, and no time is so short
UNSEEN_POLL_S = 0.03  # most between two looks once processes have come and gone unseen
POLL_COST_FACTOR = 20  # times the CPU time of a look: the keeper of a large jail does not only look
MAX_SLOWDOWN, MAX_SLOWDOWN_EXTRA_S = (
    10,
    20.0,
)  # times its wall clock limit, and more: waiting for cores included
SETUP_POLL_S = 0.1  # between two looks whether a guest has been set up that takes long
DISK_WAIT_POLL_S = 0.05  # between two looks at a guest that waits for the disk
FROZEN_POLL_S = 3600.0  # between two looks at who cannot run
MIN_STOPPED_POLL_S, MAX_STOPPED_POLL_S = (
    0.05,
    2.0,
)  # between looks at who was stopped by a signal: ever longer
CORES = os.cpu_count() or 1  # that are online
MAX_STOPPED_CPU_S = (
    0.1  # most CPU time of who was: it takes some to stop, and a timer may continue it
)


def read_steal_s() -> float:
    """Seconds in which the host of this virtual machine has run others on a core of it, in the
    mean over its cores: whose core it was, nobody says.
    """
    try:
        with open("/proc/stat", "rb") as file:
            return parse_steal_s(file.readline(), CORES)
    except (OSError, IndexError):
        return 0.0


def parse_steal_s(line: bytes, cores: int) -> float:
    """The same of the first line of /proc/stat, which adds up ticks of so many cores."""
    return int(line.split()[8]) * usage.TICK_S / cores


class GuestDescriptors(NamedTuple):
    """A guest's first process, and descriptors that become readable."""

    pid: int
    channel_fd: int  # when the sandbox says something
    child_exit_fd: int  # when a process of the jail has ended
    setup_fd: int  # when the guest has been set up


class GuestWatch:
    """Waits for the end of the guest, or of its time.

    Time is CPU time of all the jail's processes, and wall time less what nobody of the jail could
    run for want of a core, or the machine for one of its host: load does not make a right answer
    late. The sandbox starts both anew with a frame, at each of several cases. Between two calls it
    stops them, and with them the jail's processes: from outside where a control group can freeze
    them, else by a signal from here (`signal_all` reaches all of them and nobody else).
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
        """`stands`: the wall clock stands until the first lap, or until a turn begins."""
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
        self._lap_steal_s: float | None = None  # until the first look
        self._paused = self._stopped = False
        self._stopped_poll_s = MIN_STOPPED_POLL_S
        self._laps = 0
        self._next_poll_at = self._lap_started_at + FIRST_POLL_S  # when the clocks are read again
        self._clock_paused_s = 0.0  # of this lap, in which the wall clock stood
        self._clock_paused_since: tuple[float, float, float] | None = None  # since when it does
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
            if (ended := self._reap()) is not None:
                return ended
            now = time.monotonic()
            if self._memory is not None and now >= self._memory.next_check_at and not self._stopped:
                if self._memory.check_over_limit():
                    return {**self._kill(""), "memory": True}
                now = time.monotonic()
            if now >= self._next_poll_at:
                begun = time.thread_time()
                left, which = self._compute_time_left()
                if left <= 0:
                    return self._kill(which)
                if self._cpu.has_unseen and not self._paused:
                    left = min(left, UNSEEN_POLL_S)
                now, took = time.monotonic(), time.thread_time() - begun
                self._next_poll_at = now + max(left, MIN_POLL_S, POLL_COST_FACTOR * took)
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
        """Whether the guest has been set up, which is no time of its program's."""
        if not self._is_set_up:
            with contextlib.suppress(BlockingIOError):
                if said := os.read(self._setup_fd, 64):
                    self._is_set_up, self._started_at = True, float(said)
                    self._lap_started_at = max(self._lap_started_at, self._started_at)
        return self._is_set_up

    def _apply_frame(self, frame: Any) -> None:
        """`lap`: a new case begins; `pause`: nothing is asked of the guest until the next lap.
        `stop`: nor can anybody but the keeper keep the jail from running meanwhile. `turn`: whether
        another jail waits for this one; while none does, the wall clock stands.
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
        self._reap()  # what they have used is before the pause, not in it
        self._total_cpu_s = self._cpu.read_s(charged=not resumes)
        if not resumes:  # else from the pause on: what has run in it anyway is not given
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
        """What was waited for a core while the wall clock stood is not taken from it either."""
        now = (time.monotonic(), self._read_main_thread_s()[1], read_steal_s())
        if self._lap_steal_s is None:
            self._lap_steal_s = now[2]
        if not running:
            self._clock_paused_since = self._clock_paused_since or now
        elif self._clock_paused_since is not None:
            since, queued, taken = self._clock_paused_since
            self._clock_paused_s += now[0] - since
            self._lap_queued_s += now[1] - queued
            self._lap_steal_s += now[2] - taken
            self._clock_paused_since = None
        self._next_poll_at = 0.0

    def _compute_time_left(self) -> tuple[float, str]:
        """Seconds until the next look; with none left, which time is over."""
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
        """Seconds of this lap in which the interpreter waited for a core, and no other process or
        thread of its jail can have had it: they have run for as long at most as they have used.
        """
        lost = read_steal_s() - (self._lap_steal_s or 0.0)
        if self._cpu.has_unseen:
            return lost
        ran, queued = self._read_main_thread_s()
        others = max(0.0, used_s - (ran - self._lap_ran_s))
        return lost + max(0.0, queued - self._lap_queued_s - others)

    def _is_waiting_for_disk(self) -> bool:
        """True if the first thread is in an uninterruptible wait that is none for a child.

        A sleeping program is interruptible; the parent of a `vfork` is not, and has a child.
        """
        state = proc.read_stat(self._pid)[:1]
        try:
            with open(f"/proc/{self._pid}/task/{self._pid}/children", "rb") as file:
                return state == [b"D"] and not file.read()
        except OSError:
            return False

    def _read_main_thread_s(self) -> tuple[float, float]:
        """Seconds that its first thread has run, and has waited for a core."""
        return proc.read_schedstat_s(str(self._pid))

    def _reap(self) -> dict[str, Any] | None:
        """The report, if the guest has ended; its orphans are reaped on the way."""
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
            "exit": exit,
            "timeout": timeout,
            "cpu_s": max(self._total_cpu_s, used.ru_utime + used.ru_stime),
            "wall_s": time.monotonic() - self._started_at,
            "laps": self._laps,
        }
