"""Runs and meshes are found where a user expects them, and nothing is overwritten by surprise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.errors import NotFound, Refused
from meshrl.common.base.host.settings import MESH_ENV, mark_of
from meshrl.common.job.config import JobConfig
from meshrl.directory import places
from meshrl.directory.places import MeshPlace
from meshrl.launch import leftovers


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHRL_HOME", raising=False)
    return tmp_path


def make_run(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "job.json").write_text("{}")


def test_runs_of_one_name_are_numbered(here: Path) -> None:
    config = JobConfig(name="sum")
    assert places.run_directory(config, False) == here / "runs/sum"
    make_run(here / "runs/sum")
    assert places.run_directory(config, False) == here / "runs/sum-2"
    make_run(here / "runs/sum-2")
    assert places.run_directory(config, False) == here / "runs/sum-3"


def test_a_run_in_the_directory_that_was_asked_for_is_refused(here: Path) -> None:
    make_run(here / "mine")
    with pytest.raises(Refused, match="meshrl resume mine"):
        places.run_directory(JobConfig(out="mine"), False)


def test_the_mesh_started_last_is_meant_unless_one_is_named(here: Path) -> None:
    with pytest.raises(NotFound, match="meshrl up"):
        places.find_mesh(None)
    first, second = MeshPlace(here / "a"), MeshPlace(here / "b")
    for place in (first, second):
        places.write_json(place.settings, {"redis_url": "redis://nowhere"})
        places.point_to(place)
    assert places.find_mesh(None).root == here / "b"
    for named in (here / "a", here / "a/mesh", here / "a/mesh/settings.json"):
        assert places.find_mesh(named).root == here / "a"


@pytest.fixture
def lingering(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the mesh whose settings are `settings.json`, in a session of its own."""
    program = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MESH_ENV: mark_of(tmp_path / "settings.json")},
        start_new_session=True,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


async def test_what_a_mesh_left_behind_is_found_and_ended(
    tmp_path: Path, lingering: subprocess.Popen[bytes]
) -> None:
    settings = tmp_path / "settings.json"
    assert leftovers.belonging_to(tmp_path / "other.json") == []
    assert await leftovers.end_all(settings, 10.0) == [lingering.pid]
    assert leftovers.belonging_to(settings) == []
