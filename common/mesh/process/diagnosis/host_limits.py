"""Limits of the host that an error tells of: which one was hit, its value, and how to raise it.

An error itself says "Too many open files" or "can't start new thread". Asked in the process that
has it, whose limits these are; only the standard library, because sandboxes ask too.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMORY_ERROR_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
)
THREAD_ERROR_TEXTS = (
    "can't start new thread",
    "cannot create thread",
    "resource temporarily unavailable",
)
GPU_WORDS = ("cuda", "hip", "gpu")  # their memory is no limit of the host
FORK_FUNCTIONS = {"_execute_child", "_answer"}  # of subprocess, and of our nursery: they fork
UNLIMITED = resource.RLIM_INFINITY
# Files of a control group, of its second version and its first: the limit of memory, its use, and
# in its statistics the cache that is dropped first.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
NO_LIMIT_BYTES = 1 << 60  # bytes: the first version has a number this large where there is none


class FreeSpace(NamedTuple):
    """Bytes that are left of this host's memory, within our control groups, and of a disk."""

    memory_bytes: int
    disk_bytes: int


def measure_free_space(directory: Path) -> FreeSpace:
    """What is left now; the disk is the one below `directory`, or below the nearest directory above
    it that there is.
    """
    there = next(place for place in (directory, *directory.absolute().parents) if place.is_dir())
    found = os.statvfs(there)
    groups = (
        left
        for place in list_control_groups("memory")
        if (left := read_group_free_bytes(place)) is not None
    )
    return FreeSpace(
        min([_read_kib_as_bytes("/proc/meminfo", "MemAvailable"), *groups]),
        found.f_bavail * found.f_frsize,
    )


def read_group_free_bytes(place: Path) -> int | None:
    """Bytes of memory that a control group may still take; None: it has no limit of its own."""
    for _, most, use, cache in _read_memory_limits(place):
        dropped = read_counter(place / "memory.stat", cache) or 0  # before anything else is
        return max(0, most - int(_read(place / use) or 0) + dropped)
    return None


def _read_memory_limits(place: Path) -> Iterator[tuple[str, int, str, str]]:
    """A control group's limit, if it has one: its file, its bytes, and what `MEMORY` has of it."""
    for limit, use, cache in MEMORY_FILES:
        most = _read(place / limit)
        if most.isdigit() and int(most) < NO_LIMIT_BYTES:
            yield limit, int(most), use, cache


def read_memory_limit() -> int | None:
    """The most bytes of memory that our control groups let us have; None: as many as there are."""
    groups = list_control_groups("memory")
    return min((most for g in groups for _, most, _, _ in _read_memory_limits(g)), default=None)


def count_usable_cores() -> int:
    """Cores that this process may use: those it may run on, or the share of them that its control
    groups have, rounded up.
    """
    shares = [
        share
        for place in list_control_groups("cpu")
        if (share := read_group_cores(place)) is not None
    ]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, shares)]))


def read_group_cores(place: Path) -> float | None:
    """How many cores' time a control group may use; None: it has no limit of its own."""
    quota, _, period = _read(place / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def explain_hit_limit(error: BaseException) -> str:
    """What limit of the host an error tells of, in a sentence or two; empty for none."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower() if isinstance(error, RuntimeError | OSError) else ""
    if any(word in text for word in GPU_WORDS):
        return ""
    if number == errno.EMFILE:
        return explain_descriptor_limit()
    if number == errno.ENFILE:
        most = _read("/proc/sys/fs/file-max")
        return (
            f"The host has no file descriptors left (fs.file-max is {most}): "
            "raise it with `sysctl -w fs.file-max=...`"
        )
    if (
        number == errno.ENOMEM
        or isinstance(error, MemoryError)
        or any(word in text for word in MEMORY_ERROR_TEXTS)
    ):
        return explain_memory_limit()
    # EAGAIN may be of a fork, or of a socket: the calls that it came through say so.
    calls = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if (number == errno.EAGAIN and calls & FORK_FUNCTIONS) or any(
        word in text for word in THREAD_ERROR_TEXTS
    ):
        return explain_process_limit()
    return ""


def explain_descriptor_limit() -> str:
    """That of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"The limit of open files of a process (RLIMIT_NOFILE) is {soft}: raise it with "
        f"`ulimit -n {_suggest_limit(soft, hard)}` before the start, or LimitNOFILE= of its "
        "systemd unit"
    )


