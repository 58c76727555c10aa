"""Limits of the host behind an error: which limit was reached, its value, and how to raise it.

An error itself says "Too many open files" or "can't start new thread". Call these functions in the
process that has the error, because limits belong to a process. The module uses only the standard
library, because sandboxes import it too.
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
GPU_WORDS = ("cuda", "hip", "gpu")  # GPU memory is no limit of the host
FORK_FUNCTIONS = {
    "_execute_child",
    "_answer",
}  # forking functions of subprocess and our fork server
UNLIMITED = resource.RLIM_INFINITY
# Files of a control group, version 2 and version 1: memory limit, memory use, and the entry of its
# statistics for the cache that is dropped first.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
NO_LIMIT_BYTES = 1 << 60  # version 1 has a number this large without a limit


class FreeSpace(NamedTuple):
    """Free bytes of this host's memory, within our control groups, and of a disk."""

    memory_bytes: int
    disk_bytes: int


def measure_free_space(directory: Path) -> FreeSpace:
    """Measure free memory and free disk space now.

    The disk is the one of `directory`, or of its nearest existing parent directory.
    """
    there = next(place for place in (directory, *directory.absolute().parents) if place.is_dir())
    found = os.statvfs(there)
    groups = (
        free_bytes
        for place in list_control_groups("memory")
        if (free_bytes := read_group_free_bytes(place)) is not None
    )
    return FreeSpace(
        min([_read_kib_as_bytes("/proc/meminfo", "MemAvailable"), *groups]),
        found.f_bavail * found.f_frsize,
    )


def read_group_free_bytes(place: Path) -> int | None:
    """Return the bytes of memory that a control group may still use; None if it has no limit."""
    for _, most, use, cache in _read_memory_limits(place):
        dropped = read_counter(place / "memory.stat", cache) or 0  # the kernel drops it first
        return max(0, most - int(_read(place / use) or 0) + dropped)
    return None


def _read_memory_limits(place: Path) -> Iterator[tuple[str, int, str, str]]:
    """Yield the limit of a control group, if it has one: file name, bytes, and its entries of
    MEMORY_FILES.
    """
    for limit, use, cache in MEMORY_FILES:
        most = _read(place / limit)
        if most.isdigit() and int(most) < NO_LIMIT_BYTES:
            yield limit, int(most), use, cache


def read_memory_limit() -> int | None:
    """Return the lowest memory limit of our control groups in bytes; None without a limit."""
    groups = list_control_groups("memory")
    return min((most for g in groups for _, most, _, _ in _read_memory_limits(g)), default=None)


def count_usable_cores() -> int:
    """Return the number of cores that this process may use.

    This is the size of its CPU affinity, or the share of its control groups if that is smaller,
    rounded up.
    """
    shares = [
        share
        for place in list_control_groups("cpu")
        if (share := read_group_cores(place)) is not None
    ]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, shares)]))


