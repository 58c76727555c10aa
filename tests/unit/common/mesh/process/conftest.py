"""Nurseries of a test's own, which import little and listen at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshrl.common.mesh.process.forking.birth import NURSERY_ENV, OFF
from meshrl.common.mesh.process.handle import SystemChild
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.starting import Spawning
from tests.nursery import wait_until_listening

Open = Callable[..., SystemChild]


@pytest.fixture
def open_nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Starts a nursery that has imported some modules; what a test spawns comes from it."""
    children: list[SystemChild] = []

    def start(*modules: str) -> SystemChild:
        socket = tmp_path / f"nursery-{len(children)}"
        child = SystemHost().spawn(
            [
                sys.executable,
                "-m",
                "meshrl.common.mesh.process.forking.nursery",
                str(socket),
                *modules,
            ],
            name="nursery",
            env={NURSERY_ENV: OFF},
            log=tmp_path / "nursery.log",
            how=Spawning(own_session=True),
        )
        children.append(child)
        wait_until_listening(child, socket)
        monkeypatch.setenv(NURSERY_ENV, str(socket))
        return child

    yield start
    for child in children:
        child.kill()