def explain_memory_limit() -> str:
    """That of address space if there is one and it is near; else the control group's, or the host's
    memory.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != UNLIMITED:
        used = _read_kib_as_bytes("/proc/self/status", "VmPeak")
        return (
            f"The limit of a process's address space (RLIMIT_AS) is {_format_size(soft)}, of "
            "which it has "
            f"had {_format_size(used)}: raise it with `ulimit -v`"
        )
    if group := _explain_group_memory():
        return group
    left, there = (
        _read_kib_as_bytes("/proc/meminfo", name) for name in ("MemAvailable", "MemTotal")
    )
    return (
        f"The host has {_format_size(left)} of memory left of {_format_size(there)}: use a "
        "smaller model or "
        "fewer processes, or more memory"
    )


def explain_process_limit() -> str:
    """That of processes and threads: the one that is nearest of the user's, the control group's and
    the host's; a thread also takes address space for its stack.
    """
    found: list[tuple[float, str]] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != UNLIMITED:
        used = _count_threads(os.getuid())
        how = (
            f"`ulimit -u {_suggest_limit(soft, hard)}`, or TasksMax= and LimitNPROC= of its "
            "systemd unit"
        )
        what = (
            f"The limit of this user's processes and threads (RLIMIT_NPROC) is {soft}, {used} are"
        )
        found.append((used / max(1, soft), f"{what} there: raise it with {how}"))
    for place in list_control_groups("pids"):
        most, now = _read(place / "pids.max"), _read(place / "pids.current")
        if most.isdigit() and now.isdigit():
            what = f"The control group {place} may have {most} processes and threads (pids.max)"
            how = "`docker run --pids-limit`, or TasksMax= of its systemd unit"
            found.append((int(now) / max(1, int(most)), f"{what}, {now} are there: raise {how}"))
    most, loads = _read("/proc/sys/kernel/threads-max"), _read("/proc/loadavg").split()
    if most.isdigit() and len(loads) > 3:
        now = loads[3].partition("/")[2]
        what = f"The host may have {most} threads (kernel.threads-max), {now} are there"
        found.append((int(now) / max(1, int(most)), f"{what}: raise it with `sysctl -w`"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != UNLIMITED:
        found.append(
            (
                _read_kib_as_bytes("/proc/self/status", "VmPeak") / max(1, soft),
                explain_memory_limit(),
            )
        )
    return max(found, default=(0.0, ""))[1]


def explain_oom_kill(before: int) -> str:
    """Why the kernel has killed a process for memory since it had killed `before`, as `oom_kills`
    counted; empty if it has not.
    """
    if count_oom_kills() <= before:
        return ""
    return (
        "the kernel has killed it for want of memory. "
        f"{_explain_group_memory() or explain_memory_limit()}"
    )


def count_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory, in our control group or, where it
    does not say, on this host.
    """
    counts = [
        count
        for place in list_control_groups("memory")
        for name in ("memory.events", "memory.oom_control")
        if (count := read_counter(place / name, "oom_kill")) is not None
    ]
    return max([*counts, read_counter(Path("/proc/vmstat"), "oom_kill") or 0])


def _explain_group_memory() -> str:
    """The limit of memory of the nearest control group that has one."""
    for place in list_control_groups("memory"):
        for limit, most, use, _ in _read_memory_limits(place):
            if most < _read_kib_as_bytes("/proc/meminfo", "MemTotal"):
                return (
                    f"The control group {place} may have {_format_size(most)} of memory ({limit}), "
                    f"and has {_format_size(int(_read(place / use) or 0))}: raise it with "
                    "`docker run --memory`, or MemoryMax= of its systemd unit"
                )
    return ""


def list_control_groups(controller: str) -> list[Path]:
    """Our control group for a controller and those above it, the nearest first."""
    found: list[Path] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = CGROUPS / controllers if controllers else CGROUPS
        if controllers and controller not in controllers.split(","):
            continue
        place = base / path.lstrip("/")
        for above in (place, *place.parents):
            found += [above] if above.is_dir() else []
            if above == base:
                break
    return found


def _count_threads(user: int) -> int:
    count = 0
    for number in filter(str.isdigit, _list_directory("/proc")):
        try:
            if os.stat(f"/proc/{number}").st_uid == user:
                count += len(_list_directory(f"/proc/{number}/task"))
        except OSError:  # it has ended
            continue
    return count


def _list_directory(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # no descriptor is left for it, or it has ended
        return []


def read_counter(path: Path, name: str) -> int | None:
    """What a file of names and numbers, one pair a line, says of a name; None: nothing."""
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def _read_kib_as_bytes(path: str, name: str) -> int:
    """Bytes of a line that is in KiB."""
    for line in _read(path).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _read(path: Path | str) -> str:
    """The content of a file of the kernel; empty where it has none, or no descriptor is left."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _suggest_limit(soft: int, hard: int) -> str:
    """Twice as much as there is, as far as one may without being root."""
    return str(2 * soft if hard == UNLIMITED else max(soft, min(2 * soft, hard)))


def _format_size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
