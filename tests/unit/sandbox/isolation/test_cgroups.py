"""Control groups are taken as far as the host has them: what lacks is done without."""

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
from tests.unit.sandbox.launching import launching

# The files that a kernel puts into a new group.
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


def probe() -> str:
    """Return the name of the group by which this process tries what it may do."""
    return f"{cgroups.PREFIX}probe-{os.getpid()}"


def group(place: Path, *files: dict[str, str]) -> None:
    """A directory as a kernel makes it."""
    place.mkdir(parents=True, exist_ok=True)
    for name, text in {name: text for each in files for name, text in each.items()}.items():
        (place / name).write_text(text)


def v2(root: Path, handed: str, *files: dict[str, str]) -> dict[str, str]:
    """A hierarchy whose root hands on these controllers; its own paths are returned."""
    group(root, {"cgroup.controllers": "cpu memory pids", "cgroup.subtree_control": handed})
    group(root / "app", {"cgroup.procs": "1\n", "cgroup.subtree_control": ""})
    for name in (probe(), "jail"):
        group(root / name, V2, V2_MEMORY, PIDS, *files)
    return {"": "/app"}


def v1(root: Path, **controllers: tuple[dict[str, str], ...]) -> dict[str, str]:
    for name, files in controllers.items():
        group(root / name, V1)
        for jail in (probe(), "jail"):
            group(root / name / jail, V1, *files)
    return dict.fromkeys(controllers, "/")


def test_on_v2_one_group_bounds_weighs_counts_and_freezes(tmp_path: Path) -> None:
    homes = cgroups.find_parents(tmp_path, v2(tmp_path, "cpu memory pids", V2_CPU))
    assert homes == CgroupParents(tmp_path, tmp_path, tmp_path, tmp_path)
    assert (homes.paths, homes.missing_cpu_functions) == ((tmp_path,), ())
    made = Cgroup(homes, "jail")
    made.set_limits(1 << 20, 5)
    made.set_frozen(True)
    written = {name: (tmp_path / "jail" / name).read_text() for name in ("memory.max", "pids.max")}
    assert written == {"memory.max": str(1 << 20), "pids.max": "5"}
    assert (tmp_path / "jail" / "cgroup.freeze").read_text()[-2:] != "0\n"
    assert (tmp_path / "jail" / "cpu.weight").read_text().startswith(str(cgroups.WEIGHT))
    assert (len(made.member_fds), made.read_oom_kills(), made.is_empty()) == (1, 2, True)
    made.remove()


def test_on_v2_without_the_cpu_controller_the_rest_is_used(tmp_path: Path) -> None:
    homes = cgroups.find_parents(tmp_path, v2(tmp_path, "memory pids"))
    assert homes == CgroupParents(tmp_path, tmp_path, None, tmp_path)
    assert homes.missing_cpu_functions == ("weigh",)
    assert (
        "weigh" in tier_detection.describe_missing_cpu_control(homes.missing_cpu_functions)
        and tier_detection.describe_missing_cpu_control(()) == ""
    )


def test_on_v2_without_a_freezer_memory_and_processes_are_bounded(tmp_path: Path) -> None:
    own = v2(tmp_path, "cpu memory pids", V2_CPU)
    for name in (probe(), "jail"):
        (tmp_path / name / "cgroup.freeze").unlink()
    homes = cgroups.find_parents(tmp_path, own)
    assert homes == CgroupParents(tmp_path, tmp_path, tmp_path)
    assert homes.missing_cpu_functions == ("count", "freeze")
    made = Cgroup(homes, "jail")
    assert (made.can_freeze, made.usage_fd) == (False, -1)
    made.remove()


def test_v2_that_hands_on_no_memory_is_none(tmp_path: Path) -> None:
    assert cgroups.find_parents(tmp_path, v2(tmp_path, "cpu", V2_CPU)) is None


