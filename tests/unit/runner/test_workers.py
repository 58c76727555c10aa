"""Workers run every test once, whatever becomes of one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
    while time.process_time() < 0.3: pass

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
