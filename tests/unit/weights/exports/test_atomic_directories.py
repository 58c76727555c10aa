"""Atomic directories: made beside their path and then installed, they delete only what they
replace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshrl.common.base.errors import CorruptData, Refused
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.services.weights.atomic_directories import (
    EXPORT_MARKER,
    NEW_FOLDER,
    OLD_FOLDER,
    replace_directory,
    scratch_directory,
)
from meshrl.services.weights.export import export_selected, make_scratch_path
from meshrl.services.weights.versions.run_versions import list_versions
from tests.load import scaled
from tests.unit.weights.exports.test_export import CONFIG, Run, model, weights

TIMES, AT_ONCE = 300, 3
CLEANS = """
import sys
from contextlib import suppress
from pathlib import Path
from meshrl.common.base.errors import Refused
from meshrl.services.weights.atomic_directories import scratch_directory
for _ in range(int(sys.argv[2])):
    with suppress(Refused), scratch_directory(Path(sys.argv[1])):
        pass
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path, CONFIG)
    made.commit(0, weights(model(0)), "initial")
    made.commit(1, weights(model(1)))
    return made


def seed_of(out: Path) -> int:
    """Return the seed of the model there."""
    found = load_model(out)[1].state_dict()
    [seed] = [s for s in (0, 1) if torch.equal(found["embedding"], weights(model(s))["embedding"])]
    return seed


def test_what_comes_to_lie_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(Refused, match="was not written by an export"),
        scratch_directory(make_scratch_path(out), out) as made,
    ):
        (made / EXPORT_MARKER).write_text("{}")
        out.mkdir()
        (out / "thesis.txt").write_text("years")
        replace_directory(made, out)
    assert (out / "thesis.txt").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_killed_one_took_away_is_there_again(run: Run, tmp_path: Path, fails: bool) -> None:
    out = tmp_path / "out"
    export_selected(run.directory, out, 0, False)
    scratch = make_scratch_path(out)  # as it is left between the two renames
    (scratch / NEW_FOLDER).mkdir(parents=True)
    (scratch / EXPORT_MARKER).touch()
    out.rename(scratch / OLD_FOLDER)
    if fails:
        [chunk] = run.chunks_of(list_versions(run.directory)[1].manifest_digest)
        run.chunks.chunk_path(chunk).write_bytes(b"broken")
        with pytest.raises(CorruptData):
            export_selected(run.directory, out, 1, False)
    else:
        export_selected(run.directory, out, 1, False)
    assert seed_of(out) == (0 if fails else 1)
    assert not scratch.exists()


def test_one_that_cannot_take_its_place_leaves_the_one_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / EXPORT_MARKER).write_text("before")
    with pytest.raises(OSError), scratch_directory(make_scratch_path(out), out) as made:
        out.rename(made.with_name(OLD_FOLDER))
        made.rename(tmp_path / "nowhere" / "out")
    assert (out / EXPORT_MARKER).read_text() == "before" and not make_scratch_path(out).exists()


def test_an_export_is_not_taken_for_what_another_one_has_left(run: Run, tmp_path: Path) -> None:
    mine = make_scratch_path(tmp_path / "out")
    export_selected(run.directory, mine, 0, False)
    with pytest.raises(Refused, match="Move it away"):
        export_selected(run.directory, tmp_path / "out", 1, False)
    assert seed_of(mine) == 0 and not (tmp_path / "out").exists()


@pytest.mark.timeout(120)
def test_whoever_is_first_removes_it_and_the_others_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLEANS, str(tmp_path / "left"), str(TIMES)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(AT_ONCE)]
    said = [process.communicate(timeout=scaled(100))[1].decode() for process in started]
    assert said == [""] * AT_ONCE and not os.listdir(tmp_path)


def test_a_file_in_its_place_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "link"):
        path.symlink_to(tmp_path / "nowhere") if path.name == "link" else path.touch()
        with pytest.raises(FileExistsError), scratch_directory(path):
            pass
        assert os.path.lexists(path)
