"""Tiers are ordered, named with their fix, and control groups bound a jail as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.job.config import SandboxConfig
from meshrl.common.job.isolation import containment, isolation
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation import tiers
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from tests.load import scaled
from tests.unit.sandbox.isolation.test_contract import STANDIN
from tests.unit.sandbox.launching import launching


def test_a_better_tier_suffices_and_a_worse_one_does_not() -> None:
    for place, found in enumerate(isolation.ORDER):
        for other, demanded in enumerate(isolation.ORDER):
            assert isolation.suffices(found, demanded) == (place >= other)
    assert set(isolation.MEANING) == set(isolation.ORDER)


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
        monkeypatch.setattr(tiers, name, tmp_path / name)
    (tmp_path / setting).write_text(value)
    assert fix in tiers.no_bwrap("it failed")


def test_what_a_container_lacks_for_bubblewrap_is_named_with_what_to_add() -> None:
    seccomp, proc = "seccomp=compose/seccomp.json", "systempaths=unconfined"
    both = tiers.in_container("the profile refuses", masked=True, problem="x")
    assert both.startswith("the profile refuses; /proc is masked") and both.endswith("Unmasked)")
    assert seccomp in both and proc in both
    assert proc not in tiers.in_container("the profile refuses", masked=False, problem="x")
    assert seccomp not in tiers.in_container("", masked=True, problem="x")
    assert "(it failed)" in tiers.in_container("", masked=False, problem="it failed")


@pytest.mark.needs("bwrap")
async def test_what_is_found_was_tried(tmp_path: Path) -> None:
    found = await tiers.find(SystemHost(), SystemClock(), tmp_path / "log")
    assert found.tier == ("cgroup" if cgroups.find() is not None else "bwrap")


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
    problem = await tiers.tried("bwrap", SystemHost(), SystemClock(), tmp_path / "log")
    assert "ended at its start" in problem


@pytest.mark.rotating(3)
def test_of_a_bubblewrap_that_fails_for_no_setting_nobody_is_sure(
    failing_bwrap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(failing_bwrap))
    found = containment.tiers()
    assert found.known and found.sure == tiers.lacks_bwrap()
    assert not {"bwrap", "cgroup", "runner"} & {*found.tiers}
    monkeypatch.setattr(containment, "PROBE_S", 0.01)
    assert containment.tiers() == containment.IsolationTiers((), sure=False, known=False)


@pytest.mark.needs("cgroups")
class TestGroups:
    @pytest.mark.needs("bwrap")
    async def test_memory_of_all_processes_of_a_jail_counts_together(self, tmp_path: Path) -> None:
        homes = cgroups.find()
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
            ran = await launcher.run(Program(source), limits)
        assert ran.stdout == b"" and ran.status != "ok"
        for home in homes.places:
            assert not list(home.glob(f"{cgroups.PREFIX}{os.getpid()}-*"))

    def test_groups_of_sandboxes_that_are_gone_are_swept(self) -> None:
        homes = cgroups.find()
        assert homes is not None
        gone, here = f"{cgroups.PREFIX}999999999-0", f"{cgroups.PREFIX}{os.getpid()}-sweep"
        for name in (gone, here):
            for home in homes.places:
                (home / name).mkdir()
        cgroups.sweep(homes)
        for home in homes.places:
            assert not (home / gone).exists()
            (home / here).rmdir()


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
def test_a_runner_is_a_tier_of_its_own_if_it_runs_a_program() -> None:
    works = SandboxConfig(runner=[STANDIN], python="/usr/bin/python3")
    found = containment.found(works)
    assert (found.tier, found.problem) == ("runner", "")
    assert found.meaning == "a container for each call (standin)"
    broken = containment.found(SandboxConfig(runner=["false"], python="/usr/bin/python3"))
    assert broken.tier == "none" and "ended at its start with status 1" in broken.fix
