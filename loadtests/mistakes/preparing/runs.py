"""Runs that a trial's command is about: finished, under way, incomplete or corrupt."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import NotPreparedError

_RUN = "runs/mine"
_APPEND_ONLY = f"{_RUN}/mesh/redis/appendonlydir"
_BEGUN_S = 120.0  # for a run that is prepared


def _meshrl(place: Place, *argv: str) -> subprocess.Popen[bytes]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    log = (place.root.parent / "prepared.log").open("ab")
    command = [sys.executable, "-m", "meshrl", *argv]
    return subprocess.Popen(command, cwd=place.root, env=environ, stdout=log, stderr=log)


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise NotPreparedError(why)


@contextmanager
def _finish(place: Place) -> Iterator[None]:
    """Make a run that has ended, its two steps trained."""
    status = _meshrl(place, "run", "job.toml").wait(_BEGUN_S)
    _require(status == 0, (place.root.parent / "prepared.log").read_text()[-500:])
    yield


@contextmanager
def _keep_running(place: Place) -> Iterator[None]:
    """Make a run that is under way, and must be at the end."""
    place.set({"budget.steps": 10_000})
    program = _meshrl(place, "run", "job.toml")
    metrics = place.path(f"{_RUN}/metrics.jsonl")
    deadline = time.monotonic() + _BEGUN_S
    while not metrics.is_file() or not metrics.stat().st_size:
        _require(program.poll() is None and time.monotonic() < deadline, "the run does not begin")
        time.sleep(0.1)
    try:
        yield
        _require(program.poll() is None, "the run did not survive")
        steps = len(metrics.read_text().splitlines())
        deadline = time.monotonic() + _BEGUN_S
        while len(metrics.read_text().splitlines()) <= steps:
            _require(program.poll() is None and time.monotonic() < deadline, "it does not go on")
            time.sleep(0.1)
    finally:
        program.send_signal(signal.SIGINT)
        program.wait(_BEGUN_S)


@contextmanager
def _drop_files(place: Place, *names: str) -> Iterator[None]:
    """Make a finished run that lacks some of its files."""
    with _finish(place):
        for name in names:
            found = list(place.path(_RUN).glob(name))
            _require(bool(found), f"a run has no {name}")
            for path in found:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield


@contextmanager
def _edit_job(place: Place, keys: Mapping[str, Any]) -> Iterator[None]:
    """Make a finished run whose job file has changed since."""
    with _finish(place):
        place.set(keys)
        yield


@contextmanager
def _link(place: Place) -> Iterator[None]:
    """Make `runs/mine` a link to a folder of the user's."""
    place.write("thesis/chapter.tex", "years of work\n")
    place.path("runs").mkdir()
    place.path(_RUN).symlink_to(place.path("thesis"))
    yield


@contextmanager
def _corrupt_redis(place: Place, harm: str) -> Iterator[None]:
    """Make a finished run whose Redis data is missing, or has a bit flipped."""
    with _finish(place):
        folder = place.path(_APPEND_ONLY)
        if harm == "missing":
            shutil.rmtree(folder)
        else:
            [file] = folder.glob("*.incr.aof")
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        yield


PREPARATIONS: Mapping[str, Callable[..., AbstractContextManager[None]]] = {
    "finished_run": _finish,
    "live_run": _keep_running,
    "run_without": _drop_files,
    "edited_job": _edit_job,
    "linked_run": _link,
    "corrupt_redis": _corrupt_redis,
}
