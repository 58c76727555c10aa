"""Escape corpus: no program escapes, changes the outside, or gets a reward for a wrong answer."""

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
from tests.unit.sandbox.escapes.forgery_grader import FORGERIES, STYLES

ROOT = Path(__file__).parents[3]
FAMILIES = [*corpus.FAMILIES, "reward forging", "session poisoning"]
PLAIN = [sys.executable, "-m", "tests.unit.sandbox.plain_user"]
HANG_S = 280  # far longer than any family takes

pytestmark = [pytest.mark.timeout(300), pytest.mark.needs("bwrap")]


@functools.cache
def choose_best_tier() -> str:
    return "cgroup" if cgroups.find_parents() is not None else "bwrap"


@pytest.fixture
def canary_file() -> Iterator[Path]:
    """Yield a file that everybody may read, in a directory that jails do not contain."""
    with tempfile.TemporaryDirectory(prefix="canary-") as directory:
        Path(directory).chmod(0o755)
        path = Path(directory) / "canary"
        path.write_text("untouched")
        path.chmod(0o644)
        yield path


def run_forked(command: list[str]) -> tuple[int | None, str]:
    """Run a program, forked by the fork server if there is one; return its exit status and
    output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        log, deadline_s = Path(scratch) / "log", time.monotonic() + scaled(HANG_S)
        child = SystemHost().spawn(command, name="escapes", log=log)
        while (status := child.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        child.kill()
        return status, log.read_text()


def run_family(family: str, tier: str, canary_file: Path, *, as_plain_user: bool) -> None:
    prefix = PLAIN if as_plain_user and os.getuid() == 0 else []
    module = "tests.unit.sandbox.escapes.runner"
    command = [sys.executable, "-m", module, tier, str(canary_file), family]
    if prefix:
        completed = subprocess.run(
            [*prefix, *command], cwd=ROOT, capture_output=True, text=True, timeout=scaled(HANG_S)
        )
        status: int | None = completed.returncode
        output = completed.stdout + completed.stderr
    else:
        status, output = run_forked(command)
    assert status == 0, output[-2000:]
    report = next(json.loads(line) for line in output.splitlines() if line.startswith('{"user"'))
    assert (report["user"] != 0) == bool(prefix) or os.getuid() != 0
    for family_report in report["families"]:
        assert family_report["results"]
        assert [result for result in family_report["results"] if not result["contained"]] == []
        assert family_report["harm"] == []


@pytest.mark.needs("root")
@pytest.mark.parametrize("family", FAMILIES)
def test_corpus_is_contained_as_root(family: str, canary_file: Path) -> None:
    run_family(family, choose_best_tier(), canary_file, as_plain_user=False)


@pytest.mark.rotating(len(FAMILIES))
@pytest.mark.parametrize("family", FAMILIES)
def test_corpus_is_contained_as_plain_user_without_control_groups(
    family: str, canary_file: Path
) -> None:
    run_family(family, "bwrap", canary_file, as_plain_user=True)


@pytest.mark.needs("landlock")
@pytest.mark.rotating(len(FAMILIES))
@pytest.mark.parametrize("family", FAMILIES)
def test_corpus_is_contained_by_landlock_without_namespaces(family: str, canary_file: Path) -> None:
    run_family(family, "landlock", canary_file, as_plain_user=True)


@pytest.mark.rotating(3)
def test_forgeries_of_all_test_styles_get_no_reward(canary_file: Path) -> None:
    run_family("tests forging", choose_best_tier(), canary_file, as_plain_user=False)


def test_corpus_has_its_documented_size() -> None:
    names = [(family, e.name) for family, entries in corpus.FAMILIES.items() for e in entries]
    assert len(set(names)) == len(names) >= 200
    forgeries = [(style, f.name) for style, (_, wrong) in STYLES.items() for f in wrong]
    assert len(set(forgeries)) == len(forgeries) >= 60
    assert len(FORGERIES) >= 20 and len(corpus.POISONS) >= 8
