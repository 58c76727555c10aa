"""Commands on runs that are not there, not whole, finished or under way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import Mistake, NotPreparedError

_RUN = "runs/mine"
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
def finished(place: Place) -> Iterator[None]:
    """A run that has ended, its two steps trained."""
    status = _meshrl(place, "run", "job.toml").wait(_BEGUN_S)
    _require(status == 0, (place.root.parent / "prepared.log").read_text()[-500:])
    yield


@contextmanager
def _live(place: Place) -> Iterator[None]:
    """A run that is under way, and must be at the end."""
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


def _without(*names: str) -> Callable[[Place], AbstractContextManager[None]]:
    """A finished run that lacks some of its files."""

    @contextmanager
    def prepare(place: Place) -> Iterator[None]:
        with finished(place):
            for name in names:
                found = list(place.path(_RUN).glob(name))
                _require(bool(found), f"a run has no {name}")
                for path in found:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield

    return prepare


@contextmanager
def _edited(place: Place) -> Iterator[None]:
    with finished(place):
        place.set({"optimizer.adamw_lr": 0.5, "budget.steps": 3})
        yield


@contextmanager
def _somebodys_work(place: Place) -> Iterator[None]:
    place.write("thesis/chapter.tex", "years of work\n")
    yield


@contextmanager
def _linked(place: Place) -> Iterator[None]:
    """`runs/mine` is a link to a folder of the user's."""
    place.write("thesis/chapter.tex", "years of work\n")
    place.path("runs").mkdir()
    place.path(_RUN).symlink_to(place.path("thesis"))
    yield


@contextmanager
def _taken_name(place: Place) -> Iterator[None]:
    place.write("mine/notes.txt", "mine\n")
    yield


def _resume(*more: str) -> tuple[str, ...]:
    return ("resume", _RUN, *more)


_LIVE = ("runs", "mine.py", "__pycache__", "job.toml")  # what a run that is under way writes

MISTAKES = (
    Mistake("resume: nothing there", ("runs/mine",), argv=_resume()),
    Mistake(
        "resume: a directory that is no run", ("model", "job.json|run"), argv=("resume", "model")
    ),
    Mistake(
        "resume: job.json is missing", ("job.json",), argv=_resume(), prepare=_without("job.json")
    ),
    Mistake(
        "resume: a finished run", ("finished", "budget.steps"), argv=_resume(), prepare=finished
    ),
    Mistake(
        "resume: a key that may not change",
        (r"model\.path", "resume|run"),
        argv=_resume("--set", "model.path=other"),
        prepare=finished,
    ),
    Mistake(
        "resume: a run that is under way",
        ("runs/mine", "runs|under way|already"),
        argv=_resume(),
        prepare=_live,
        changes=_LIVE,
    ),
    Mistake(
        "resume: an edited job file",
        (r"job\.toml", r"optimizer\.adamw_lr"),
        running=True,
        ends=False,
        argv=_resume("--set", "budget.steps=4"),
        prepare=_edited,
        changes=("runs",),
    ),
    Mistake(
        "run: into a directory that holds a run",
        (_RUN, "resume|--force"),
        argv=("run", "job.toml", "--set", f"out={_RUN}"),
        prepare=finished,
    ),
    Mistake(
        "run: --force on a run that is under way",
        (_RUN, "runs|under way|already"),
        argv=("run", "job.toml", "--force", "--set", f"out={_RUN}"),
        prepare=_live,
        changes=_LIVE,
    ),
    Mistake(
        "run: --force on a directory that is no run",
        ("thesis", "run"),
        argv=("run", "job.toml", "--force", "--set", "out=thesis"),
        prepare=_somebodys_work,
    ),
    Mistake(
        "run: --force on the working directory",
        ("working directory", "out"),
        argv=("run", "job.toml", "--force", "--set", "out=."),
    ),
    Mistake(
        "run: --force on a link",
        ("runs/mine|thesis",),
        argv=("run", "job.toml", "--force", "--set", f"out={_RUN}"),
        prepare=_linked,
    ),
    Mistake(
        "run: --force with a job that cannot run",
        (r"rollout\.stop",),
        argv=("run", "job.toml", "--force", "--set", f"out={_RUN}", "--set", 'rollout.stop=["@"]'),
        prepare=finished,
    ),
    Mistake("submit: no mesh", ("meshrl up",), argv=("submit", "job.toml", "--mesh", "nowhere")),
    Mistake(
        "status: no mesh",
        ("neither a run nor a mesh", "nowhere"),
        argv=("status", "--mesh", "nowhere"),
    ),
    Mistake("audit: nothing there", ("runs/mine",), argv=("audit", _RUN)),
    Mistake("export: nothing there", ("runs/mine",), argv=("export", _RUN)),
    Mistake(
        "export: a step that is not kept",
        ("step", "77"),
        argv=("export", _RUN, "--step", "77"),
        prepare=finished,
    ),
    Mistake("samples: nothing there", ("runs/mine",), argv=("samples", _RUN)),
    Mistake(
        "samples: a step that there is not",
        ("step", "77"),
        argv=("samples", _RUN, "--step", "77"),
        prepare=finished,
    ),
    Mistake("logs: nothing there", ("nowhere",), argv=("logs", "--mesh", "nowhere")),
    Mistake("watch: nothing there", ("runs/mine",), argv=("watch", _RUN)),
    Mistake("wait: nothing there", ("runs/mine",), argv=("wait", _RUN)),
    Mistake("cancel: nothing there", ("runs/mine",), argv=("cancel", _RUN)),
    Mistake(
        "cancel: a run that has finished", ("finished",), argv=("cancel", _RUN), prepare=finished
    ),
    Mistake(
        "chat: a directory without a model",
        ("thesis", "run|model|config.json"),
        argv=("chat", "thesis", "--prompt", "1+1="),
        prepare=_somebodys_work,
    ),
    Mistake(
        "eval: a directory without a model",
        ("thesis", "config.json"),
        argv=("eval", "thesis", "job.toml"),
        prepare=_somebodys_work,
    ),
    Mistake(
        "init: a directory that is there", ("mine",), argv=("init", "mine"), prepare=_taken_name
    ),
    Mistake("move: a role that is none", ("rollut", "rollout"), argv=("move", "g0", "rollut")),
)
