"""An account has the CPU time of what it counts, and of nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.runner.groups import PREFIX, Account, Group, Tree, open_account

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
WAITS = f"input()\n{BURN}"


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
