"""How a process that a nursery has forked ends, and one that nobody lets go."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.process.birth import NURSERY_ENV, OFF
from common.process.host import SystemHost
from common.process.newborn import let_go

IMPORTED = """
    import tempfile
    kept = tempfile.TemporaryDirectory(dir="{tmp_path}", prefix="kept")
"""
CHILD = """
    import tempfile, imported
    print(imported.kept.name)
    own = tempfile.TemporaryDirectory()
    print(own.name)
"""


@pytest.fixture
async def nursery(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """The environment of processes that are its forks."""
    (tmp_path / "imported.py").write_text(textwrap.dedent(IMPORTED.format(tmp_path=tmp_path)))
    (tmp_path / "child.py").write_text(textwrap.dedent(CHILD))
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    place = tmp_path / "nursery"
    child = SystemHost().spawn(
        [sys.executable, "-m", "common.process.nursery", str(place), "imported"],
        name="nursery",
        env={NURSERY_ENV: OFF, "PYTHONPATH": path},
    )
    while not place.exists():
        assert child.poll() is None
        await asyncio.sleep(0.01)
    yield {NURSERY_ENV: str(place), "PYTHONPATH": path}
    child.kill()
    await child.wait(5)


async def test_a_fork_removes_at_its_end_what_it_has_made_and_nothing_of_the_nursery(
    tmp_path: Path, nursery: dict[str, str]
) -> None:
    host, log = SystemHost(), tmp_path / "log"
    for _ in range(2):
        child = host.spawn([sys.executable, "-m", "child"], name="child", env=nursery, log=log)
        assert await child.wait(20) == 0
    kept, own, kept_again, own_again = map(Path, log.read_text().split())
    assert kept == kept_again and kept.is_dir()
    assert not own.exists() and not own_again.exists()


@pytest.mark.parametrize("told", [b"go", b"", b"x"])
def test_a_process_begins_at_its_owners_word_only(told: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if told:
            ours.send(told)
        ours.close()
        assert let_go(theirs) is (told == b"go")


def test_an_owner_that_ended_before_it_read_the_answer_lets_nothing_go() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(b"the number of the process")
        ours.close()
        assert not let_go(theirs)