def test_v1_is_weighed_by_itself_and_counted_and_frozen_by_v2_beside_it(tmp_path: Path) -> None:
    own = v1(tmp_path, memory=(V1_MEMORY,), pids=(PIDS,), cpu=(V1_CPU,), cpuacct=(V1_ACCOUNT,))
    group(tmp_path / "unified", V2)
    for name in (probe(), "jail"):
        group(tmp_path / "unified" / name, V2)
    homes = cgroups.find_parents(tmp_path, {**own, "": "/"})
    assert homes is not None and homes.missing_cpu_functions == ()
    names = [place.name for place in homes.paths]
    assert names == ["memory", "pids", "cpu", "unified"]
    made = Cgroup(homes, "jail")
    assert (made.read_oom_kills(), made.can_freeze, CgroupCpuTime(made.usage_fd).read_s()) == (
        3,
        True,
        0.0,
    )
    assert (tmp_path / "cpu" / "jail" / "cpu.shares").read_text().startswith(str(cgroups.SHARES))
    made.remove()


def test_v1_alone_counts_and_does_not_freeze(tmp_path: Path) -> None:
    both = tmp_path / "cpu,cpuacct"  # as most hosts mount them, with links
    group(both, V1)
    for name in (probe(), "jail"):
        group(both / name, V1, V1_CPU, V1_ACCOUNT)
    for link in ("cpu", "cpuacct"):
        (tmp_path / link).symlink_to(both)
    own = v1(tmp_path, memory=(V1_MEMORY,), pids=(PIDS,))
    homes = cgroups.find_parents(tmp_path, {**own, "cpu": "/", "cpuacct": "/"})
    assert homes is not None and homes.missing_cpu_functions == ("freeze",)
    assert len(homes.paths) == 3, "what is mounted as one is joined once"
    made = Cgroup(homes, "jail")
    counted = CgroupCpuTime(made.usage_fd)
    (both / "jail" / "cpuacct.usage").write_text("4000000000\n")
    assert (counted.read_s(), made.can_freeze) == (1.5, False)
    made.remove()


def test_a_group_that_still_holds_memory_is_not_empty(tmp_path: Path) -> None:
    """What the kernel can take back, as pages of files that were read, keeps nobody from it."""
    ones = {"memory": (V1_MEMORY,), "pids": (PIDS,)}
    one = cgroups.find_parents(tmp_path / "1", v1(tmp_path / "1", **ones))
    two = cgroups.find_parents(tmp_path / "2", v2(tmp_path / "2", "memory pids"))
    assert one is not None and two is not None
    cases = ((one, "memory.usage_in_bytes", "rss"), (two, "memory.current", "anon"))
    for homes, current, private in cases:
        made, place = Cgroup(homes, "jail"), homes.memory / "jail"
        assert made.is_empty()
        (place / current).write_text(f"{90 * MIB}\n")
        for held in (f"{private} 0\nshmem {88 * MIB}\n", f"{private} {88 * MIB}\nshmem 0\n"):
            (place / "memory.stat").write_text(f"cache {88 * MIB}\n{held}")
            assert not made.is_empty()
        (place / "memory.stat").write_text(f"cache {90 * MIB}\n{private} 0\nshmem 4096\n")
        assert made.is_empty()
        made.remove()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.needs("cgroups")
async def test_files_of_a_jail_that_has_ended_are_no_memory_of_the_next(tmp_path: Path) -> None:
    small = JailLimits(wall_s=60.0, memory_bytes=64 * MIB)
    large = replace(small, memory_bytes=512 * MIB, scratch_bytes=256 * MIB)
    fills = "part = bytes(1 << 20)\nfile = open('f', 'wb')\nfor _ in range(190): file.write(part)"
    takes = "print(len(bytearray(16 << 20)))"
    async with launching(tmp_path / "log", homes=cgroups.find_parents()) as launcher:
        for _ in range(3):
            filled = await launcher.run(JailProgram(fills), large)
            taken = await launcher.run(JailProgram(takes), small)
            assert (filled.status, taken.status) == ("ok", "ok"), taken.error


