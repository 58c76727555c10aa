"""A mesh's own directories are this user's alone, and another user's are no mesh of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.ownership import made_private
from meshrl.directory.places import MeshPlace, find_mesh, home, point_to
from tests.load import scaled

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def test_what_lies_open_is_closed(tmp_path: Path) -> None:
    directory = tmp_path / "mesh"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    made_private(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_where_anybody_may_put_another_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(Refused, match="anybody may replace mesh") as refused:
        made_private(tmp_path / "mesh")
    assert "chmod o-w" in refused.value.fix
    tmp_path.chmod(0o1777)  # as /tmp: who does not own a name cannot move it
    made_private(tmp_path / "mesh")


@AS_ROOT
def test_what_another_user_has_put_there_is_not_used(tmp_path: Path) -> None:
    place = MeshPlace(tmp_path / "run")
    place.directory.mkdir(parents=True)
    MeshSettings("unix:///tmp/trap.sock", str(place.root)).to_file(place.settings)
    assert find_mesh(place.root).root == place.root
    os.chown(place.settings, NOBODY, NOBODY)
    with pytest.raises(Refused, match=f"belongs to user {NOBODY}"):
        find_mesh(place.root)
    os.chown(place.directory, NOBODY, NOBODY)
    with pytest.raises(Refused, match=f"belongs to user {NOBODY}"):
        made_private(place.directory)


@AS_ROOT
def test_a_pointer_of_another_user_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHRL_HOME", str(tmp_path / ".meshrl"))
    point_to(MeshPlace(tmp_path))
    os.chown(home() / "current.json", NOBODY, NOBODY)
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
