"""Imports and exports that are killed at any file operation.

Their output is complete or absent, a file that they replace is complete until then, and the same
command repeats the work.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from meshrl.common.model.files.initial_parameters import load_model
from meshrl.services.weights.atomic_directories import EXPORT_MARKER
from meshrl.services.weights.versions.__main__ import run_command
from meshrl.services.weights.versions.export_targets import UNFINISHED_MARKER
from meshrl.services.weights.versions.run_versions import RunVersions
from tests.fork_server import run_module
from tests.unit.weights.exports.test_export import CONFIG, Run, model, weights
from tests.unit.weights.exports.test_versions import make_model_directory
from tests.unit.weights.test_killed_collections import kill_at_write, wait_and_check_killed

OLD, NEW = 0, 1  # versions, and the seeds of their models
EVERY = 4  # operations; each part of a test begins at another one


@dataclass
class Case:
    """Operation that writes a model."""

    make: Callable[[], object]
    target: Path  # path of the model
    folder: Path  # holds only the result in the end
    has_previous: bool = False  # True if another version was there before


def import_case(root: Path) -> Case:
    source, out = make_model_directory(root / "source"), root / "runs" / "base"
    words = ["import", "--name=base", "--dtype=float32", f"--out={out}", "--", str(source)]
    return Case(lambda: out.exists() or run_command(words), out / "model", out.parent)


def export_case(root: Path) -> Case:
    return _make_export_case(root, str(root / "there" / "out"))


def url_export_case(root: Path) -> Case:
    return _make_export_case(root, f"file://{root}/there/out")


def _make_export_case(root: Path, out: str) -> Case:
    (root / "of").mkdir()
    run = Run(root / "of", CONFIG)
    for version in (OLD, NEW):
        run.commit(version, weights(model(version)), "step" if version else "initial")
    words = ["export", f"--out={out}", "--", str(run.directory)]
    run_command([*words, str(OLD)])
    case = Case(lambda: run_command([*words, str(NEW)]), root / "there" / "out", root / "there")
    case.has_previous = True
    return case


def find_seeds(target: Path) -> Iterator[int]:
    """Yield the seed of the model at a path; nothing if it cannot be opened."""
    if not (target / "config.json").is_file():
        return
    state = load_model(target)[1].state_dict()
    seeds = [
        seed
        for seed in (OLD, NEW, 7)
        if all(torch.equal(state[name], one) for name, one in weights(model(seed)).items())
    ]
    assert seeds, f"{target} is opened, and has none of the models"
    assert (target / "tokenizer.json").is_file() and (target / "tokenizer_config.json").is_file()
    yield seeds[0]


def check(case: Case, kind: str) -> None:
    """Assert that all files that can be opened are complete."""
    seeds = list(find_seeds(case.target))
    if kind == "exports":
        assert seeds, "the previous model stays until it is replaced"
    if kind == "imports" and case.target.parent.exists():
        assert seeds == [7] and (case.target / EXPORT_MARKER).is_file()
        [one] = RunVersions.read(case.target.parent).versions
        assert one.whole and one.current
    for path in case.folder.glob("*.partial"):
        assert not (path / "config.json").exists(), "a partial directory has no config"


def is_emptied_scratch(path: Path) -> bool:
    """Return whether this is an emptied scratch directory of a killed process."""
    return path.name.startswith(".") and os.listdir(path) in ([], [EXPORT_MARKER])


def run_killed(case: Case, kind: str, at: int) -> bool:
    """Return whether the run was killed before its `at`th operation."""
    if not (child := os.fork()):
        try:
            kill_at_write(at)
            case.make()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    killed = wait_and_check_killed(child)
    check(case, kind)
    case.make()
    check(case, kind)
    [seed] = find_seeds(case.target)
    assert seed == (NEW if case.has_previous else 7)
    remaining = {path.name for path in case.folder.iterdir() if not is_emptied_scratch(path)}
    assert remaining == {"out" if case.has_previous else "base"}
    if kind == "url":
        run = case.folder.parent / "of/run/exports"
        assert [path for path in run.iterdir() if not is_emptied_scratch(path)] == []
        assert not (case.target / UNFINISHED_MARKER).exists()
    return killed


def run_all(root: Path, kind: str, first: int) -> None:
    """Kill the operation before every EVERY-th write from the `first`, each time on the same
    files.
    """
    os.fsync = lambda fd: None  # only guards against power cuts, and would take most of the time
    work_dir, template_dir = root / "here", root / "begun"
    work_dir.mkdir()
    case = {"imports": import_case, "exports": export_case, "url": url_export_case}[kind](work_dir)
    work_dir.rename(template_dir)
    at, killed = first - EVERY, True
    while killed:
        at += EVERY
        shutil.copytree(template_dir, work_dir)
        killed = run_killed(case, kind, at)
        shutil.rmtree(work_dir)
    assert at > 15, "the case has more operations"


@pytest.mark.timeout(600)  # many processes in sequence
@pytest.mark.rotating(EVERY)
@pytest.mark.parametrize("first", range(1, EVERY + 1))
@pytest.mark.parametrize("kind", ["imports", "exports", "url"])
async def test_kill_at_any_operation_leaves_no_partial_output(
    tmp_path: Path, kind: str, first: int
) -> None:
    # This runs in its own process, since a process with threads of libraries cannot be forked
    # safely.
    words = str(tmp_path), kind, str(first)
    await run_module(__name__, *words, log=tmp_path / "log", deadline_s=600.0)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
