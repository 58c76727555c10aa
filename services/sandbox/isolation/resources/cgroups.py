"""Control groups of jails, on cgroup v1, v2 or both.

They bound the memory and processes of each jail as a whole, and weigh, count and freeze its use of
cores. A host has control groups here only if memory and processes can be bounded. Cores are
weighed, counted and frozen where that works, too. Counting and freezing always use the v2
hierarchy, which needs no controller for them and is mounted beside v1's on most hosts. A process
that v1's freezer holds cannot be killed, and would stay for ever if the sandbox were killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "meshrl-jail-"
CONTROLLERS = ("memory", "pids")
# Half of the default share of a group or process: a jail, however many processes are in it, is
# behind its init process and the sandbox, and not far behind the host's other programs.
SHARES, WEIGHT = 512, 50  # cpu.shares (1024), cpu.weight (100)
# Memory of an earlier jail in a reused group: a quarter of the next jail's allowance beyond its
# limit. The kernel counts in batches, for each core.
MAX_LEFTOVER_BYTES = 4 << 20
UNRECLAIMABLE_STATS = (
    b"rss",
    b"anon",
    b"shmem",
)  # memory that cannot be reclaimed, as v1 and v2 name it
MEMBER_FILES = {
    1: "tasks",
    2: "cgroup.procs",
}  # v1 moves a single thread without stopping all forks


@dataclass(frozen=True)
class CgroupParents:
    """Directories in which groups can be made, by function; on v2 one may serve all."""

    memory: Path
    pids: Path
    cpu: Path | None = None  # weighs
    unified: Path | None = None  # v2: counts and freezes
    cpuacct: Path | None = None  # v1: counts, where there is no v2

    @property
    def paths(self) -> tuple[Path, ...]:
        """Directories, each once."""
        found = (self.memory, self.pids, self.cpu, self.unified, self.cpuacct)
        return tuple(dict.fromkeys(place for place in found if place is not None))

    def get_version(self, path: Path) -> int:
        return 2 if path == self.unified or self.memory == self.pids else 1

    @property
    def missing_cpu_functions(self) -> tuple[str, ...]:
        """Functions for cores that this host's groups lack."""
        words = {"weigh": self.cpu, "count": self.unified or self.cpuacct, "freeze": self.unified}
        return tuple(word for word, home in words.items() if home is None)


def find_parents(
    root: Path = ROOT, own_cgroups: dict[str, str] | None = None
) -> CgroupParents | None:
    """Return where this process may make groups with limits; None where it may not.

    `own_cgroups` has the paths of its groups by controller, the one of v2 under the empty name.
    """
    if own_cgroups is None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own_cgroups = {name: path for _, names, path in lines for name in names.split(",")}
    for homes in (_find_v2_parents(root, own_cgroups), _find_v1_parents(root, own_cgroups)):
        least = homes and replace(homes, cpu=None, unified=None, cpuacct=None)
        if homes is None or least is None or not _can_create(least):
            continue
        if homes.cpu is not None and _can_create(replace(least, cpu=homes.cpu)):
            least = replace(least, cpu=homes.cpu)
        if homes.unified is not None and _can_create(replace(least, unified=homes.unified)):
            return replace(least, unified=homes.unified)
        if homes.cpuacct is not None and _can_create(replace(least, cpuacct=homes.cpuacct)):
            return replace(least, cpuacct=homes.cpuacct)  # v1 counts only where v2 does not
        return least
    return None


def _find_v2_parents(root: Path, own_cgroups: dict[str, str]) -> CgroupParents | None:
    """Return the parents on v2, searching ancestors.

    A group with processes cannot delegate controllers.
    """
    if not (root / "cgroup.controllers").exists() or "" not in own_cgroups:
        return None
    place = root / own_cgroups[""].lstrip("/")
    for home in (place, *place.parents):
        if set(CONTROLLERS) <= _delegate_controllers(home, CONTROLLERS):
            weighs = "cpu" in _delegate_controllers(home, ("cpu",))
            return CgroupParents(home, home, home if weighs else None, home)
        if home == root:
            break
    return None


def _delegate_controllers(parent: Path, wanted: tuple[str, ...]) -> set[str]:
    """Delegate controllers to the groups in `parent` and return those that it delegates."""
    control = parent / "cgroup.subtree_control"
    try:
        if not set(wanted) <= set(control.read_text().split()):
            with contextlib.suppress(OSError):
                control.write_text(" ".join(f"+{name}" for name in wanted))
        return set(control.read_text().split())
    except OSError:
        return set()


def _find_v1_parents(root: Path, own_cgroups: dict[str, str]) -> CgroupParents | None:
    found = {
        name: (
            root / name / own_cgroups[name].lstrip("/")
        ).resolve()  # links, where two are mounted as one
        for name in (*CONTROLLERS, "cpu", "cpuacct")
        if name in own_cgroups and (root / name / "tasks").exists()
    }
    if not set(CONTROLLERS) <= set(found):
        return None
    unified = None
    if "" in own_cgroups and (root / "unified" / "cgroup.procs").exists():
        unified = root / "unified" / own_cgroups[""].lstrip("/")
    return CgroupParents(
        found["memory"], found["pids"], found.get("cpu"), unified, found.get("cpuacct")
    )


