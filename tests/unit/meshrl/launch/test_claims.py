"""Ownership of mesh directories, and claims on run directories."""

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
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def list_all(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_failed_start_leaves_no_directory(working_directory: Path) -> None:
    with pytest.raises(KeyError), claim_run_directory(JobConfig(name="sum"), False) as claim:
        (claim.directory / "bundle").mkdir()
        raise KeyError
    assert list_all(working_directory) == []


def test_failed_start_restores_the_run_it_was_to_replace(working_directory: Path) -> None:
    make_run(working_directory / "mine")
    before = list_all(working_directory)
    with pytest.raises(KeyError), claim_run_directory(MINE, True) as claim:
        assert not (claim.directory / "weights").exists()
        (claim.directory / "job.json").write_text("{}")
        raise KeyError
    assert list_all(working_directory) == before
    assert (working_directory / "mine/weights").read_text() == "precious"


def test_successful_start_replaces_the_run(working_directory: Path) -> None:
    make_run(working_directory / "mine")
    with claim_run_directory(MINE, True) as claim:
        assert claim.directory == working_directory / "mine"
        claim.commit()
        claim.delete_replaced_run()
    assert list_all(working_directory) == ["mine"]


def test_run_is_preserved_and_named_if_its_successor_does_not_start(
    working_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(working_directory / "mine")
    with pytest.raises(KeyError), claim_run_directory(MINE, True) as claim:
        claim.commit()  # Redis has the new job; then a service does not start
        raise KeyError
    (aside,) = working_directory.glob(".mine.replaced-*")
    assert (aside / "weights").read_text() == "precious"
    assert str(aside) in capsys.readouterr().err


def test_failed_start_removes_its_links_but_not_their_targets(
    working_directory: Path,
) -> None:
    make_run(working_directory / "mine")
    (working_directory / "store").mkdir()
    (working_directory / "store/chunk").write_text("precious")
    with pytest.raises(KeyError), claim_run_directory(MINE, True) as claim:
        (claim.directory / "store").symlink_to(working_directory / "store")
        raise KeyError
    assert (working_directory / "mine/weights").read_text() == "precious"
    assert (working_directory / "store/chunk").read_text() == "precious"


def test_empty_user_directory_is_kept(working_directory: Path) -> None:
    (working_directory / "mine").mkdir()
    with pytest.raises(KeyError), claim_run_directory(MINE, False) as claim:
        (claim.directory / "bundle").mkdir()
        (claim.directory / "job.json").write_text("{}")
        raise KeyError
    assert list_all(working_directory) == ["mine"]


@pytest.mark.parametrize("content", [None, "{}", "[1]", "no json", '{"job": "build"}'])
def test_force_deletes_only_run_directories(working_directory: Path, content: str | None) -> None:
    (working_directory / "mine/mesh").mkdir(parents=True)
    (working_directory / "mine/summary.json").write_text("{}")
    if content is not None:
        (working_directory / "mine/job.json").write_text(content)
    before = list_all(working_directory)
    with pytest.raises(Refused, match=r"mine is not a run"):
        replace_mine()
    assert list_all(working_directory) == before


def test_force_rejects_a_run_with_a_live_mesh(working_directory: Path) -> None:
    place = MeshPaths(make_run(working_directory / "mine"))
    with place.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="is running"):
            replace_mine()
    assert (working_directory / "mine/weights").read_text() == "precious"
    replace_mine()
    assert not (working_directory / "mine/weights").exists()


def test_force_rejects_a_submitted_run_that_is_not_terminal(working_directory: Path) -> None:
    mesh = working_directory / ".meshrl"
    (mesh / "mesh").mkdir(parents=True)
    (mesh / "mesh/settings.json").write_text('{"redis_url": "redis://127.0.0.1:1"}')
    (mesh / "store").mkdir()
    (mesh / "store/chunk").write_text("of other runs too")
    run = make_run(working_directory / "mine", mesh=str(mesh))
    (run / "store").symlink_to(mesh / "store")
    with pytest.raises(Refused, match="has not ended"):
        replace_mine()
    (run / "summary.json").write_text('{"phase": "finished"}')
    replace_mine()
    assert list_all(run) == []
    assert (mesh / "store/chunk").read_text() == "of other runs too"


def test_force_rejects_a_submitted_run_whose_mesh_does_not_answer(working_directory: Path) -> None:
    mesh = MeshPaths(working_directory / ".meshrl")
    mesh.directory.mkdir(parents=True)
    MeshSettings("redis://127.0.0.1:1", str(mesh.root)).to_file(mesh.settings)
    make_run(working_directory / "mine", mesh=str(mesh.root))
    with mesh.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match=r"state of the run in .* is unknown"):
            replace_mine()
    assert (working_directory / "mine/weights").read_text() == "precious"


