"""Control groups as far as the host provides them, and tiers without the missing controllers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.job.config import SandboxConfig
from meshrl.common.job.isolation import isolation_probe, tiers
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation import tier_detection
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.cgroups import Cgroup, CgroupParents
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.jail.metering.usage import CgroupCpuTime
from tests.load import scaled
from tests.unit.sandbox.isolation.test_contract import STANDIN
from tests.unit.sandbox.launching import open_launcher

# Files that a kernel creates in a new group.
V2 = {
    "cgroup.procs": "",
    "cgroup.freeze": "0\n",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n",
}
V2_MEMORY = {
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "memory.events": "oom_kill 2\n",
    "memory.current": "90112\n",
}
PIDS = {"pids.max": "max\n", "pids.current": "0\n"}
V2_CPU = {"cpu.weight": "100\n"}
V1 = {"cgroup.procs": "", "tasks": ""}
V1_MEMORY = {
    "memory.limit_in_bytes": "0\n",
    "memory.oom_control": "oom_kill 3\n",
    "memory.usage_in_bytes": "90112\n",
}
V1_CPU = {"cpu.shares": "1024\n"}
V1_ACCOUNT = {"cpuacct.usage": "2500000000\n"}


def probe_name() -> str:
    """Return the name of the group with which this process tests its permissions."""
    return f"{cgroups.PREFIX}probe-{os.getpid()}"


def make_group(directory: Path, *files: dict[str, str]) -> None:
    """Create a directory as the kernel creates a group."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in {name: text for each in files for name, text in each.items()}.items():
        (directory / name).write_text(text)


def make_v2(root: Path, delegated: str, *files: dict[str, str]) -> dict[str, str]:
    """Create a hierarchy that delegates these controllers, and return the process's paths."""
    make_group(root, {"cgroup.controllers": "cpu memory pids", "cgroup.subtree_control": delegated})
    make_group(root / "app", {"cgroup.procs": "1\n", "cgroup.subtree_control": ""})
    for name in (probe_name(), "jail"):
        make_group(root / name, V2, V2_MEMORY, PIDS, *files)
    return {"": "/app"}


def make_v1(root: Path, **controllers: tuple[dict[str, str], ...]) -> dict[str, str]:
    for name, files in controllers.items():
        make_group(root / name, V1)
        for jail in (probe_name(), "jail"):
            make_group(root / name / jail, V1, *files)
    return dict.fromkeys(controllers, "/")


def test_v2_group_limits_weighs_counts_and_freezes(tmp_path: Path) -> None:
    homes = cgroups.find_parents(tmp_path, make_v2(tmp_path, "cpu memory pids", V2_CPU))
    assert homes == CgroupParents(tmp_path, tmp_path, tmp_path, tmp_path)
    assert (homes.paths, homes.missing_cpu_functions) == ((tmp_path,), ())
    cgroup = Cgroup(homes, "jail")
    cgroup.set_limits(1 << 20, 5)
    cgroup.set_frozen(True)
    written = {name: (tmp_path / "jail" / name).read_text() for name in ("memory.max", "pids.max")}
    assert written == {"memory.max": str(1 << 20), "pids.max": "5"}
    assert (tmp_path / "jail" / "cgroup.freeze").read_text()[-2:] != "0\n"
    assert (tmp_path / "jail" / "cpu.weight").read_text().startswith(str(cgroups.WEIGHT))
    assert (len(cgroup.member_fds), cgroup.read_oom_kills(), cgroup.is_empty()) == (1, 2, True)
    cgroup.remove()


def test_v2_without_the_cpu_controller_uses_the_other_controllers(tmp_path: Path) -> None:
    homes = cgroups.find_parents(tmp_path, make_v2(tmp_path, "memory pids"))
    assert homes == CgroupParents(tmp_path, tmp_path, None, tmp_path)
    assert homes.missing_cpu_functions == ("weigh",)
    assert (
        "weigh" in tier_detection.describe_missing_cpu_control(homes.missing_cpu_functions)
        and tier_detection.describe_missing_cpu_control(()) == ""
    )


