"""Nothing of the corpus gets out, harms what is outside, or is paid without being right."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.resources import cgroups
from tests.load import scaled
from tests.unit.sandbox.escapes import corpus
from tests.unit.sandbox.escapes.graded import FORGERIES, STYLES

ROOT = Path(__file__).parents[3]
FAMILIES = [*corpus.FAMILIES, "reward forging", "session poisoning"]
PLAIN = [sys.executable, "-m", "tests.unit.sandbox.plain_user"]
HANG_S = 280  # far beyond what any family takes

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("bwrap")]


@functools.cache
def best() -> str:
    return "cgroup" if cgroups.find_parents() is not None else "bwrap"


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file that everybody may read, in a place that jails do not have."""
    with tempfile.TemporaryDirectory(prefix="canary-") as directory:
        Path(directory).chmod(0o755)
        path = Path(directory) / "canary"
        path.write_text("untouched")
        path.chmod(0o644)
        yield path


def forked(command: list[str]) -> tuple[int | None, str]:
    """Run a program as a fork of the nursery, if there is one; its exit status and all it wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        log, until = Path(scratch) / "log", time.monotonic() + scaled(HANG_S)
        child = SystemHost().spawn(command, name="escapes", log=log)
        while (status := child.poll()) is None and time.monotonic() < until:
            time.sleep(0.02)
        child.kill()
        return status, log.read_text()


def ran(family: str, tier: str, canary: Path, *, plain: bool) -> None:
    become = PLAIN if plain and os.getuid() == 0 else []
    module = "tests.unit.sandbox.escapes.runner"
    command = [sys.executable, "-m", module, tier, str(canary), family]
    if become:
        done = subprocess.run(
            [*become, *command], cwd=ROOT, capture_output=True, text=True, timeout=scaled(HANG_S)
        )
        status: int | None = done.returncode
        told = done.stdout + done.stderr
    else:
        status, told = forked(command)
    assert status == 0, told[-2000:]
    said = next(json.loads(line) for line in told.splitlines() if line.startswith('{"user"'))
    assert (said["user"] != 0) == bool(become) or os.getuid() != 0
    for found in said["families"]:
        assert found["results"]
        assert [result for result in found["results"] if not result["contained"]] == []
        assert found["harm"] == []


@pytest.mark.needs("root")
@pytest.mark.parametrize("family", FAMILIES)
def test_as_root_everything_is_contained(family: str, canary: Path) -> None:
    ran(family, best(), canary, plain=False)


@pytest.mark.rotating(len(FAMILIES))
@pytest.mark.parametrize("family", FAMILIES)
def test_without_control_groups_a_plain_user_is_contained_too(family: str, canary: Path) -> None:
    ran(family, "bwrap", canary, plain=True)


@pytest.mark.needs("landlock")
@pytest.mark.rotating(len(FAMILIES))
@pytest.mark.parametrize("family", FAMILIES)
def test_without_namespaces_landlock_contains_it(family: str, canary: Path) -> None:
    ran(family, "landlock", canary, plain=True)


@pytest.mark.rotating(3)
def test_nothing_is_paid_by_tests_of_any_style_without_being_right(canary: Path) -> None:
    ran("tests forging", best(), canary, plain=False)


def test_the_corpus_is_as_large_as_it_claims() -> None:
    names = [(family, e.name) for family, entries in corpus.FAMILIES.items() for e in entries]
    assert len(set(names)) == len(names) >= 200
    forged = [(style, f.name) for style, (_, wrong) in STYLES.items() for f in wrong]
    assert len(set(forged)) == len(forged) >= 60
    assert len(FORGERIES) >= 20 and len(corpus.POISONS) >= 8
