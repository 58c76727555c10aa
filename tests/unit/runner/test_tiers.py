"""Every test belongs to a tier, and what a day leaves out comes back within as many commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import load
from tests.runner.tiers import SLICES, affected_tests, changed_paths, find_rotation, is_turn


@given(st.text(), st.integers(1, 20), st.integers(0, 10**6))
def test_a_part_comes_once_in_as_many_commits(nodeid: str, parts: int, first: int) -> None:
    turns = [is_turn(nodeid, parts, rotation) for rotation in range(first, first + parts)]
    assert turns.count(True) == 1


def test_tests_of_changed_folders_are_named() -> None:
    sandbox = "tests/unit/sandbox/", "tests/mesh/faults/test_jailed_code"
    assert affected_tests(["services/sandbox/actor.py", "README.md"], 7) == sandbox
    assert affected_tests(["services/rollout/shard.py"], 7) == ()
    both = ["services/sandbox/actor.py", "services/trainer/running.py"]
    turns = {affected_tests(both, rotation) for rotation in (7, 8)}
    assert turns == {sandbox, ("tests/unit/trainer/", "tests/mesh/training/")}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    for number in range(3):
        (tmp_path / f"file{number}").write_text("")
        git(tmp_path, "add", ".")
        words = ("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "one")
        git(tmp_path, *words)
    return tmp_path


def git(place: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(place), *words], check=True, capture_output=True)


def test_the_rotation_moves_on_with_each_commit(repository: Path, tmp_path: Path) -> None:
    assert find_rotation(repository) == 3
    assert list(changed_paths(repository)) == ["file0", "file1", "file2"]
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", str(shallow))
    assert find_rotation(shallow) > SLICES, "drawn from the commit's name"


def test_without_a_repository_there_is_a_rotation_too(tmp_path: Path) -> None:
    assert find_rotation(tmp_path) == 0 and changed_paths(tmp_path) == ()


def test_deadlines_grow_with_what_is_known_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load.scaled(2.0) >= 2.0
    monkeypatch.setenv(load.FACTOR_ENV, "7.5")
    assert load.scaled(2.0) >= 15.0
    monkeypatch.setenv(load.FACTOR_ENV, "1e9")
    assert load.scaled(1.0) == load.LIMIT
