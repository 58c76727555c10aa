"""How a process that a nursery has forked ends, and one that nobody lets go."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.mesh.process.forking.newborn import let_go
from meshrl.common.mesh.process.handle import SystemChild
from meshrl.common.mesh.process.host import SystemHost
from tests.load import scaled
from tests.unit.common.mesh.process.modules import module, python

IMPORTED = """
    import os, tempfile
    kept = tempfile.TemporaryDirectory(dir=os.path.dirname(__file__), prefix="kept")
"""
ENDS = """
    import tempfile, imported
    own = tempfile.TemporaryDirectory()
    print(imported.kept.name, own.name)
"""


async def test_a_fork_removes_at_its_end_what_it_has_made_and_nothing_of_the_nursery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_nursery: Callable[..., SystemChild]
) -> None:
    paths = module(tmp_path, "imported", IMPORTED) | module(tmp_path, "ends", ENDS)
    monkeypatch.setenv("PYTHONPATH", paths["PYTHONPATH"])
    open_nursery("imported")
    host, log = SystemHost(), tmp_path / "log"
    for _ in range(2):
        child = host.spawn(python("ends"), name="ends", log=log)
        assert await child.wait(scaled(20)) == 0, log.read_text()
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
