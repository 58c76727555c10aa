"""Atomic directories, which are written beside their path and then installed."""

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

REPEATS, PROCESSES = 300, 3
CLEANUP_SCRIPT = """
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
    new_run = Run(tmp_path, CONFIG)
    new_run.commit(0, weights(model(0)), "initial")
    new_run.commit(1, weights(model(1)))
    return new_run


def read_seed(out: Path) -> int:
    """Return the seed of the model in a directory."""
    state = load_model(out)[1].state_dict()
    [seed] = [s for s in (0, 1) if torch.equal(state["embedding"], weights(model(s))["embedding"])]
    return seed


def test_directory_that_appears_during_the_write_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(Refused, match="is not the directory of an export"),
        scratch_directory(make_scratch_path(out), out) as scratch,
    ):
        (scratch / EXPORT_MARKER).write_text("{}")
        out.mkdir()
        (out / "thesis.txt").write_text("years")
        replace_directory(scratch, out)
    assert (out / "thesis.txt").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("fails", [True, False])
def test_directory_moved_by_a_killed_writer_is_restored(
    run: Run, tmp_path: Path, fails: bool
) -> None:
    out = tmp_path / "out"
    export_selected(run.directory, out, 0, False)
    scratch = make_scratch_path(out)  # as left between the two renames
    (scratch / NEW_FOLDER).mkdir(parents=True)
    (scratch / EXPORT_MARKER).touch()
    out.rename(scratch / OLD_FOLDER)
    if fails:
        [chunk] = run.list_chunks(list_versions(run.directory)[1].manifest_digest)
        run.chunks.chunk_path(chunk).write_bytes(b"broken")
        with pytest.raises(CorruptData):
            export_selected(run.directory, out, 1, False)
    else:
        export_selected(run.directory, out, 1, False)
    assert read_seed(out) == (0 if fails else 1)
    assert not scratch.exists()


def test_failed_install_restores_the_previous_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / EXPORT_MARKER).write_text("before")
    with pytest.raises(OSError), scratch_directory(make_scratch_path(out), out) as scratch:
        out.rename(scratch.with_name(OLD_FOLDER))
        scratch.rename(tmp_path / "nowhere" / "out")
    assert (out / EXPORT_MARKER).read_text() == "before" and not make_scratch_path(out).exists()


def test_export_is_not_taken_for_the_scratch_of_another(run: Run, tmp_path: Path) -> None:
    first_export = make_scratch_path(tmp_path / "out")
    export_selected(run.directory, first_export, 0, False)
    with pytest.raises(Refused, match="Move it away"):
        export_selected(run.directory, tmp_path / "out", 1, False)
    assert read_seed(first_export) == 0 and not (tmp_path / "out").exists()


@pytest.mark.timeout(120)
def test_concurrent_cleanups_do_not_fail(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLEANUP_SCRIPT, str(tmp_path / "left"), str(REPEATS)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(PROCESSES)]
    errors = [process.communicate(timeout=scaled(100))[1].decode() for process in processes]
    assert errors == [""] * PROCESSES and not os.listdir(tmp_path)


def test_file_at_the_scratch_path_raises_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "link"):
        path.symlink_to(tmp_path / "nowhere") if path.name == "link" else path.touch()
        with pytest.raises(FileExistsError), scratch_directory(path):
            pass
        assert os.path.lexists(path)