def test_v2_without_a_freezer_limits_memory_and_processes(tmp_path: Path) -> None:
    own = make_v2(tmp_path, "cpu memory pids", V2_CPU)
    for name in (probe_name(), "jail"):
        (tmp_path / name / "cgroup.freeze").unlink()
    homes = cgroups.find_parents(tmp_path, own)
    assert homes == CgroupParents(tmp_path, tmp_path, tmp_path)
    assert homes.missing_cpu_functions == ("count", "freeze")
    cgroup = Cgroup(homes, "jail")
    assert (cgroup.can_freeze, cgroup.usage_fd) == (False, -1)
    cgroup.remove()


def test_v2_without_a_delegated_memory_controller_is_rejected(tmp_path: Path) -> None:
    assert cgroups.find_parents(tmp_path, make_v2(tmp_path, "cpu", V2_CPU)) is None


def test_v1_weighs_while_a_parallel_v2_counts_and_freezes(tmp_path: Path) -> None:
    own = make_v1(tmp_path, memory=(V1_MEMORY,), pids=(PIDS,), cpu=(V1_CPU,), cpuacct=(V1_ACCOUNT,))
    make_group(tmp_path / "unified", V2)
    for name in (probe_name(), "jail"):
        make_group(tmp_path / "unified" / name, V2)
    homes = cgroups.find_parents(tmp_path, {**own, "": "/"})
    assert homes is not None and homes.missing_cpu_functions == ()
    names = [directory.name for directory in homes.paths]
    assert names == ["memory", "pids", "cpu", "unified"]
    cgroup = Cgroup(homes, "jail")
    assert (
        cgroup.read_oom_kills(),
        cgroup.can_freeze,
        CgroupCpuTime(cgroup.usage_fd).read_s(),
    ) == (
        3,
        True,
        0.0,
    )
    assert (tmp_path / "cpu" / "jail" / "cpu.shares").read_text().startswith(str(cgroups.SHARES))
    cgroup.remove()


def test_v1_alone_counts_without_freezing(tmp_path: Path) -> None:
    both = tmp_path / "cpu,cpuacct"  # the usual mount on most hosts, with links
    make_group(both, V1)
    for name in (probe_name(), "jail"):
        make_group(both / name, V1, V1_CPU, V1_ACCOUNT)
    for link in ("cpu", "cpuacct"):
        (tmp_path / link).symlink_to(both)
    own = make_v1(tmp_path, memory=(V1_MEMORY,), pids=(PIDS,))
    homes = cgroups.find_parents(tmp_path, {**own, "cpu": "/", "cpuacct": "/"})
    assert homes is not None and homes.missing_cpu_functions == ("freeze",)
    assert len(homes.paths) == 3, "what is mounted as one is joined once"
    cgroup = Cgroup(homes, "jail")
    counted = CgroupCpuTime(cgroup.usage_fd)
    (both / "jail" / "cpuacct.usage").write_text("4000000000\n")
    assert (counted.read_s(), cgroup.can_freeze) == (1.5, False)
    cgroup.remove()


def test_group_with_unreclaimable_memory_is_not_empty(tmp_path: Path) -> None:
    """Check that reclaimable memory, such as pages of read files, does not count."""
    controllers = {"memory": (V1_MEMORY,), "pids": (PIDS,)}
    v1_parents = cgroups.find_parents(tmp_path / "1", make_v1(tmp_path / "1", **controllers))
    v2_parents = cgroups.find_parents(tmp_path / "2", make_v2(tmp_path / "2", "memory pids"))
    assert v1_parents is not None and v2_parents is not None
    cases = ((v1_parents, "memory.usage_in_bytes", "rss"), (v2_parents, "memory.current", "anon"))
    for homes, current, private in cases:
        cgroup, directory = Cgroup(homes, "jail"), homes.memory / "jail"
        assert cgroup.is_empty()
        (directory / current).write_text(f"{90 * MIB}\n")
        for stat_text in (f"{private} 0\nshmem {88 * MIB}\n", f"{private} {88 * MIB}\nshmem 0\n"):
            (directory / "memory.stat").write_text(f"cache {88 * MIB}\n{stat_text}")
            assert not cgroup.is_empty()
        (directory / "memory.stat").write_text(f"cache {90 * MIB}\n{private} 0\nshmem 4096\n")
        assert cgroup.is_empty()
        cgroup.remove()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.needs("cgroups")
