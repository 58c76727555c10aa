"""Exits of processes, and the limits of hosts, containers and logs that explain them."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    NotFound,
    PeerLost,
    RankLost,
    StateUnavailable,
    StorageFull,
    ToolFailed,
)
from meshrl.common.mesh.process import container, processor_usage
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.diagnosis import host_limits
from meshrl.common.mesh.process.diagnosis.failure import Failure, format_failure
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.output.log_bounds import MAX_LOG_BYTES, rotate_if_long
from meshrl.common.mesh.process.processor_usage import TICKS_PER_S, ProcessorUsage, parse_proc_stat
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.mesh.process.supervision.supervisor import ChildSpec, Supervisor
from meshrl.services.node.agent import HostLogFiles
from tests.load import scaled
from tests.unit.common.mesh.process.modules import python_argv, write_module
from tests.unit.common.mesh.process.test_supervisor import RecordingHooks
from tests.unit.common.mesh.runtime.talking import until

FILES = "held = []\nwhile True:\n    held.append(open('/dev/null'))\n"
MEMORY = "held = bytearray(1 << 31)\n"
THREADS = """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
# Root has no process limit: as another user, root prints the explanation that it would leave.
PROCESSES = """
import os, resource, subprocess, sys, threading, time
from meshrl.common.mesh.process.diagnosis import host_limits
if os.getuid() == 0:
    os.setresuid(64219, 64219, 64219)
resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError as error:
    print(host_limits.explain_hit_limit(error))
try:
    subprocess.Popen([sys.executable])
except OSError as error:
    print(host_limits.explain_hit_limit(error), flush=True)
os._exit(1)
"""
STAT = """cpu  900 0 900 900 0 0 0 0 0 0
cpu0 100 20 30 4000 500 6 7 8 50 60
cpu1 1000 0 0 10 0 0 0 0 0 0
cpu2 1 1 1 10 0 0 0 0 0 0
intr 5 6 7
"""
CODES = {
    "imports": ("import no_such_module", "ModuleNotFoundError", "No module named 'no_such_module'"),
    "raises": ("def f():\n    [][3]\n\nf()", "IndexError", "list index out of range"),
    "says": ("import sys; sys.exit('it has no address')", "SystemExit", "it has no address"),
    "refuses": (
        "from meshrl.common.base.errors import ConfigError\n"
        "raise ConfigError('no such token', where='rollout.stop', fix='name one')",
        "ConfigError",
        "no such token",
    ),
    "exits": (
        "from meshrl.common.base.errors import PeerLost\n"
        "from meshrl.common.mesh.process.host import SystemHost\n"
        "SystemHost().exit(70, 'so it ends', PeerLost('it went'), 'calc')",
        "PeerLost",
        "it went",
    ),
}


async def run_with_limits(
    tmp_path: Path, name: str, code: str, rlimits: dict[str, int]
) -> Failure | None:
    """Run a module under these limits and return its failure."""
    host, log = SystemHost(), tmp_path / f"{name}.log"
    env = write_module(tmp_path, name, code)
    child = host.spawn(
        python_argv(name), name=name, env=env, log=log, options=SpawnOptions(rlimits=rlimits)
    )
    exit_status = await child.wait(scaled(60.0))
    assert exit_status, log.read_text()
    return host.find_failure(child.pid, log, exit_status)


@pytest.mark.parametrize(
    ("code", "rlimits", "type", "explanation"),
    [
        (FILES, {"NOFILE": 40}, "OSError", "(RLIMIT_NOFILE) is 40: raise it with `ulimit -n"),
        (
            MEMORY,
            {"AS": 1 << 30},
            "MemoryError",
            "(RLIMIT_AS) is 1.0 GiB, and the process has used",
        ),
        (THREADS, {"AS": 1 << 29}, "RuntimeError", "(RLIMIT_AS) is 512 MiB"),
    ],
    ids=["descriptors", "memory", "threads"],
)
async def test_failure_names_the_limit_that_a_process_hit(
    tmp_path: Path, code: str, rlimits: dict[str, int], type: str, explanation: str
) -> None:
    failure = await run_with_limits(tmp_path, "greedy", code, rlimits)
    assert failure is not None, (tmp_path / "greedy.log").read_text()
    assert failure.type == type and explanation in failure.fix and explanation in str(failure)


