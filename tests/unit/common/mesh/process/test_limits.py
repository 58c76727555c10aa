"""A limit of the host that an error tells of is named, with its value and how it is raised."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from meshrl.common.mesh.process.ends import limits
from meshrl.common.mesh.process.ends.failure import Failure
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.starting import Spawning
from tests.load import scaled
from tests.unit.common.mesh.process.modules import module, python

FILES = "held = []\nwhile True:\n    held.append(open('/dev/null'))\n"
MEMORY = "held = bytearray(1 << 31)\n"
THREADS = """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
# Root has no limit of processes: as somebody else it prints what it would have left.
PROCESSES = """
import os, resource, subprocess, sys, threading, time
from meshrl.common.mesh.process.ends import limits
if os.getuid() == 0:
    os.setresuid(64219, 64219, 64219)
resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError as error:
    print(limits.hit(error))
try:
    subprocess.Popen([sys.executable])
except OSError as error:
    print(limits.hit(error), flush=True)
os._exit(1)
"""


async def run(tmp_path: Path, name: str, code: str, rlimits: dict[str, int]) -> Failure | None:
    """The failure of a module that runs under these limits."""
    host, log = SystemHost(), tmp_path / f"{name}.log"
    env = module(tmp_path, name, code)
    child = host.spawn(python(name), name=name, env=env, log=log, how=Spawning(rlimits=rlimits))
    ended = await child.wait(scaled(60.0))
    assert ended, log.read_text()
    return host.failure_of(child.pid, log, ended)


@pytest.mark.parametrize(
    ("code", "rlimits", "type", "said"),
    [
        (FILES, {"NOFILE": 40}, "OSError", "(RLIMIT_NOFILE) is 40: raise it with `ulimit -n"),
        (MEMORY, {"AS": 1 << 30}, "MemoryError", "(RLIMIT_AS) is 1.0 GiB, of which it has had"),
        (THREADS, {"AS": 1 << 29}, "RuntimeError", "(RLIMIT_AS) is 512 MiB"),
    ],
    ids=["descriptors", "memory", "threads"],
)
async def test_a_process_that_hits_a_limit_names_it(
    tmp_path: Path, code: str, rlimits: dict[str, int], type: str, said: str
) -> None:
    failure = await run(tmp_path, "greedy", code, rlimits)
    assert failure is not None, (tmp_path / "greedy.log").read_text()
    assert failure.type == type and said in failure.fix and said in str(failure)


async def test_too_many_processes_of_a_user_are_named(tmp_path: Path) -> None:
    await run(tmp_path, "many", PROCESSES, {})
    thread, process = (tmp_path / "many.log").read_text().splitlines()[-2:]
    for line in (thread, process):
        assert "(RLIMIT_NPROC) is 9" in line and "raise it with `ulimit -u" in line


def test_other_errors_tell_of_no_limit() -> None:
    others = (ValueError("x"), BlockingIOError(errno.EAGAIN, "a socket"), OSError(13, "no"))
    assert [limits.hit(error) for error in others] == ["", "", ""]
    assert limits.hit(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")) == ""
    assert "memory" in limits.hit(RuntimeError("[enforce fail] can't allocate memory: 9 bytes"))


def test_a_kill_by_the_kernel_for_memory_is_told_from_somebodys() -> None:
    kills = limits.oom_kills()
    assert limits.killed_for_memory(kills) == ""
    assert "for want of memory" in limits.killed_for_memory(kills - 1)


def test_what_is_left_of_a_host_is_told_also_for_a_directory_that_is_not_there_yet(
    tmp_path: Path,
) -> None:
    room, disk = SystemHost().room(tmp_path / "not" / "yet"), os.statvfs(tmp_path)
    assert 0 < room.memory < 1 << 50
    assert 0 < room.disk <= disk.f_blocks * disk.f_frsize


def test_memory_that_is_left_to_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.group_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert limits.group_left(tmp_path) == 150
    (tmp_path / "memory.current").write_text("1200\n")
    assert limits.group_left(tmp_path) == 0


def test_the_same_of_control_groups_of_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "memory.usage_in_bytes").write_text("900\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert limits.group_left(tmp_path) is None
    (tmp_path / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 10\ntotal_inactive_file 50\n")
    assert limits.group_left(tmp_path) == 150


def test_cores_that_a_control_group_may_use(tmp_path: Path) -> None:
    assert limits.group_cores(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert limits.group_cores(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("150000\n")
    assert limits.group_cores(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert limits.group_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert limits.group_cores(tmp_path) == 0.5
    assert 1 <= limits.cores() <= len(os.sched_getaffinity(0))


def test_a_group_above_ours_bounds_us_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "0::" not in Path("/proc/self/cgroup").read_text():
        pytest.skip("this host has no hierarchy of the second version")
    (tmp_path / "cpu.max").write_text("20000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    assert limits.cores() == 1 and limits.memory_limit() == 1 << 30
