"""Imports and exports that are killed at any file operation.

Their output is complete or absent, a file that they replace is complete until then, and the same
command repeats the work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
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
from tests.load import scaled
from tests.unit.weights.exports.test_export import CONFIG, Run, model, weights
from tests.unit.weights.exports.test_versions import hugging_face
from tests.unit.weights.test_killed_collections import ROOT, dies_at, ended

OLD, NEW = 0, 1  # versions, and the seeds of their models
EVERY = 4  # operations; each part of a test begins at another one


@dataclass
class Case:
    """Something that makes a model."""

    make: Callable[[], object]
    made: Path  # where the model is to be
    beside: Path  # has nothing but what was made, in the end
    old: bool = False  # whether another one is there before


def imports(root: Path) -> Case:
    source, out = hugging_face(root / "source"), root / "runs" / "base"
    words = ["import", "--name=base", "--dtype=float32", f"--out={out}", "--", str(source)]
    return Case(lambda: out.exists() or run_command(words), out / "model", out.parent)


def exports(root: Path) -> Case:
    return _exports(root, str(root / "there" / "out"))


def exports_to_a_url(root: Path) -> Case:
    return _exports(root, f"file://{root}/there/out")


def _exports(root: Path, out: str) -> Case:
    (root / "of").mkdir()
    run = Run(root / "of", CONFIG)
    for version in (OLD, NEW):
        run.commit(version, weights(model(version)), "step" if version else "initial")
    words = ["export", f"--out={out}", "--", str(run.directory)]
    run_command([*words, str(OLD)])
    case = Case(lambda: run_command([*words, str(NEW)]), root / "there" / "out", root / "there")
    case.old = True
    return case


def opened(made: Path) -> Iterator[int]:
    """Yield the seed of the model that is there; nothing if none can be opened."""
    if not (made / "config.json").is_file():
        return
    found = load_model(made)[1].state_dict()
    seeds = [
        seed
        for seed in (OLD, NEW, 7)
        if all(torch.equal(found[name], one) for name, one in weights(model(seed)).items())
    ]
    assert seeds, f"{made} is opened, and has none of the models"
    assert (made / "tokenizer.json").is_file() and (made / "tokenizer_config.json").is_file()
    yield seeds[0]


def check(case: Case, kind: str) -> None:
    """Assert that all files that can be opened are complete."""
    found = list(opened(case.made))
    if kind == "exports":
        assert found, "the one before stays until the other takes its place"
    if kind == "imports" and case.made.parent.exists():
        assert found == [7] and (case.made / EXPORT_MARKER).is_file()
        [one] = RunVersions.read(case.made.parent).versions
        assert one.whole and one.current
    for left in case.beside.glob("*.partial"):
        assert not (left / "config.json").exists(), "nobody takes it for a model"


def is_done(path: Path) -> bool:
    """Return whether this is an emptied scratch directory of a killed process."""
    return path.name.startswith(".") and os.listdir(path) in ([], [EXPORT_MARKER])


def run_killed(case: Case, kind: str, at: int) -> bool:
    """Return whether the run was killed before its `at`th operation."""
    if not (child := os.fork()):
        try:
            dies_at(at)
            case.make()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    killed = ended(child)
    check(case, kind)
    case.make()
    check(case, kind)
    [seed] = opened(case.made)
    assert seed == (NEW if case.old else 7)
    left = {path.name for path in case.beside.iterdir() if not is_done(path)}
    assert left == {"out" if case.old else "base"}
    if kind == "url":
        run = case.beside.parent / "of/run/exports"
        assert [path for path in run.iterdir() if not is_done(path)] == []
        assert not (case.made / UNFINISHED_MARKER).exists()
    return killed


def run_all(root: Path, kind: str, first: int) -> None:
    """Kill it before every EVERY-th of its operations from the `first`, all from the same files."""
    os.fsync = lambda fd: None  # which is for power cuts, and would be most of the time
    here, begun = root / "here", root / "begun"
    here.mkdir()
    case = {"imports": imports, "exports": exports, "url": exports_to_a_url}[kind](here)
    here.rename(begun)
    at, killed = first - EVERY, True
    while killed:
        at += EVERY
        shutil.copytree(begun, here)
        killed = run_killed(case, kind, at)
        shutil.rmtree(here)
    assert at > 15, "it does more than that"


@pytest.mark.timeout(600)  # many processes, one after the other
@pytest.mark.rotating(EVERY)
@pytest.mark.parametrize("first", range(1, EVERY + 1))
@pytest.mark.parametrize("kind", ["imports", "exports", "url"])
def test_a_kill_at_any_operation_leaves_nothing_half(tmp_path: Path, kind: str, first: int) -> None:
    # In a process of its own: one that libraries have put threads into cannot be forked safely.
    command = [sys.executable, "-m", __name__, str(tmp_path), kind, str(first)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=scaled(600)
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