@pytest.mark.parametrize("lacks", ["cpu", "cpu.shares"])
def test_v1_without_a_usable_cpu_controller_bounds_the_rest(tmp_path: Path, lacks: str) -> None:
    cpu: dict[str, Any] = {} if lacks == "cpu" else {"cpu": ({},)}
    homes = cgroups.find_parents(tmp_path, v1(tmp_path, memory=(V1_MEMORY,), pids=(PIDS,), **cpu))
    assert homes == CgroupParents(tmp_path / "memory", tmp_path / "pids")
    assert homes.missing_cpu_functions == ("weigh", "count", "freeze")


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.needs("cgroups")
async def test_a_limit_is_enforced_with_whatever_groups_can_do(tmp_path: Path) -> None:
    found = cgroups.find_parents()
    assert found is not None
    limits = JailLimits(wall_s=60.0, cpu_s=0.2, memory_bytes=128 * MIB)
    least = replace(found, cpu=None, unified=None, cpuacct=None)
    accounts = cgroups.ROOT / "cpuacct"
    partial = [least, replace(least, cpu=found.cpu)]
    if (accounts / "tasks").exists():
        partial.append(replace(least, cpuacct=accounts))
    for homes in partial:
        source = "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()"
        async with launching(tmp_path / "log", homes=homes) as launcher:
            ran = await launcher.run(JailProgram(source), limits)
        assert (ran.status, "of CPU time" in ran.error) == ("timeout", True)
        assert 0.15 <= ran.cpu_s <= 2 * limits.cpu_s + 1


def test_a_better_tier_suffices_and_a_worse_one_does_not() -> None:
    for place, found in enumerate(tiers.TIER_ORDER):
        for other, demanded in enumerate(tiers.TIER_ORDER):
            assert tiers.is_sufficient(found, demanded) == (place >= other)
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
def test_what_keeps_bubblewrap_from_working_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, fix: str
) -> None:
    for name in ("APPARMOR", "DEBIAN", "USERNS"):
        monkeypatch.setattr(tier_detection, name, tmp_path / name)
    (tmp_path / setting).write_text(value)
    assert fix in tier_detection.describe_missing_bwrap("it failed")


def test_what_a_container_lacks_for_bubblewrap_is_named_with_what_to_add() -> None:
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
async def test_what_is_found_was_tried(tmp_path: Path) -> None:
    found = await tier_detection.detect_tier(SystemHost(), SystemClock(), tmp_path / "log")
    assert found.tier == ("cgroup" if cgroups.find_parents() is not None else "bwrap")


@pytest.fixture
def failing_bwrap() -> Iterator[Path]:
    """A folder, which everybody may enter, with a bubblewrap that the host does not let work."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        folder.chmod(0o755)
        fake = folder / "bwrap"
        fake.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
        fake.chmod(0o755)
        yield folder


async def test_a_tier_that_does_not_work_says_why(
    tmp_path: Path, failing_bwrap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{failing_bwrap}:/usr/bin:/bin")
    problem = await tier_detection.probe_tier(
        "bwrap", SystemHost(), SystemClock(), tmp_path / "log"
    )
    assert "ended at its start" in problem


@pytest.mark.rotating(3)
def test_of_a_bubblewrap_that_fails_for_no_setting_nobody_is_sure(
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
        async with launching(tmp_path / "log", homes=homes) as launcher:
            ran = await launcher.run(JailProgram(source), limits)
        assert ran.stdout == b"" and ran.status != "ok"
        for home in homes.paths:
            assert not list(home.glob(f"{cgroups.PREFIX}{os.getpid()}-*"))

    def test_groups_of_sandboxes_that_are_gone_are_swept(self) -> None:
        homes = cgroups.find_parents()
        assert homes is not None
        gone, here = f"{cgroups.PREFIX}999999999-0", f"{cgroups.PREFIX}{os.getpid()}-sweep"
        for name in (gone, here):
            for home in homes.paths:
                (home / name).mkdir()
        cgroups.remove_stale(homes)
        for home in homes.paths:
            assert not (home / gone).exists()
            (home / here).rmdir()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
def test_a_runner_is_a_tier_of_its_own_if_it_runs_a_program() -> None:
    works = SandboxConfig(runner=[STANDIN], python="/usr/bin/python3")
    found = isolation_probe.probe_isolation(works)
    assert (found.tier, found.interpreter_problem) == ("runner", "")
    assert found.description == "a container for each call (standin)"
    broken = isolation_probe.probe_isolation(
        SandboxConfig(runner=["false"], python="/usr/bin/python3")
    )
    assert broken.tier == "none" and "ended at its start with status 1" in broken.fix