def read_group_cores(place: Path) -> float | None:
    """Return the cores that a control group may use; None if it has no limit."""
    quota, _, period = _read(place / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def explain_hit_limit(error: BaseException) -> str:
    """Explain in a sentence or two which host limit caused an error; empty if none did."""
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
    # EAGAIN may come from a fork or a socket: the functions of the traceback show which.
    calls = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if (number == errno.EAGAIN and calls & FORK_FUNCTIONS) or any(
        word in text for word in THREAD_ERROR_TEXTS
    ):
        return explain_process_limit()
    return ""


def explain_descriptor_limit() -> str:
    """Explain the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"The limit of open files of a process (RLIMIT_NOFILE) is {soft}: raise it with `ulimit "
        f"-n {_suggest_limit(soft, hard)}` before the start, or with LimitNOFILE= of its systemd "
        "unit"
    )


def explain_memory_limit() -> str:
    """Explain the memory limit: address space if that limit is near, else control group or host
    memory.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != UNLIMITED:
        used = _read_kib_as_bytes("/proc/self/status", "VmPeak")
        return (
            f"The limit of a process's address space (RLIMIT_AS) is {_format_size(soft)}, and the "
            f"process has used {_format_size(used)}: raise it with `ulimit -v`"
        )
    if group := _explain_group_memory():
        return group
    available, there = (
        _read_kib_as_bytes("/proc/meminfo", name) for name in ("MemAvailable", "MemTotal")
    )
    return (
        f"The host has {_format_size(available)} of {_format_size(there)} of memory left: use a "
        "smaller model, fewer processes or more memory"
    )


def explain_process_limit() -> str:
    """Explain the limit of processes and threads that is nearest: the user's, the control group's
    or the host's.

    A thread also needs address space for its stack.
    """
    found: list[tuple[float, str]] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != UNLIMITED:
        used = _count_threads(os.getuid())
        how = (
            f"`ulimit -u {_suggest_limit(soft, hard)}`, or with TasksMax= and LimitNPROC= of its "
            "systemd unit"
        )
        what = (
            f"The limit of this user's processes and threads (RLIMIT_NPROC) is {soft}, and {used}"
        )
        found.append((used / max(1, soft), f"{what} exist: raise it with {how}"))
    for place in list_control_groups("pids"):
        most, now = _read(place / "pids.max"), _read(place / "pids.current")
        if most.isdigit() and now.isdigit():
            what = f"The control group {place} may have {most} processes and threads (pids.max)"
            how = "`docker run --pids-limit`, or with TasksMax= of its systemd unit"
            found.append(
                (int(now) / max(1, int(most)), f"{what}, and {now} exist: raise it with {how}")
            )
    most, loads = _read("/proc/sys/kernel/threads-max"), _read("/proc/loadavg").split()
    if most.isdigit() and len(loads) > 3:
        now = loads[3].partition("/")[2]
        what = f"The host may have {most} threads (kernel.threads-max), and {now} exist"
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
    """Explain an out-of-memory kill since `count_oom_kills` returned `before`; empty if there was
    none.
    """
    if count_oom_kills() <= before:
        return ""
    return (
        "the kernel killed it because memory ran out. "
        f"{_explain_group_memory() or explain_memory_limit()}"
    )


def count_oom_kills() -> int:
    """Count the processes that the kernel has killed for lack of memory.

    The count is that of our control group, or of the host where the group reports none.
    """
    counts = [
        count
        for place in list_control_groups("memory")
        for name in ("memory.events", "memory.oom_control")
        if (count := read_counter(place / name, "oom_kill")) is not None
    ]
    return max([*counts, read_counter(Path("/proc/vmstat"), "oom_kill") or 0])


def _explain_group_memory() -> str:
    """Explain the memory limit of the nearest control group that has one; empty without a limit."""
    for place in list_control_groups("memory"):
        for limit, most, use, _ in _read_memory_limits(place):
            if most < _read_kib_as_bytes("/proc/meminfo", "MemTotal"):
                return (
                    f"The control group {place} may have {_format_size(most)} of memory "
                    f"({limit}), and uses {_format_size(int(_read(place / use) or 0))}: raise it "
                    "with `docker run --memory`, or with MemoryMax= of its systemd unit"
                )
    return ""


def list_control_groups(controller: str) -> list[Path]:
    """Return our control group for a controller and its parents, the nearest first."""
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
        except OSError:  # it has exited
            continue
    return count


def _list_directory(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # no descriptor is left, or the process has exited
        return []


def read_counter(path: Path, name: str) -> int | None:
    """Return the value of a name in a file of name-number pairs, one pair per line; None if
    absent.
    """
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def _read_kib_as_bytes(path: str, name: str) -> int:
    """Return the value in bytes of a line that is in KiB."""
    for line in _read(path).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _read(path: Path | str) -> str:
    """Return the content of a kernel file; empty if it is missing or no descriptor is left."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _suggest_limit(soft: int, hard: int) -> str:
    """Return twice the soft limit, at most the hard limit."""
    return str(2 * soft if hard == UNLIMITED else max(soft, min(2 * soft, hard)))


def _format_size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"
