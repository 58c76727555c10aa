"""Runs and meshes are found where a user expects them, and nothing is overwritten by surprise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import NotFound, Refused
from common.job.config import JobConfig
from common.settings import MESH_ENV, mark_of
from meshrl.launch import leftovers, places
from meshrl.launch.places import MeshPlace
from meshrl.observe.usage import Tally


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


def test_the_tally_adds_up_over_incarnations_and_sessions(tmp_path: Path) -> None:
    tally = Tally()
    tally.see_tokens("rollout/0", "first", 100)
    tally.see_tokens("rollout/0", "first", 150)
    tally.see_tokens("rollout/0", "second", 10)
    tally.see_tokens("engine/g1", "third", 1000)
    tally.see_processes({os.getpid(): "meshrl"}, [os.getpid()])
    tally.write(tmp_path / "usage.json", 12.5)
    again = Tally.read(tmp_path / "usage.json")
    assert again.total_tokens("rollout/") == 160
    assert again.wall_s == 12.5
    assert again.cpu_by_name()["meshrl"] > 0


def test_a_process_that_gets_its_name_late_is_counted_once() -> None:
    tally, me = Tally(), os.getpid()
    tally.see_processes({}, [me])
    before = sum(tally.cpu_by_name().values())
    tally.see_processes({me: "engine/g0"}, [me])
    tally.see_processes({}, [me])  # its lease has lapsed: the name is still its own
    found = tally.cpu_by_name()
    assert found["engine/g0"] >= before > 0
    assert sum(found.values()) == found["engine/g0"]