def _can_create(parents: CgroupParents) -> bool:
    try:
        group = Cgroup(parents, f"{PREFIX}probe-{os.getpid()}")
        try:
            group.set_limits(64 << 20, 8)
            if group.can_freeze:
                group.set_frozen(True)
                group.set_frozen(False)
        finally:
            group.remove()
    except OSError:
        return False
    return True


class Cgroup:
    """Control group of one jail; reused when it is empty.

    The init process of a jail stays outside: the guest's first process joins, by the group's lists
    of processes. Files that are read or written for each jail stay open.
    """

    def __init__(self, parents: CgroupParents, name: str) -> None:
        self._is_v2 = parents.memory == parents.pids
        self._paths = [home / name for home in parents.paths]
        self._memory, self._pids = parents.memory / name, parents.pids / name
        self._limits = (0, 0)
        self._open_fds: list[int] = []
        self.member_fds: list[int] = []  # its process lists, opened for writing
        self.usage_fd = self._freezer_fd = -1  # `usage` reads its total CPU time
        self._is_frozen = False
        try:
            for home, place in zip(parents.paths, self._paths, strict=True):
                place.mkdir(exist_ok=True)
                joined = MEMBER_FILES[parents.get_version(home)]
                self.member_fds.append(self._open(place / joined, os.O_WRONLY))
            self._process_count_fd = self._open(self._pids / "pids.current", os.O_RDONLY)
            current = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
            self._memory_usage_fd = self._open(self._memory / current, os.O_RDONLY)
            events = "memory.events" if self._is_v2 else "memory.oom_control"
            self._oom_events_fd = self._open(self._memory / events, os.O_RDONLY)
            if parents.cpu is not None:
                place, two = parents.cpu / name, parents.get_version(parents.cpu) == 2
                file, weight = ("cpu.weight", WEIGHT) if two else ("cpu.shares", SHARES)
                os.write(self._open(place / file, os.O_WRONLY), str(weight).encode())
            if parents.unified is not None:
                place = parents.unified / name
                self.usage_fd = self._open(place / "cpu.stat", os.O_RDONLY)
                self._freezer_fd = self._open(place / "cgroup.freeze", os.O_WRONLY)
                os.write(self._freezer_fd, b"0")  # an earlier launcher may have left one
            elif parents.cpuacct is not None:
                self.usage_fd = self._open(parents.cpuacct / name / "cpuacct.usage", os.O_RDONLY)
        except OSError:
            self.remove()
            raise

    def _open(self, path: Path, flags: int) -> int:
        self._open_fds.append(os.open(path, flags | os.O_CLOEXEC))
        return self._open_fds[-1]

    @property
    def can_freeze(self) -> bool:
        return self._freezer_fd >= 0

    def set_frozen(self, frozen: bool) -> None:
        """Freeze or thaw all processes of the group; a killed process dies even when frozen."""
        if frozen != self._is_frozen:
            os.write(self._freezer_fd, b"1" if frozen else b"0")
            self._is_frozen = frozen

    def set_limits(self, memory_bytes: int, processes: int) -> bool:
        """Set the group's limits; False where it still holds more, which can happen on v1."""
        if (memory_bytes, processes) == self._limits:
            return True
        most = self._memory / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")
        try:
            most.write_text(str(memory_bytes))
        except OSError as error:
            if self._is_v2 or error.errno != errno.EBUSY:
                raise
            return False
        if self._is_v2:
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (self._memory / "memory.swap.max").write_text("0")
        (self._pids / "pids.max").write_text(str(processes))
        self._limits = (memory_bytes, processes)
        return True

    def read_oom_kills(self) -> int:
        """Return the number of processes killed at the memory limit so far."""
        lines = os.pread(self._oom_events_fd, 1024, 0).splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)

    def is_empty(self) -> bool:
        """Return whether the group has no process, and no memory but what the kernel can reclaim.

        The files of a jail live until its init process has gone, a moment after its last process.
        """
        if os.pread(self._process_count_fd, 16, 0) != b"0\n":
            return False
        if int(os.pread(self._memory_usage_fd, 32, 0)) <= MAX_LEFTOVER_BYTES:
            return True
        # The charge may be for pages of files that others read, too.
        lines = map(bytes.split, (self._memory / "memory.stat").read_bytes().splitlines())
        return (
            sum(int(size) for name, size in lines if name in UNRECLAIMABLE_STATS)
            <= MAX_LEFTOVER_BYTES
        )

    def remove(self) -> None:
        """Remove the directories of the group, if no process is left in them."""
        for fd in self._open_fds:
            os.close(fd)
        self._open_fds, self.member_fds = [], []
        for place in self._paths:
            with contextlib.suppress(OSError):
                place.rmdir()


def remove_stale(parents: CgroupParents) -> None:
    """Remove groups of sandboxes that have ended; the group's name has the sandbox's pid."""
    for place in [place for home in parents.paths for place in home.glob(f"{PREFIX}*")]:
        owner = place.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                place.rmdir()
