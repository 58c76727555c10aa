"""CPU time and memory of all processes of a jail together, as its init process measures them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from . import proc

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
STOPPED_STATES = (b"T", b"t", b"Z", b"X")  # states of processes: stopped, traced, ended
FIRST_PIDS = 2  # in a process namespace of their own: init, and the guest's first process
MEMORY_POLL_S = 0.05  # between two checks; a core fills some 100 MB in that time
MEMORY_POLL_COST_FACTOR = 50  # times the CPU time of a check: checks cost 2 % of a core at most
MAX_MEMORY_CHECKS = 20  # for short-lived processes, before they exceed the limit
OVERHEAD_BYTES = 16 << 20  # as of control groups: memory of a fork beside the program's own


class CgroupCpuTime:
    """CPU time of a control group, to the microsecond, with processes that have ended.

    `fd` reads `cpu.stat` (v2) or `cpuacct.usage` (v1).
    """

    has_unseen = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._initial_s = self._read()  # of the jails that had the group earlier

    def read_s(self, charged: bool = True) -> float:
        """Return the CPU seconds; all time is measured, so `charged` makes no difference."""
        return self._read() - self._initial_s

    @staticmethod
    def list_pids() -> list[int]:
        """Return no pids: the group's processes are frozen from outside."""
        return []

    @staticmethod
    def list_stopped() -> dict[int, bool]:
        """Return no processes, as above."""
        return {}

    def _read(self) -> float:
        text = os.pread(self._fd, 256, 0)
        if text.startswith(b"usage_usec"):
            return int(text.split()[1]) / 1e6
        return int(text) / 1e9


class ScannedCpuTime:
    """CPU time of the processes that `/proc` shows.

    Measured time stays counted, whether a parent waits for the process or not. The jail is a
    process group, or with 0 all of a process namespace of its own. There it also detects processes
    that came and went between two scans, and sets `has_unseen`. For a group, any process that has
    gone sets it. The time of such processes is invisible unless a parent waited for them. So each
    interval between two scans in which some ended counts as at least one core's time.
    """

    def __init__(self, process_group: int) -> None:
        self._owns_namespace, self._process_group = process_group == 0, str(process_group).encode()
        self._total_s = self._reaped_s = 0.0
        self._seen: dict[tuple[int, bytes], tuple[float, float, int]] = {}
        self._tasks_seen = 1  # of those, the init process is not scanned
        self._unseen_tasks = 0  # processes and threads that came and went between two scans
        self._scanned_at = time.monotonic()
        self.has_unseen = False

    def read_s(self, charged: bool = True) -> float:
        """Return the CPU seconds.

        `charged`: whether the time since the last scan may count; not if all processes were
        stopped.
        """
        before_s, last_scan_at, self._scanned_at = self._total_s, self._scanned_at, time.monotonic()
        last_pid = read_last_pid() if self._owns_namespace else 0
        times = os.times()
        reaped = times.children_user + times.children_system
        of_children, self._reaped_s = reaped - self._reaped_s, reaped
        processes, appeared = {}, 0
        for pid, start, children, threads, _ in self._scan_processes():
            before = self._seen.pop((pid, start), (0.0, 0.0, 0))
            own = before[0]
            with contextlib.suppress(OSError):
                own = max(own, time.clock_gettime(~pid << 3 | 2))  # clock_getcpuclockid(3)
            self._total_s += own - before[0]
            of_children += children - before[1]
            appeared += max(0, threads - before[2])
            processes[pid, start] = (own, children, threads)
        # A process that has gone counts again in the times of the parent that waited for it.
        exited_s = sum(own + children for own, children, _ in self._seen.values())
        self._total_s += max(0.0, of_children - exited_s)
        lost, self._seen = bool(self._seen), processes
        self._tasks_seen += appeared
        unseen = last_pid - FIRST_PIDS + 1 - self._tasks_seen if self._owns_namespace else 0
        if unseen > self._unseen_tasks:
            self._unseen_tasks, lost = unseen, True
        if self.has_unseen and lost and charged:
            self._total_s = max(self._total_s, before_s + self._scanned_at - last_scan_at)
        self.has_unseen = self.has_unseen or (
            self._unseen_tasks > 0 if self._owns_namespace else lost
        )
        return self._total_s

    def list_pids(self) -> list[int]:
        return [pid for pid, *_ in self._scan_processes()]

    def list_stopped(self) -> dict[int, bool]:
        """Return for each process whether it is stopped, or has ended."""
        return {pid: stands for pid, *_, stands in self._scan_processes()}

    def _scan_processes(self) -> list[tuple[int, bytes, float, int, bool]]:
        """Return (pid, start, CPU time of reaped children, threads, is_stopped) of each process."""
        found = []
        for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}:
            fields = proc.read_stat(pid)
            if fields and (self._owns_namespace or fields[2] == self._process_group):
                children = (int(fields[13]) + int(fields[14])) * TICK_S
                stands = fields[0] in STOPPED_STATES
                found.append((pid, fields[19], children, int(fields[17]), stands))
        return found


def read_last_pid() -> int:
    """Return the number that our process namespace assigned last, to a process or a thread."""
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[4])


class MemoryLimitWatch:
    """Limit of the memory of all processes of a jail together, without a control group.

    The address space bounds one process. This watch covers several processes, each below the limit,
    and the memory that they share, which counts once. `list_pids` returns the processes,
    `read_last_pid` the number last assigned to a process or thread: while it equals
    `single_process_pid`, there is one process. `next_check_at` is the time of the next check.
    """

    def __init__(
        self,
        limit_bytes: int,
        list_pids: Callable[[], list[int]],
        read_last_pid: Callable[[], int],
        single_process_pid: int,
    ) -> None:
        self._limit_bytes = limit_bytes + OVERHEAD_BYTES
        self._list_pids, self._read_last_pid, self._single_process_pid = (
            list_pids,
            read_last_pid,
            single_process_pid,
        )
        self.next_check_at = time.monotonic() + MEMORY_POLL_S

    def check_over_limit(self) -> bool:
        """Return whether the processes exceed the limit now."""
        cpu_started_s = time.thread_time()
        found = self._read_last_pid() != self._single_process_pid and self._is_over_limit()
        self.next_check_at = time.monotonic() + max(
            MEMORY_POLL_S, MEMORY_POLL_COST_FACTOR * (time.thread_time() - cpu_started_s)
        )
        return found

    def _is_over_limit(self) -> bool:
        # When one of them ends, its part of shared memory becomes the others': readings in turn
        # are valid when no process came or went between them, or when all of many agree.
        for _ in range(MAX_MEMORY_CHECKS):
            resident = self._read_rss()
            if sum(resident.values()) <= self._limit_bytes:
                return False
            # Shared pages count in full for each above, and in proportion here.
            if sum(map(proc.read_pss_bytes, resident)) <= self._limit_bytes:
                return False
            if self._read_rss().keys() == resident.keys():
                return True
        return True

    def _read_rss(self) -> dict[int, int]:
        """Return the bytes of processes that have memory: one that has ended may still have a
        number.
        """
        found = {pid: proc.read_rss_bytes(pid) for pid in self._list_pids()}
        return {pid: size for pid, size in found.items() if size}
