"""A run's directory is made when its start succeeds; --force replaces a run and nothing else."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from meshrl.common.base.errors import Refused, StorageFull
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.directory.claims import claimed, writing
from meshrl.directory.places import MeshPlace

MINE = JobConfig(name="sum", out="mine")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return work


def make_run(directory: Path, **about: str) -> Path:
    (directory / "mesh").mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps({"job": "sum", "document": {}, **about}))
    (directory / "weights").write_text("precious")
    return directory


def replace_mine(config: JobConfig = MINE) -> None:
    with claimed(config, True) as claim:
        claim.keep()
        claim.replace()


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_start_that_fails_leaves_no_directory(here: Path) -> None:
    with pytest.raises(KeyError), claimed(JobConfig(name="sum"), False) as claim:
        (claim.directory / "bundle").mkdir()
        raise KeyError
    assert everything(here) == []


def test_a_start_that_fails_leaves_the_run_that_it_was_to_replace(here: Path) -> None:
    make_run(here / "mine")
    before = everything(here)
    with pytest.raises(KeyError), claimed(MINE, True) as claim:
        assert not (claim.directory / "weights").exists()
        (claim.directory / "job.json").write_text("{}")
        raise KeyError
    assert everything(here) == before
    assert (here / "mine/weights").read_text() == "precious"


def test_a_start_that_succeeds_replaces_it(here: Path) -> None:
    make_run(here / "mine")
    with claimed(MINE, True) as claim:
        assert claim.directory == here / "mine"
        claim.keep()
        claim.replace()
    assert everything(here) == ["mine"]


def test_a_run_whose_successor_does_not_come_up_stays_whole_and_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(here / "mine")
    with pytest.raises(KeyError), claimed(MINE, True) as claim:
        claim.keep()  # Redis has the new job; then a service does not start
        raise KeyError
    (aside,) = here.glob(".mine.replaced-*")
    assert (aside / "weights").read_text() == "precious"
    assert str(aside) in capsys.readouterr().err


def test_what_a_failed_start_has_linked_is_taken_back_and_what_it_leads_to_is_not(
    here: Path,
) -> None:
    make_run(here / "mine")
    (here / "store").mkdir()
    (here / "store/chunk").write_text("precious")
    with pytest.raises(KeyError), claimed(MINE, True) as claim:
        (claim.directory / "store").symlink_to(here / "store")
        raise KeyError
    assert (here / "mine/weights").read_text() == "precious"
    assert (here / "store/chunk").read_text() == "precious"


def test_an_empty_directory_of_the_users_stays_one(here: Path) -> None:
    (here / "mine").mkdir()
    with pytest.raises(KeyError), claimed(MINE, False) as claim:
        (claim.directory / "bundle").mkdir()
        (claim.directory / "job.json").write_text("{}")
        raise KeyError
    assert everything(here) == ["mine"]


@pytest.mark.parametrize("content", [None, "{}", "[1]", "no json", '{"job": "build"}'])
def test_force_deletes_nothing_that_is_no_run(here: Path, content: str | None) -> None:
    (here / "mine/mesh").mkdir(parents=True)
    (here / "mine/summary.json").write_text("{}")
    if content is not None:
        (here / "mine/job.json").write_text(content)
    before = everything(here)
    with pytest.raises(Refused, match=r"mine is no run"):
        replace_mine()
    assert everything(here) == before


def test_force_refuses_a_run_whose_mesh_runs(here: Path) -> None:
    place = MeshPlace(make_run(here / "mine"))
    with place.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="goes on"):
            replace_mine()
    assert (here / "mine/weights").read_text() == "precious"
    replace_mine()
    assert not (here / "mine/weights").exists()


def test_force_refuses_a_submitted_run_that_waits_for_its_mesh(here: Path) -> None:
    mesh = here / ".meshrl"
    (mesh / "mesh").mkdir(parents=True)
    (mesh / "mesh/settings.json").write_text('{"redis_url": "redis://127.0.0.1:1"}')
    (mesh / "store").mkdir()
    (mesh / "store/chunk").write_text("of other runs too")
    run = make_run(here / "mine", mesh=str(mesh))
    (run / "store").symlink_to(mesh / "store")
    with pytest.raises(Refused, match="has not ended"):
        replace_mine()
    (run / "summary.json").write_text('{"phase": "finished"}')
    replace_mine()
    assert everything(run) == []
    assert (mesh / "store/chunk").read_text() == "of other runs too"


def test_force_refuses_a_submitted_run_whose_live_mesh_does_not_answer(here: Path) -> None:
    mesh = MeshPlace(here / ".meshrl")
    mesh.directory.mkdir(parents=True)
    MeshSettings("redis://127.0.0.1:1", str(mesh.root)).to_file(mesh.settings)
    make_run(here / "mine", mesh=str(mesh.root))
    with mesh.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="cannot be seen"):
            replace_mine()
    assert (here / "mine/weights").read_text() == "precious"


def test_force_does_not_follow_a_link(here: Path) -> None:
    make_run(here / "elsewhere")
    (here / "mine").symlink_to(here / "elsewhere")
    with pytest.raises(Refused, match="symbolic link"):
        replace_mine()
    assert (here / "elsewhere/weights").exists() and (here / "mine").is_symlink()


@pytest.mark.parametrize("out", [".", "..", "~", "/"])
def test_force_deletes_no_directory_that_one_works_or_lives_in(here: Path, out: str) -> None:
    for protected in (here, Path.home()):
        make_run(protected)
    with pytest.raises(Refused, match=r"working directory|home directory"):
        replace_mine(JobConfig(out=out))
    assert (here / "weights").exists() and (Path.home() / "weights").exists()


def test_a_directory_that_cannot_be_made_is_one_line_that_names_it(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(Refused, match=r"file/run cannot be written: .*Not a directory") as said:
        replace_mine(JobConfig(out="file/run"))
    assert "\n" not in str(said.value)
    assert everything(here) == ["file"]


def test_a_full_disk_is_one_line_that_names_the_directory(here: Path) -> None:
    full = pytest.raises(StorageFull, match=r"mine cannot be written: .*No space left")
    with full, writing(here / "mine"):
        Path("/dev/full").write_bytes(b"x" * 100_000)


def test_two_runs_that_start_at_once_get_a_directory_each(here: Path) -> None:
    config = JobConfig(name="sum")
    with claimed(config, False) as first, claimed(config, False) as second:
        assert (first.directory, second.directory) == (here / "runs/sum", here / "runs/sum-2")
