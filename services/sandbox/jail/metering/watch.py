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
from .refusals import Refusals

LOOK_S = 0.005  # the least between two looks at the clocks of a guest
FIRST_LOOK_S = 0.02  # from a call's begin to the first: most have ended, and no time is so short
BLIND_LOOK_S = 0.03  # most between two looks once processes have come and gone unseen
LOOK_SHARE = 20  # times the CPU time of a look: the keeper of a large jail does not only look
SLOWEST, SLOWEST_S = 10, 20.0  # times its wall clock limit, and more: waiting for cores included
SETTING_UP_S = 0.1  # between two looks whether a guest has been set up that takes long
DISK_LOOK_S = 0.05  # between two looks at a guest that waits for the disk
FROZEN_S = 3600.0  # between two looks at who cannot run
STOPPED_LOOK_S, STOPPED_S = 0.05, 2.0  # between looks at who was stopped by a signal: ever longer
CORES = os.cpu_count() or 1  # that are online
STOPPED_CPU_S = 0.1  # most CPU time of who was: it takes some to stop, and a timer may continue it


def stolen() -> float:
    """Seconds in which the host of this virtual machine has run others on a core of it, in the
    mean over its cores: whose core it was, nobody says.
    """
    try:
        with open("/proc/stat", "rb") as file:
            return stolen_of(file.readline(), CORES)
    except (OSError, IndexError):
        return 0.0


def stolen_of(line: bytes, cores: int) -> float:
    """The same of the first line of /proc/stat, which adds up ticks of so many cores."""
    return int(line.split()[8]) * usage.TICK_S / cores


