"""Workers, tiers and accounts of the test runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import load
from tests.runner.groups import PREFIX, Account, Group, Tree, open_account
from tests.runner.tiers import SLICES, affected_tests, changed_paths, find_rotation, is_turn

ROOT = Path(__file__).parents[3]
CONFTEST = """
from tests import ends
from tests.runner import plugins

def pytest_addoption(parser):
    plugins.add_options(parser)

def pytest_configure(config):
    ends.listen()
    plugins.configure(config)

def pytest_unconfigure(config):
    plugins.unconfigure(config)
"""
SHARING = """
import os
import pytest

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    yield tmp_path_factory.mktemp("shared")
    print("torn down")

@pytest.mark.parametrize("number", range(20))
def test_shares(number, shared):
    (shared / str(number)).write_text(os.environ["MESHRL_TEST_WORKER"])

def test_one_worker_made_what_they_share(shared):
    assert len(list(shared.iterdir())) == 20
"""
TESTS = """
import os, time, warnings
import pytest

@pytest.mark.parametrize("number", range(20))
def test_passes(number):
    pass

@pytest.mark.parametrize("number", range(3))
def test_dies(number):
    if number == 1:
        os.write(2, b"last words")
        os._exit(7)

def test_fails():
    print("what it printed")
    assert 1 == 2

def test_warns():
    warnings.warn("mind this")

def test_uses_the_cpu():
    began = time.process_time()
    while time.process_time() - began < 0.1: pass

@pytest.mark.deep
def test_deep():
    assert False, "nobody asked for it"

@pytest.mark.rotating(4)
@pytest.mark.parametrize("case", range(8))
def test_rotates(case):
    assert case in (1, 5)
"""
SETTINGS = """
[tool.pytest.ini_options]
markers = ["deep", "rotating(parts)", "timing", "group(name)"]
timeout = 60
[tool.meshrl.tests]
cpu_budget_s = 0.1
"""
BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
WAITS = f"input()\n{BURN}"


def test_every_outcome_reaches_the_report(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "test_sharing.py").write_text(SHARING)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    words = ["--workers", "2", "--rotation", "1", "--costs", "costs.json", "--hold-budget"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    said = ran.stdout
    assert ran.returncode == 1, said + ran.stderr
    assert "2 failed, 47 passed, 7 deselected, 1 warning" in said, said
    assert "ended with exit status 7 while it ran test_them.py::test_dies[1]" in said
    assert "what it printed" in said and "assert 1 == 2" in said and "mind this" in said
    assert "deselected 7 deep tests: --tier deep" in said and "--rotation 1" in said
    assert "too dear: the daily tests cost" in said or "no limit is held" in said
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert len(costs) == 48 and costs["test_them.py::test_uses_the_cpu"][0] > 0.01


@given(st.text(), st.integers(1, 20), st.integers(0, 10**6))
def test_a_part_comes_once_in_as_many_commits(nodeid: str, parts: int, first: int) -> None:
    turns = [is_turn(nodeid, parts, rotation) for rotation in range(first, first + parts)]
    assert turns.count(True) == 1


def test_tests_of_changed_folders_are_named() -> None:
    sandbox = [("tests/unit/sandbox/",), ("tests/mesh/faults/test_jailed_code",)]
    trainer = [("tests/unit/trainer/",), ("tests/mesh/training/",)]
    changed = ["services/sandbox/actor.py", "README.md"]
    assert [affected_tests(changed, rotation) for rotation in (8, 9)] == sandbox
    assert affected_tests(["services/rollout/shard.py"], 7) == ()
    both = ["services/sandbox/actor.py", "services/trainer/role_process.py"]
    assert [affected_tests(both, rotation) for rotation in range(8, 12)] == sandbox + trainer


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


@pytest.fixture(params=["tree", "group"])
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    found: Account = Tree() if request.param == "tree" else open_account("test")
    if request.param == "group" and not isinstance(found, Group):
        pytest.skip("this host lets us make no control group that counts")
    yield found
    found.close()


def test_the_time_of_a_process_and_its_children_is_counted(account: Account) -> None:
    before = account.cpu_s()
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE) as child:
        account.add(child.pid)
        child.communicate(b"\n")
    if isinstance(account, Tree):
        return  # of a process that has ended, its parent has the time
    assert 0.2 <= account.cpu_s() - before < 2.0  # what it used before it was added is not counted
    subprocess.run([sys.executable, "-c", BURN], check=True)  # which is no child of it
    assert account.cpu_s() - before < 2.0


def test_a_tree_has_the_time_of_children_that_ended(tmp_path: object) -> None:
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"
    code += "print('done', flush=True)\ninput()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as parent:  # type: ignore[call-overload]
        tree = Tree()
        tree.add(parent.pid)
        assert parent.stdout.readline() == b"done\n"
        assert tree.cpu_s() >= 0.3
        parent.communicate(b"\n")


def test_groups_of_processes_that_have_ended_are_removed() -> None:
    code = "import os; from tests.runner.groups import open_account as o; o('x').add(os.getpid())"
    code += "; print(os.getpid())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    account = open_account("test")
    if not isinstance(account, Group):
        pytest.skip("this host lets us make no control group that counts")
    left = [path.name for path in account.place.parent.iterdir()]
    account.close()
    assert not any(name.startswith(f"{PREFIX}{ran.stdout.strip()}-") for name in left)
    assert account.place.name in left and not account.place.exists()


def test_script_that_ends_before_the_first_sample_counts_as_on_a_quiet_host(
    tmp_path: Path,
) -> None:
    end = [sys.executable, str(ROOT / ".ci/quiet-seconds"), "end", str(os.getpid()), "3"]
    samples = tmp_path / "slowness.log"
    for _ in range(2):  # without a file, and with an empty one
        shown = subprocess.run([*end, str(samples), "-", "-", "0"], capture_output=True, check=True)
        assert shown.stdout.split() == [b"3", b"3"]
        samples.touch()
