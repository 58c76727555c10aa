"""Who owns a mesh's directory, and what claims on it mean."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import Refused, StorageFull
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.job.config import JobConfig
from meshrl.directory.directory_paths import MeshPaths, find_mesh, find_mesh_home, set_current_mesh
from meshrl.directory.file_ownership import create_private_directory
from meshrl.directory.run_claims import claim_run_directory, translate_write_errors
from tests.load import scaled

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
    with claim_run_directory(config, True) as claim:
        claim.commit()
        claim.delete_replaced_run()


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_a_start_that_fails_leaves_no_directory(here: Path) -> None:
    with pytest.raises(KeyError), claim_run_directory(JobConfig(name="sum"), False) as claim:
        (claim.directory / "bundle").mkdir()
        raise KeyError
    assert everything(here) == []


def test_a_start_that_fails_leaves_the_run_that_it_was_to_replace(here: Path) -> None:
    make_run(here / "mine")
    before = everything(here)
    with pytest.raises(KeyError), claim_run_directory(MINE, True) as claim:
        assert not (claim.directory / "weights").exists()
        (claim.directory / "job.json").write_text("{}")
        raise KeyError
    assert everything(here) == before
    assert (here / "mine/weights").read_text() == "precious"


def test_a_start_that_succeeds_replaces_it(here: Path) -> None:
    make_run(here / "mine")
    with claim_run_directory(MINE, True) as claim:
        assert claim.directory == here / "mine"
        claim.commit()
        claim.delete_replaced_run()
    assert everything(here) == ["mine"]


def test_a_run_whose_successor_does_not_come_up_stays_whole_and_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(here / "mine")
    with pytest.raises(KeyError), claim_run_directory(MINE, True) as claim:
        claim.commit()  # Redis has the new job; then a service does not start
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
    with pytest.raises(KeyError), claim_run_directory(MINE, True) as claim:
        (claim.directory / "store").symlink_to(here / "store")
        raise KeyError
    assert (here / "mine/weights").read_text() == "precious"
    assert (here / "store/chunk").read_text() == "precious"


def test_an_empty_directory_of_the_users_stays_one(here: Path) -> None:
    (here / "mine").mkdir()
    with pytest.raises(KeyError), claim_run_directory(MINE, False) as claim:
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
    place = MeshPaths(make_run(here / "mine"))
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
    mesh = MeshPaths(here / ".meshrl")
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
    with full, translate_write_errors(here / "mine"):
        Path("/dev/full").write_bytes(b"x" * 100_000)


def test_two_runs_that_start_at_once_get_a_directory_each(here: Path) -> None:
    config = JobConfig(name="sum")
    with claim_run_directory(config, False) as first, claim_run_directory(config, False) as second:
        assert (first.directory, second.directory) == (here / "runs/sum", here / "runs/sum-2")


NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def test_what_lies_open_is_closed(tmp_path: Path) -> None:
    directory = tmp_path / "mesh"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    create_private_directory(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_where_anybody_may_put_another_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(Refused, match="anybody may replace mesh") as refused:
        create_private_directory(tmp_path / "mesh")
    assert "chmod o-w" in refused.value.fix
    tmp_path.chmod(0o1777)  # as /tmp: who does not own a name cannot move it
    create_private_directory(tmp_path / "mesh")


@AS_ROOT
def test_what_another_user_has_put_there_is_not_used(tmp_path: Path) -> None:
    place = MeshPaths(tmp_path / "run")
    place.directory.mkdir(parents=True)
    MeshSettings("unix:///tmp/trap.sock", str(place.root)).to_file(place.settings)
    assert find_mesh(place.root).root == place.root
    os.chown(place.settings, NOBODY, NOBODY)
    with pytest.raises(Refused, match=f"belongs to user {NOBODY}"):
        find_mesh(place.root)
    os.chown(place.directory, NOBODY, NOBODY)
    with pytest.raises(Refused, match=f"belongs to user {NOBODY}"):
        create_private_directory(place.directory)


@AS_ROOT
def test_a_pointer_of_another_user_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_HOME", str(tmp_path / ".meshrl"))
    set_current_mesh(MeshPaths(tmp_path))
    os.chown(find_mesh_home() / "current.json", NOBODY, NOBODY)
    with pytest.raises(Refused, match=r"current\.json belongs to user"):
        find_mesh(None)


@pytest.mark.rotating(2)
def test_what_a_command_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    shown = "import os; print(oct(os.umask(0)))"
    program = f"import sys, atexit; atexit.register(lambda: exec({shown!r}))\n"
    program += "from meshrl.__main__ import main; sys.argv[1:] = ARGUMENTS; main()"
    for arguments, mask in ((["status"], "0o77"), (["init"], "0o22")):
        asked = subprocess.run(
            [sys.executable, "-c", program.replace("ARGUMENTS", repr(arguments))],
            cwd=tmp_path,
            umask=0o022,
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )
        assert asked.stdout.splitlines()[-1:] == [mask], asked.stderr
