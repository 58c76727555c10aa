"""Control groups that count the CPU time of a process and of all its descendants.

If no group can be created, the process tree is read instead, which misses processes whose parent
has exited.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Protocol

ROOT = Path("/sys/fs/cgroup")
PREFIX = "meshrl-tests-"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name: user and system time, also of exited children.
TIMES = slice(11, 15)


class Account(Protocol):
    """Sum of the CPU time of some processes."""

    def cpu_s(self) -> float:
        """Return the CPU seconds used up to now."""

    def add(self, pid: int) -> None:
        """Count a process and its later children."""

    def close(self) -> None:
        """Release the account's resources."""


class Group:
    """Account that is a control group of v1's cpuacct or of v2."""

    def __init__(self, place: Path, counter: str) -> None:
        self.place, self.counter = place, counter

    def cpu_s(self) -> float:
        """Return the CPU seconds that the kernel has charged to the group."""
        text = (self.place / self.counter).read_text()
        if self.counter == "cpuacct.usage":
            return int(text) / 1e9
        return int(text.split()[1]) / 1e6  # `usage_usec N` is the first line of cpu.stat

    def add(self, pid: int) -> None:
        """Move a process into the group, in which its later children start."""
        (self.place / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group, and those that jails made below it, unless processes are left."""
        for place, _, _ in os.walk(self.place, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(place)


class Tree:
    """Account that reads the process tree below some processes."""

    def __init__(self) -> None:
        self._roots: list[int] = []

    def cpu_s(self) -> float:
        """Return the CPU seconds of the processes, their descendants and ended children."""
        total, pending = 0, list(self._roots)
        while pending:
            pid = pending.pop()
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
                total += sum(map(int, stat[stat.rindex(")") + 2 :].split()[TIMES]))
                for task in os.listdir(f"/proc/{pid}/task"):
                    children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                    pending += map(int, children.split())
            except (OSError, ValueError):
                continue  # it has exited; its parent has its time
        return total / TICKS_PER_S

    def add(self, pid: int) -> None:
        """Count the tree below a process."""
        if pid not in self._roots:
            self._roots.append(pid)

    def close(self) -> None:
        """Do nothing: a tree has no resources."""


def open_account(name: str) -> Account:
    """Return a new account: a control group where one can be made, otherwise a process tree."""
    return open_group(f"{PREFIX}{os.getpid()}-{name}-{secrets.token_hex(4)}") or Tree()


def open_group(name: str) -> Group | None:
    """Return a new control group that counts; None where none can be made."""
    for controller, counter in (("cpuacct", "cpuacct.usage"), ("", "cpu.stat")):
        try:
            above = own_group(controller)
            sweep(above)
            (above / name).mkdir()
        except (OSError, LookupError):
            continue
        group = Group(above / name, counter)
        try:
            group.cpu_s()
            # A move is the only test of whether processes can be moved.
            child = os.fork()
            if child == 0:
                try:
                    group.add(os.getpid())
                except OSError:
                    os._exit(1)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                return group
        except (OSError, ValueError):
            pass
        group.close()
    return None


def sweep(above: Path) -> None:
    """Remove the groups of exited processes: no process can remove its own group."""
    for place in above.glob(f"{PREFIX}*"):
        pid = int(place.name.removeprefix(PREFIX).partition("-")[0])
        if not Path(f"/proc/{pid}").exists():
            Group(place, "").close()


def own_group(controller: str) -> Path:
    """Return the directory of this process's control group, or of the one it was in before it was
    moved to an account; LookupError if there is none.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            place = (ROOT / controller / path.lstrip("/")).resolve()
            while place.name.startswith(PREFIX):
                place = place.parent
            if (place / "cgroup.procs").exists():
                return place
    raise LookupError(controller)
