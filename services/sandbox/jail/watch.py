"""Watches a guest's time: the keeper waits here for the guest's end, or the end of its time."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import Any

from . import frames
from .refusals import Refusals

LOOK_S = 0.005  # the least between two looks at the clocks of a guest
SLOWEST, SLOWEST_S = 10, 20.0  # times its wall clock limit, and more: waiting for cores included


def stolen() -> float:
    """Seconds in which the host of this virtual machine has run others on its cores."""
    try:
        with open("/proc/stat", "rb") as file:
            return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


class Watch:
    """Waits for the end of the guest, or of its time.

    Time is CPU time, and wall time less what the guest waited for a core, or the machine for one of
    its host: load does not make a right answer late. The sandbox starts both anew with a frame, at
    each of several cases.
    """

    def __init__(
        self,
        child: int,
        channel: int,
        wake: int,
        limits: dict[str, Any],
        begun: float,
        tier: str,
        refusals: Refusals,
    ) -> None:
        self._child, self._channel, self._wake, self._tier = child, channel, wake, tier
        self._limits, self._refusals = limits, refusals
        self._begun = self._lap = begun
        self._lap_cpu = self._lap_queued = self._lap_all = 0.0
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._poller.register(wake, select.POLLIN)
        if refusals.fd >= 0:
            self._poller.register(refusals.fd, select.POLLIN)
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
                elif fd == self._refusals.fd:
                    self._refusals.answer()
                    if self._refusals.fd < 0:
                        self._poller.unregister(fd)
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
                return self._report(_exit_code(status), usage, "")

    def _stopped(self, which: str) -> dict[str, Any]:
        os.kill(self._child, signal.SIGKILL)
        _, status, usage = os.wait4(self._child, 0)
        return self._report(_exit_code(status), usage, which)

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


def _exit_code(status: int) -> int:
    """os.waitstatus_to_exitcode, which Python 3.8 does not have."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