async def test_files_of_an_ended_jail_are_not_charged_to_the_next(tmp_path: Path) -> None:
    small_limits = JailLimits(wall_s=60.0, memory_bytes=64 * MIB)
    large_limits = replace(small_limits, memory_bytes=512 * MIB, scratch_bytes=256 * MIB)
    writing_program = (
        "part = bytes(1 << 20)\nfile = open('f', 'wb')\nfor _ in range(190): file.write(part)"
    )
    allocating_program = "print(len(bytearray(16 << 20)))"
    async with open_launcher(tmp_path / "log", homes=cgroups.find_parents()) as launcher:
        for _ in range(3):
            write_result = await launcher.run(JailProgram(writing_program), large_limits)
            allocation_result = await launcher.run(JailProgram(allocating_program), small_limits)
            assert (write_result.status, allocation_result.status) == ("ok", "ok"), (
                allocation_result.error
            )


@pytest.mark.parametrize("missing", ["cpu", "cpu.shares"])
def test_v1_without_a_usable_cpu_controller_limits_memory_and_processes(
    tmp_path: Path, missing: str
) -> None:
    cpu: dict[str, Any] = {} if missing == "cpu" else {"cpu": ({},)}
    homes = cgroups.find_parents(
        tmp_path, make_v1(tmp_path, memory=(V1_MEMORY,), pids=(PIDS,), **cpu)
    )
    assert homes == CgroupParents(tmp_path / "memory", tmp_path / "pids")
    assert homes.missing_cpu_functions == ("weigh", "count", "freeze")


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.needs("cgroups")
async def test_cpu_limit_is_enforced_with_any_set_of_controllers(tmp_path: Path) -> None:
    found = cgroups.find_parents()
    assert found is not None
    limits = JailLimits(wall_s=60.0, cpu_s=0.2, memory_bytes=128 * MIB)
    minimal = replace(found, cpu=None, unified=None, cpuacct=None)
    cpuacct = cgroups.ROOT / "cpuacct"
    partial = [minimal, replace(minimal, cpu=found.cpu)]
    if (cpuacct / "tasks").exists():
        partial.append(replace(minimal, cpuacct=cpuacct))
    for homes in partial:
        source = "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()"
        async with open_launcher(tmp_path / "log", homes=homes) as launcher:
            result = await launcher.run(JailProgram(source), limits)
        assert (result.status, "of CPU time" in result.error) == ("timeout", True)
        assert 0.15 <= result.cpu_s <= 2 * limits.cpu_s + 1


def test_only_equal_or_better_tiers_are_sufficient() -> None:
    for index, found in enumerate(tiers.TIER_ORDER):
        for other, required in enumerate(tiers.TIER_ORDER):
            assert tiers.is_sufficient(found, required) == (index >= other)
    assert set(tiers.TIER_DESCRIPTIONS) == set(tiers.TIER_ORDER)


@pytest.mark.parametrize(
    ("setting", "value", "fix"),
    [
        ("APPARMOR", "1\n", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("DEBIAN", "0\n", "kernel.unprivileged_userns_clone=1"),
        ("USERNS", "0\n", "user.max_user_namespaces"),
    ],
)
@pytest.mark.needs("bwrap")
def test_setting_that_blocks_bubblewrap_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, fix: str
) -> None:
    for name in ("APPARMOR", "DEBIAN", "USERNS"):
        monkeypatch.setattr(tier_detection, name, tmp_path / name)
    (tmp_path / setting).write_text(value)
    assert fix in tier_detection.describe_missing_bwrap("it failed")


def test_container_limits_on_bubblewrap_are_named_with_their_fix() -> None:
    seccomp, proc = "seccomp=compose/seccomp.json", "systempaths=unconfined"
    both = tier_detection.describe_container_limits("the profile refuses", masked=True, problem="x")
    assert both.startswith("the profile refuses; /proc is masked") and both.endswith("Unmasked)")
    assert seccomp in both and proc in both
    assert proc not in tier_detection.describe_container_limits(
        "the profile refuses", masked=False, problem="x"
    )
    assert seccomp not in tier_detection.describe_container_limits("", masked=True, problem="x")
    assert "(it failed)" in tier_detection.describe_container_limits(
        "", masked=False, problem="it failed"
    )