class WatchedGuest(NamedTuple):
    """A guest's first process, and descriptors that become readable."""

    pid: int
    channel: int  # when the sandbox says something
    wake: int  # when a process of the jail has ended
    ready: int  # when the guest has been set up


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
        guest: WatchedGuest,
        limits: dict[str, Any],
        cpu: usage.Grouped | usage.Scanned,
        signal_all: Callable[[int], None],
        refusals: Refusals,
        together: usage.WatchedMemory | None,
        stands: bool,
    ) -> None:
        """`stands`: the wall clock stands until the first lap, or until a turn begins."""
        self._child, self._channel, self._wake = guest.pid, guest.channel, guest.wake
        self._limits, self._cpu, self._signal_all = limits, cpu, signal_all
        self._refusals, self._memory = refusals, together
        self._ready, self._set_up = guest.ready, False
        self._begun = self._lap = time.monotonic()
        self._parallel = max(1, min(os.cpu_count() or 1, limits["processes"]))
        self._total = self._lap_cpu = 0.0
        self._lap_ran = self._lap_queued = 0.0
        self._lap_stolen: float | None = None  # until the first look
        self._paused = self._stopped = False
        self._stopped_look = STOPPED_LOOK_S
        self._laps = 0
        self._next_look = self._lap + FIRST_LOOK_S  # when the clocks are read again
        self._stood_s = 0.0  # of this lap, in which the wall clock stood
        self._stands: tuple[float, float, float] | None = None  # since when it does
        if stands:
            self._lap_stolen = stolen()
            self._stands = (self._lap, 0.0, self._lap_stolen)
        self._over: dict[str, Any] | None = None  # the report, once the guest has ended
        self._poller = select.poll()
        for fd in (guest.channel, guest.wake, refusals.fd):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)

    def until_ended(self) -> dict[str, Any]:
        while True:
            if (ended := self._reaped()) is not None:
                return ended
            now = time.monotonic()
            if self._memory is not None and now >= self._memory.due and not self._stopped:
                if self._memory.over():
                    return {**self._ended(""), "memory": True}
                now = time.monotonic()
            if now >= self._next_look:
                begun = time.thread_time()
                left, which = self._left()
                if left <= 0:
                    return self._ended(which)
                if self._cpu.blind and not self._paused:
                    left = min(left, BLIND_LOOK_S)
                now, took = time.monotonic(), time.thread_time() - begun
                self._next_look = now + max(left, LOOK_S, LOOK_SHARE * took)
            next_look = self._next_look
            if self._memory is not None and not self._stopped:
                next_look = min(next_look, self._memory.due)
            for fd, _ in self._poller.poll(1000 * max(next_look - now, 0)):
                if fd == self._wake:
                    os.read(self._wake, 4096)
                elif fd == self._refusals.fd:
                    self._refusals.answer()
                    if self._refusals.fd < 0:
                        self._poller.unregister(fd)
                else:
                    self._told(frames.receive(self._channel))

    def set_up(self) -> bool:
        """Whether the guest has been set up, which is no time of its program's."""
        if not self._set_up:
            with contextlib.suppress(BlockingIOError):
                if said := os.read(self._ready, 64):
                    self._set_up, self._begun = True, float(said)
                    self._lap = max(self._lap, self._begun)
        return self._set_up

    def _told(self, frame: Any) -> None:
        """`lap`: a new case begins; `pause`: nothing is asked of the guest until the next lap.
        `stop`: nor can anybody but the keeper keep the jail from running meanwhile. `turn`: whether
        another jail waits for this one; while none does, the wall clock stands.
        """
        if "lap" not in frame:
            self._turned(frame["turn"])
            return
        self._laps += 1
        self._refusals.lap()
        resumes, self._paused = self._paused, bool(frame.get("pause", False))
        if self._paused and frame.get("stop", False):
            self._signal_all(signal.SIGSTOP)
            self._stopped, self._stopped_look = True, STOPPED_LOOK_S
        self._reaped()  # what they have used is before the pause, not in it
        self._total = self._cpu.seconds(charged=not resumes)
        if not resumes:  # else from the pause on: what has run in it anyway is not given
            self._lap_cpu = self._total
        self._lap = time.monotonic()
        self._lap_ran, self._lap_queued = self._of_interpreter()
        self._lap_stolen = None
        self._stood_s, self._stands = 0.0, None
        self._turned(frame.get("turn", True))
        self._next_look = self._lap + FIRST_LOOK_S
        if self._stopped and not self._paused:
            self._stopped = False
            self._signal_all(signal.SIGCONT)

    def _turned(self, ours: bool) -> None:
        """What was waited for a core while the wall clock stood is not taken from it either."""
        now = (time.monotonic(), self._of_interpreter()[1], stolen())
        if self._lap_stolen is None:
            self._lap_stolen = now[2]
        if not ours:
            self._stands = self._stands or now
        elif self._stands is not None:
            since, queued, taken = self._stands
            self._stood_s += now[0] - since
            self._lap_queued += now[1] - queued
            self._lap_stolen += now[2] - taken
            self._stands = None
        self._next_look = 0.0

    def _left(self) -> tuple[float, str]:
        """Seconds until the next look; with none left, which time is over."""
        if self._paused and not self._stopped:
            return FROZEN_S, ""
        self._total = self._cpu.seconds(charged=not self._paused)
        used = self._total - self._lap_cpu
        if self._paused:
            self._signal_all(signal.SIGSTOP)
            self._stopped_look = min(2 * self._stopped_look, STOPPED_S)
            return (self._stopped_look if used < STOPPED_CPU_S else -1.0), "cpu"
        if self._lap_stolen is None:
            self._lap_stolen = stolen()
        ready = self.set_up()
        elapsed = time.monotonic() - self._lap
        if elapsed > SLOWEST * self._limits["wall_s"] + SLOWEST_S:
            return -1.0, "starved"
        cpu, wall = self._limits["cpu_s"] - used, self._limits["wall_s"] - elapsed + self._stood_s
        if self._stands is not None:
            wall = self._limits["wall_s"]
        if wall <= 0:
            wall = wall + self._excused(used) if ready else SETTING_UP_S
            if wall <= 0 and self._waits_for_disk():
                wall = DISK_LOOK_S
        return (cpu / self._parallel, "cpu") if cpu < wall else (wall, "wall")

    def _excused(self, used: float) -> float:
        """Seconds of this lap in which the interpreter waited for a core, and no other process or
        thread of its jail can have had it: they have run for as long at most as they have used.
        """
        lost = stolen() - (self._lap_stolen or 0.0)
        if self._cpu.blind:
            return lost
        ran, queued = self._of_interpreter()
        others = max(0.0, used - (ran - self._lap_ran))
        return lost + max(0.0, queued - self._lap_queued - others)

    def _waits_for_disk(self) -> bool:
        """True if the first thread is in an uninterruptible wait that is none for a child.

        A sleeping program is interruptible; the parent of a `vfork` is not, and has a child.
        """
        state = proc.fields(self._child)[:1]
        try:
            with open(f"/proc/{self._child}/task/{self._child}/children", "rb") as file:
                return state == [b"D"] and not file.read()
        except OSError:
            return False

    def _of_interpreter(self) -> tuple[float, float]:
        """Seconds that its first thread has run, and has waited for a core."""
        return proc.scheduled(str(self._child))

    def _reaped(self) -> dict[str, Any] | None:
        """The report, if the guest has ended; its orphans are reaped on the way."""
        with contextlib.suppress(ChildProcessError):
            while self._over is None:
                pid, status, used = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child:
                    self._over = self._report(status, used, "")
        return self._over

    def _ended(self, which: str) -> dict[str, Any]:
        self._signal_all(signal.SIGKILL)
        _, status, used = os.wait4(self._child, 0)
        return self._report(status, used, which)

    def _report(self, status: int, used: Any, timeout: str) -> dict[str, Any]:
        # os.waitstatus_to_exitcode, which Python 3.8 does not have.
        exit = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if exit == -signal.SIGXCPU:
            timeout = "cpu"
        self.set_up()
        if isinstance(self._cpu, usage.Grouped):
            self._total = self._cpu.seconds()
        return {
            "exit": exit,
            "timeout": timeout,
            "cpu_s": max(self._total, used.ru_utime + used.ru_stime),
            "wall_s": time.monotonic() - self._begun,
            "laps": self._laps,
        }