def test_force_does_not_follow_a_link(working_directory: Path) -> None:
    make_run(working_directory / "elsewhere")
    (working_directory / "mine").symlink_to(working_directory / "elsewhere")
    with pytest.raises(Refused, match="symbolic link"):
        replace_mine()
    assert (working_directory / "elsewhere/weights").exists() and (
        working_directory / "mine"
    ).is_symlink()


@pytest.mark.parametrize("out", [".", "..", "~", "/"])
def test_force_never_deletes_the_working_or_home_directory(
    working_directory: Path, out: str
) -> None:
    for protected in (working_directory, Path.home()):
        make_run(protected)
    with pytest.raises(Refused, match=r"working directory|home directory"):
        replace_mine(JobConfig(out=out))
    assert (working_directory / "weights").exists() and (Path.home() / "weights").exists()


def test_impossible_directory_is_a_one_line_error(working_directory: Path) -> None:
    (working_directory / "file").write_text("")
    with pytest.raises(Refused, match=r"file/run is not writable: .*Not a directory") as caught:
        replace_mine(JobConfig(out="file/run"))
    assert "\n" not in str(caught.value)
    assert list_all(working_directory) == ["file"]


def test_full_disk_error_names_the_directory(working_directory: Path) -> None:
    full = pytest.raises(StorageFull, match=r"mine is not writable: .*No space left")
    with full, translate_write_errors(working_directory / "mine"):
        Path("/dev/full").write_bytes(b"x" * 100_000)


def test_concurrent_starts_get_separate_directories(working_directory: Path) -> None:
    config = JobConfig(name="sum")
    with claim_run_directory(config, False) as first, claim_run_directory(config, False) as second:
        assert (first.directory, second.directory) == (
            working_directory / "runs/sum",
            working_directory / "runs/sum-2",
        )


NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def test_open_mesh_directory_is_made_private(tmp_path: Path) -> None:
    directory = tmp_path / "mesh"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    create_private_directory(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_world_writable_parent_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(Refused, match="every user can replace mesh") as caught:
        create_private_directory(tmp_path / "mesh")
    assert "chmod o-w" in caught.value.fix
    tmp_path.chmod(0o1777)  # as /tmp: only the owner of a name can move it
    create_private_directory(tmp_path / "mesh")


@AS_ROOT
def test_files_of_another_user_are_rejected(tmp_path: Path) -> None:
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
def test_mesh_pointer_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_HOME", str(tmp_path / ".meshrl"))
    set_current_mesh(MeshPaths(tmp_path))
    os.chown(find_mesh_home() / "current.json", NOBODY, NOBODY)
    with pytest.raises(Refused, match=r"current\.json belongs to user"):
        find_mesh(None)


@pytest.mark.rotating(2)
def test_command_output_is_private_to_its_user(tmp_path: Path) -> None:
    shown = "import os; print(oct(os.umask(0)))"
    program = f"import sys, atexit; atexit.register(lambda: exec({shown!r}))\n"
    program += "from meshrl.__main__ import main; sys.argv[1:] = ARGUMENTS; main()"
    for arguments, mask in ((["status"], "0o77"), (["init"], "0o22")):
        result = subprocess.run(
            [sys.executable, "-c", program.replace("ARGUMENTS", repr(arguments))],
            cwd=tmp_path,
            umask=0o022,
            capture_output=True,
            text=True,
            timeout=scaled(60),
        )
        assert result.stdout.splitlines()[-1:] == [mask], result.stderr