@pytest.mark.needs("bwrap")
async def test_detected_tier_was_tested(tmp_path: Path) -> None:
    detected = await tier_detection.detect_tier(SystemHost(), SystemClock(), tmp_path / "log")
    assert detected.tier == ("cgroup" if cgroups.find_parents() is not None else "bwrap")


@pytest.fixture
def failing_bwrap() -> Iterator[Path]:
    """Yield an accessible folder with a bubblewrap that fails as on a restricted host."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        folder.chmod(0o755)
        fake = folder / "bwrap"
        fake.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
        fake.chmod(0o755)
        yield folder


async def test_failing_tier_has_a_reason(
    tmp_path: Path, failing_bwrap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{failing_bwrap}:/usr/bin:/bin")
    problem = await tier_detection.probe_tier(
        "bwrap", SystemHost(), SystemClock(), tmp_path / "log"
    )
    assert "exited during its start" in problem


@pytest.mark.rotating(3)
def test_unexplained_bubblewrap_failure_is_inconclusive(
    failing_bwrap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(failing_bwrap))
    found = isolation_probe.probe_tiers()
    assert found.is_finished and found.is_conclusive == tier_detection.is_bwrap_blocked()
    assert not {"bwrap", "cgroup", "runner"} & {*found.tiers}
    monkeypatch.setattr(isolation_probe, "PROBE_TIMEOUT_S", 0.01)
    assert isolation_probe.probe_tiers() == isolation_probe.IsolationTiers(
        (), is_conclusive=False, is_finished=False
    )


@pytest.mark.needs("cgroups")
class TestGroups:
    @pytest.mark.needs("bwrap")
    async def test_memory_of_all_processes_of_a_jail_counts_together(self, tmp_path: Path) -> None:
        homes = cgroups.find_parents()
        assert homes is not None
        source = """
import os
reading, writing = os.pipe()
waiting, going = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(60 << 20)  # four of them are too much, each alone is not
        for place in range(0, len(block), 4096):
            block[place] = 1
        os.write(writing, b"x")
        os.read(waiting, 1)  # until all have theirs: one may be killed for the next one's
        os.write(writing, b"x")
        os._exit(0)
os.close(writing)
for answers in (4, 8):
    got = answers - 4
    while got < answers:
        got += len(os.read(reading, 8)) or len(os.read(os.pipe()[0], 1))  # for ever
    os.write(going, b"gogo")
print("all four")
"""
        limits = JailLimits(wall_s=min(20.0, scaled(3.0)), cpu_s=3.0, memory_bytes=128 * MIB)
        async with open_launcher(tmp_path / "log", homes=homes) as launcher:
            result = await launcher.run(JailProgram(source), limits)
        assert result.stdout == b"" and result.status != "ok"
        for home in homes.paths:
            assert not list(home.glob(f"{cgroups.PREFIX}{os.getpid()}-*"))

    def test_groups_of_exited_sandboxes_are_removed(self) -> None:
        homes = cgroups.find_parents()
        assert homes is not None
        stale_name, own_name = (
            f"{cgroups.PREFIX}999999999-0",
            f"{cgroups.PREFIX}{os.getpid()}-sweep",
        )
        for name in (stale_name, own_name):
            for home in homes.paths:
                (home / name).mkdir()
        cgroups.remove_stale(homes)
        for home in homes.paths:
            assert not (home / stale_name).exists()
            (home / own_name).rmdir()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
def test_runner_is_a_tier_if_it_runs_a_program() -> None:
    working = SandboxConfig(runner=[STANDIN], python="/usr/bin/python3")
    found = isolation_probe.probe_isolation(working)
    assert (found.tier, found.interpreter_problem) == ("runner", "")
    assert found.description == "a container for each call (standin)"
    broken = isolation_probe.probe_isolation(
        SandboxConfig(runner=["false"], python="/usr/bin/python3")
    )
    assert broken.tier == "none" and "exited during its start with status 1" in broken.fix