async def test_process_limit_of_a_user_is_named(tmp_path: Path) -> None:
    await run_with_limits(tmp_path, "many", PROCESSES, {})
    thread, process = (tmp_path / "many.log").read_text().splitlines()[-2:]
    for line in (thread, process):
        assert "(RLIMIT_NPROC) is 9" in line and "raise it with `ulimit -u" in line


def test_unrelated_errors_name_no_limit() -> None:
    other_errors = (ValueError("x"), BlockingIOError(errno.EAGAIN, "a socket"), OSError(13, "no"))
    assert [host_limits.explain_hit_limit(error) for error in other_errors] == ["", "", ""]
    assert (
        host_limits.explain_hit_limit(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
        == ""
    )
    assert "memory" in host_limits.explain_hit_limit(
        RuntimeError("[enforce fail] can't allocate memory: 9 bytes")
    )


def test_oom_kills_are_distinguished_from_other_kills() -> None:
    kills = host_limits.count_oom_kills()
    assert host_limits.explain_oom_kill(kills) == ""
    assert "because memory ran out" in host_limits.explain_oom_kill(kills - 1)


def test_free_space_is_measured_for_a_missing_directory(
    tmp_path: Path,
) -> None:
    free_space, disk = (
        SystemHost().measure_free_space(tmp_path / "not" / "yet"),
        os.statvfs(tmp_path),
    )
    assert 0 < free_space.memory_bytes < 1 << 50
    assert 0 < free_space.disk_bytes <= disk.f_blocks * disk.f_frsize


def test_free_memory_of_a_cgroup_v2_group_is_read(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_limits.read_group_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert host_limits.read_group_free_bytes(tmp_path) == 150
    (tmp_path / "memory.current").write_text("1200\n")
    assert host_limits.read_group_free_bytes(tmp_path) == 0


def test_free_memory_of_a_cgroup_v1_group_is_read(tmp_path: Path) -> None:
    (tmp_path / "memory.usage_in_bytes").write_text("900\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_limits.read_group_free_bytes(tmp_path) is None
    (tmp_path / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 10\ntotal_inactive_file 50\n")
    assert host_limits.read_group_free_bytes(tmp_path) == 150


def test_core_quota_of_a_control_group_is_read(tmp_path: Path) -> None:
    assert host_limits.read_group_cores(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert host_limits.read_group_cores(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("150000\n")
    assert host_limits.read_group_cores(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host_limits.read_group_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host_limits.read_group_cores(tmp_path) == 0.5
    assert 1 <= host_limits.count_usable_cores() <= len(os.sched_getaffinity(0))


def test_limits_of_a_parent_control_group_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "0::" not in Path("/proc/self/cgroup").read_text():
        pytest.skip("this host has no hierarchy of the second version")
    (tmp_path / "cpu.max").write_text("20000 100000\n")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    monkeypatch.setattr(host_limits, "CGROUPS", tmp_path)
    assert host_limits.count_usable_cores() == 1 and host_limits.read_memory_limit() == 1 << 30


def test_container_is_detected_by_environment_or_marker_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (container.KUBERNETES_ENV, "container"):
        monkeypatch.delenv(name, raising=False)
    marker_file = tmp_path / "mark"
    monkeypatch.setattr(container, "MARKER_FILES", {str(marker_file): "podman"})
    assert container.detect_container() == ""
    marker_file.touch()
    assert container.detect_container() == "podman"
    monkeypatch.setenv(container.KUBERNETES_ENV, "10.0.0.1")
    assert container.detect_container() == "kubernetes"


def test_container_rights_match_the_kernel() -> None:
    rights = container.read_rights()
    assert rights.user_id == os.geteuid()
    assert rights.seccomp in ("none", "strict", "filtered")
    assert 0 <= rights.capability_count <= 64 and isinstance(rights.has_read_only_root, bool)
    mounts = container.list_writable_mounts()
    assert mounts and not [mount for mount in mounts if mount.startswith(("/proc", "/sys"))]
    assert all(os.access(mount, os.W_OK) for mount in mounts)
    rejection_reason = container.explain_user_namespace_rejection()
    assert rejection_reason == "" or "user namespaces" in rejection_reason
    assert os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{os.getpid()}/ns/user")


def test_processor_usage_excludes_idle_and_guest_time() -> None:
    assert parse_proc_stat(STAT, {0}) == ProcessorUsage(
        1, (100 + 20 + 30 + 6 + 7 + 8) / TICKS_PER_S
    )
    assert parse_proc_stat(STAT, {1, 2}) == ProcessorUsage(2, 1003 / TICKS_PER_S)


def test_work_of_this_process_counts_as_busy_processor_time() -> None:
    before, used_s = SystemHost().measure_processors(), time.process_time()
    while time.process_time() - used_s < 0.2:
        sum(range(1000))
    after = SystemHost().measure_processors()
    assert after.core_count == before.core_count <= len(os.sched_getaffinity(0))
    assert after.busy_s - before.busy_s >= 0.2 - 3 / TICKS_PER_S


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "150000 100000", "cpu.stat": "usage_usec 2500000\nuser_usec 1\n"},
        {
            "cpu.cfs_quota_us": "150000",
            "cpu.cfs_period_us": "100000",
            "cpuacct.usage": "2500000000",
        },
    ],
)
def test_processor_usage_is_read_from_a_limited_control_group(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "group").mkdir()
    for name, text in files.items():
        (tmp_path / "group" / name).write_text(text)
    monkeypatch.setattr(host_limits, "list_control_groups", lambda controller: [tmp_path / "group"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert processor_usage.measure_processors() == ProcessorUsage(1.5, 2.5)


def open_for_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def test_long_log_is_rotated_and_the_previous_part_kept(tmp_path: Path) -> None:
    path, rotated = tmp_path / "a.log", tmp_path / "a.log.1"
    one, other = open_for_append(path), open_for_append(path)
    os.write(one, b"first\n")
    assert not rotate_if_long(one, 10)
    os.write(one, b"more of it\n")
    assert rotate_if_long(one, 10) and not rotate_if_long(other, 200)
    os.write(other, b"second\n")
    assert rotated.read_text() == "first\nmore of it\n"
    assert path.read_text().endswith(" 0 earlier bytes were deleted]\nsecond\n")
    assert rotate_if_long(other, 10) and rotated.read_text().endswith("second\n")
    assert path.read_text() == (
        "[meshrl: this log continues a.log.1; 17 earlier bytes were deleted]\n"
    )
    before = rotated.stat().st_size
    assert rotate_if_long(one, 10) and re.search(rf" {17 + before} earlier bytes", path.read_text())
    path.unlink()
    os.write(one, b"x" * 300)
    assert rotate_if_long(one, 200) and rotated.stat().st_size < 200, (
        "of a deleted log nothing is kept"
    )
    for fd in (one, other):
        os.close(fd)


def test_host_truncates_oversized_logs_of_its_processes(tmp_path: Path) -> None:
    log_fd = open_for_append(tmp_path / "trainer.log")
    os.truncate(log_fd, MAX_LOG_BYTES)
    os.write(log_fd, b"the last line\n")
    (tmp_path / "short.log").write_text("as it was\n")
    files = HostLogFiles(tmp_path)
    files.rotate_oversized()
    os.write(log_fd, b"goes on\n")
    assert {file.name: file.bytes < 200 for file in files.list_files()} == {
        "short": True,
        "trainer": True,
    }
    assert (tmp_path / "short.log").read_text() == "as it was\n"
    part = files.read("trainer", 0, 1 << 16)
    assert "continues trainer.log.1" in part.text and part.text.endswith("goes on\n")
    os.close(log_fd)


async def find_failure_of(tmp_path: Path, name: str, code: str) -> Failure | None:
    """Run code in a process and return the failure that it leaves."""
    log = tmp_path / f"{name}.log"
    host = SystemHost()
    child = host.spawn(
        python_argv(name), name=name, env=write_module(tmp_path, name, code), log=log
    )
    assert await child.wait(scaled(20)) not in (0, None), log.read_text()
    return host.find_failure(child.pid, log)


@pytest.mark.parametrize("forked", [False, True])
async def test_failure_has_type_text_and_location_of_the_error(
    tmp_path: Path, open_fork_server: Callable[..., SystemChild], forked: bool
) -> None:
    if forked:
        open_fork_server()
    for name, (code, kind, text) in CODES.items():
        failure = await find_failure_of(tmp_path, name, code)
        assert failure is not None, name
        assert (failure.type, failure.text) == (kind, text)
        if name == "raises":
            assert failure.where == f"{tmp_path / 'raises.py'}:2"
        if name == "refuses":
            assert (failure.where, failure.fix, failure.is_fatal) == (
                "rollout.stop",
                "name one",
                True,
            )
        if name == "exits":
            assert (failure.job, failure.restart) == ("calc", "patient")


async def test_failure_of_an_earlier_process_is_not_attributed_to_a_later_one(
    tmp_path: Path,
) -> None:
    assert await find_failure_of(tmp_path, "twice", "import no_such_module") is not None
    assert await find_failure_of(tmp_path, "twice", "import os; os._exit(3)") is None


@pytest.mark.parametrize(
    ("error", "restart"),
    [
        (ConfigError("x"), "never"),
        (ToolFailed("x"), "never"),
        (ValueError("x"), "counted"),
        (NotFound("x"), "counted"),
        (PeerLost("x"), "patient"),
        (DeadlineExceeded("x"), "patient"),
        (StorageFull("x"), "always"),
        (StateUnavailable("x"), "always"),
        (Fenced("x"), "patient"),
        (RankLost("x"), "patient"),
        (OSError(28, "No space left on device"), "always"),
        (OSError(13, "Permission denied"), "counted"),
    ],
)
def test_error_types_map_to_restart_policies(error: Exception, restart: str) -> None:
    assert Failure.from_error(error).restart == restart


def test_failure_text_has_error_location_and_fix() -> None:
    failure = Failure.from_error(ConfigError("no such token", where="rollout.stop", fix="name one"))
    assert str(failure) == "ConfigError: no such token (at rollout.stop). name one"
    assert format_failure(failure.to_event_fields()) == str(failure)
    assert format_failure({}) == ""


async def test_child_with_a_fatal_error_is_not_restarted(
    tmp_path: Path,
) -> None:
    code = "from meshrl.common.base.errors import ConfigError\nraise ConfigError('no', fix='do')"
    hooks = RecordingHooks()
    env = write_module(tmp_path, "wrong", code)
    spec = ChildSpec("w", python_argv("wrong"), env=env, log=tmp_path / "w.log", is_critical=True)
    supervisor = Supervisor(SystemHost(), SystemClock(), [spec], hooks=hooks)
    await supervisor.start()
    await until(lambda: ("escalated", "w") in hooks.calls)
    assert [kind for kind, _ in hooks.calls] == ["started", "ended", "gave up", "escalated"]
    (child_exit,) = hooks.exits
    assert child_exit.final and child_exit.failure is not None and child_exit.failure.text == "no"
    assert hooks.reasons[-1].startswith("ConfigError: no (at ") and hooks.reasons[-1].endswith("do")


async def test_exhausted_restart_budget_names_the_error(tmp_path: Path) -> None:
    hooks = RecordingHooks()
    env = write_module(tmp_path, "crashes", "raise ValueError('of this')")
    log = tmp_path / "c.log"
    spec = ChildSpec("c", python_argv("crashes"), env=env, log=log, budget=(1, 60.0))
    supervisor = Supervisor(SystemHost(), SystemClock(), [spec], hooks=hooks)
    await supervisor.start()
    await until(lambda: ("gave up", "c") in hooks.calls)
    assert "ValueError: of this" in hooks.reasons[-1] and "more than 1 times" in hooks.reasons[-1]
    assert [child_exit.restart_count for child_exit in hooks.exits] == [0, 1]
