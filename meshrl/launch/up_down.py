"""`meshrl up` and `meshrl down`: start a mesh in the background, and stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

from meshrl.common.base.errors import ConfigError, MeshError
from meshrl.common.base.host.listen_addresses import EPHEMERAL_PORTS, parse_listen_address
from meshrl.common.base.host.settings import METRICS_OFF
from meshrl.common.job.constraints import ConfigTable
from meshrl.common.job.renamed_keys import RENAMED_POOL_KEYS
from meshrl.common.job.schema import Schema
from meshrl.common.state.jobs import JobRow, read_jobs
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory import directory_paths, process_user
from meshrl.directory.directory_paths import MeshPaths, find_mesh, find_root_pid
from meshrl.directory.job_file import JOB_FILE_NAME
from meshrl.directory.mesh_query import query_mesh
from meshrl.job.checks.host import devices
from meshrl.job.toml import reader
from meshrl.launch import root_program, shutdown
from meshrl.launch.checks import address_checks, budget_checks, redis_checks
from meshrl.launch.checks.scaler_checks import find_scaler_problem
from meshrl.launch.console import log_printer
from meshrl.launch.directory_lock import DirectoryLocked
from meshrl.launch.foreground import set_current_mesh
from meshrl.launch.head import durable_restore, head_secrets, host_tokens
from meshrl.launch.head.launcher import serve_mesh
from meshrl.launch.head.mesh_shape import MeshShape
from meshrl.launch.root_program import RootProgram
from meshrl.launch.services import service_plan


@dataclass(frozen=True)
class DurableConfig(ConfigTable):
    """Location of the copy from which another host resumes when this one is lost."""

    url: str = ""  # of any kind that fsspec knows; empty: there is none


@dataclass(frozen=True)
class MeshFile(ConfigTable):
    """Complete `mesh.toml`, checked."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    durable: DurableConfig = field(default_factory=DurableConfig)


MESH_SCHEMA = Schema(
    MeshFile, "docs/operate/mesh.md lists all keys of mesh.toml", RENAMED_POOL_KEYS
)


def read_mesh_file(path: Path) -> MeshFile:
    """Read and check a file of a mesh. Raises ConfigError that names the wrong line."""
    document, places = reader.read_toml(path, "the mesh file")

    def fail(key: str, message: str, fix: str) -> ConfigError:
        return reader.make_error(path, places, key, message, fix)

    for notice in MESH_SCHEMA.describe_old_keys(document):
        print(f"{path}: {notice}", file=sys.stderr)
    found = MESH_SCHEMA.validate(document, fail)
    if (problem := find_scaler_problem(found.pool)) is not None:
        key = f"pool.scaler.{problem.key}"
        raise fail(key, f"{key} {problem.message}", problem.fix)
    return found


LOCAL_GATEWAY = "tcp://127.0.0.1:*"  # the gateway of a mesh of one host
JOIN_TOKEN_FILE = "join.token"  # in the mesh's directory
JOIN_TOKEN_LIFETIME_S = 86_400.0
REMOTE_WORKERS_WAIT_S = 7 * 86_400.0  # for a cluster's queue, or a user who adds hosts
JOBS_TIMEOUT_S = 3.0  # for the jobs of a mesh that is to be stopped
LAUNCHER_LOG = "launcher"  # the name of its log
LAUNCHER_PROGRAM = RootProgram(
    "meshrl.launch.head.launcher",
    LAUNCHER_LOG,
    90.0,
    "the mesh did not start",
    "the mesh is not ready",
)


@dataclass(frozen=True)
class UpOptions:
    """Options of `meshrl up` beside the shape of the mesh."""

    config_file: Path | None = None
    gateway: str | None = None  # its listen address; None: as joining hosts need it
    resume_url: str = ""  # URL of the durable copy of a mesh that is gone, whose jobs go on here
    health_address: str = ""  # HOST:PORT, where it answers for this host as a whole; empty: nowhere
    foreground: bool = False  # it runs in this process, until the stop order
    secrets_file: Path | None = None  # file of secrets to take over, whose tokens are handed out


def up(root: Path | None, requested: MeshShape, options: UpOptions) -> int:
    """Start a mesh and return the exit status.

    `requested.listen`: HOST[:LOW-HIGH], by which joining hosts reach this one; empty: none may
    join.
    """
    place = MeshPaths((root or directory_paths.find_mesh_home()).absolute())
    process_user.ensure_home(place.process_home)
    if options.foreground:
        log_printer.start_printing(place, LAUNCHER_LOG)
    shape = _resolve_addresses(requested, options.gateway)
    mesh_file = read_mesh_file(options.config_file) if options.config_file is not None else None
    shape = replace(shape, workers=_check_startable(shape))
    pool = mesh_file.pool if mesh_file is not None else make_default_pool(shape.workers)
    if pool.scaler.is_on and not (shape.listen or pool.scaler.dry_run):
        raise ConfigError(
            "spot hosts cannot join this head",
            where="pool.scaler",
            fix="Add --listen HOST:LOW-HIGH, or set pool.scaler.dry_run",
        )
    if find_root_pid(place):
        raise DirectoryLocked(
            f"a mesh already runs in {place.root}",
            fix=f"Run `meshrl down --mesh {place.root}` to stop it",
        )
    if shape.listen:
        address_checks.require_free_ports(
            shape.listen, service_plan.count_head_ports(shape.workers)
        )
    place.logs.mkdir(parents=True, exist_ok=True)
    if options.secrets_file is not None:
        head_secrets.install_head_secrets(place, options.secrets_file)
    if options.resume_url:
        for run_dir in durable_restore.fetch_runs(options.resume_url, place):
            print(f"fetched {directory_paths.format_path(run_dir)}", flush=True)
    elif mesh_file is not None:
        durable_restore.configure_durable_copy(mesh_file.durable.url, place)
    invites = bool(shape.listen) and options.secrets_file is None
    if options.foreground:
        return _run_in_foreground(place, shape, pool, options.health_address, invites)
    documents = (json.dumps(asdict(of)) for of in (shape, pool))
    words = zip(
        ("--shape", "--pool", "--health"), (*documents, options.health_address), strict=True
    )
    pid = root_program.start_in_background(LAUNCHER_PROGRAM, place, *chain.from_iterable(words))
    directory_paths.set_current_mesh(place)
    print(f"{_describe_mesh(shape.workers)} runs (pid {pid}); run `meshrl down` to stop it")
    if invites:
        write_join_token(place)
    return 0


def make_default_pool(workers: int) -> PoolSettings:
    """Return the pool settings of a mesh whose head has so many workers, where no file sets others.

    Of a head without workers all come from elsewhere, later, and may all leave: a job waits for
    them.
    """
    return PoolSettings() if workers else PoolSettings(shortage_grace_s=REMOTE_WORKERS_WAIT_S)


def _describe_mesh(workers: int) -> str:
    if not workers:
        return "a mesh without local workers"
    return f"a mesh of {workers} worker{'s' * (workers > 1)}"


def _run_in_foreground(
    mesh_paths: MeshPaths,
    shape: MeshShape,
    pool: PoolSettings,
    health_address: str,
    writes_token: bool,
) -> int:
    """Run the mesh in this process until its stop order; return the exit status."""

    def ready() -> None:
        set_current_mesh(mesh_paths)
        print(f"{_describe_mesh(shape.workers)} runs (pid {os.getpid()})", flush=True)
        if writes_token:
            write_join_token(mesh_paths)

    return asyncio.run(serve_mesh(mesh_paths.root, shape, pool, health_address, ready))


def _resolve_addresses(shape: MeshShape, gateway: str | None) -> MeshShape:
    """Return the shape with the addresses of its processes and its gateway, for this host and
    others.
    """
    if shape.listen:
        listen = address_checks.resolve_listen_endpoint(shape.listen, shape.advertise)
        shape = replace(shape, listen=listen, bind=listen)
    if gateway is None:
        gateway = choose_gateway_endpoint(shape.listen) if shape.listen else LOCAL_GATEWAY
    if shape.listen and gateway == METRICS_OFF:
        raise ConfigError(
            "joining hosts need the gateway", where="--gateway", fix="Remove --gateway"
        )
    return replace(shape, gateway=gateway)


def _check_startable(shape: MeshShape) -> int:
    """Return the number of workers, once this host has all that they need; else raise an error."""
    address_checks.require_bindable_endpoint(shape.bind)
    if shape.gateway != METRICS_OFF:
        address_checks.require_bindable_endpoint(shape.gateway, process_count=1)
    gpus = devices.find_usable_devices(shape.device, shape.workers)
    workers = shape.workers or len(gpus)
    services = service_plan.plan_services(workers, shape.device, "")
    endpoints = len(services) + int(shape.gateway != METRICS_OFF) + 2 * workers
    address_checks.require_metrics_ports(shape.metrics, endpoints)
    redis_checks.require_usable_redis(shape.listen)
    budget_checks.require_valid_budgets()
    return workers


def choose_gateway_endpoint(listen: str) -> str:
    """Return the endpoint of the gateway for joining hosts.

    Tokens name its port, so the port is one that no other process takes first.
    """
    host, among = parse_listen_address(listen, "--listen")
    return listen if among == EPHEMERAL_PORTS else f"tcp://{host}:{among[-1]}"


def write_join_token(mesh_paths: MeshPaths) -> None:
    """Write a new token, which admits one host, and print how to use it."""
    path = mesh_paths.directory / JOIN_TOKEN_FILE
    path.unlink(missing_ok=True)
    host_tokens.write_token(
        host_tokens.create_host_token(mesh_paths, None, JOIN_TOKEN_LIFETIME_S), path
    )
    print(f"{path} is a secret that admits one host within a day. Copy it to that host and run")
    print(f"    meshrl join {path.name}")
    print("`meshrl token create --host` makes more tokens, `meshrl hosts` lists joined hosts")


def down(mesh: Path | None) -> None:
    """Stop a mesh; print the jobs that it has not ended, and how they continue."""
    place = find_mesh(mesh)
    unfinished = _read_unfinished_jobs(place)
    pid, leftovers = shutdown.stop_root_process(place)
    if leftovers:
        print(f"killed {len(leftovers)} leftover processes")
    shown = directory_paths.format_path(place.root)
    print("stopped" if pid or leftovers else f"no mesh runs in {shown}")
    for line in format_stopped_jobs(place, unfinished):
        print(line)


def _read_unfinished_jobs(mesh_paths: MeshPaths) -> list[JobRow]:
    """Return the jobs that a mesh has not ended; none if it does not run or answer."""
    if not find_root_pid(mesh_paths):
        return []
    with contextlib.suppress(MeshError):  # also on a joined host: the head has the jobs
        rows = query_mesh(mesh_paths, read_jobs, JOBS_TIMEOUT_S)
        return [row for row in rows if not row.is_terminal]
    return []


def format_stopped_jobs(mesh_paths: MeshPaths, rows: Sequence[JobRow]) -> list[str]:
    """Return a line for each job that a stopped mesh has not ended, and how to continue."""
    lines = [
        f"{row.id} was stopped at step {row.steps_done} of {row.document['budget']['steps']}"
        for row in rows
    ]
    root = mesh_paths.root
    if rows and (root / JOB_FILE_NAME).is_file():
        lines.append(f"To resume: meshrl resume {directory_paths.format_path(root)}")
    elif rows:
        is_default = root == directory_paths.find_mesh_home().absolute()
        option = "" if is_default else f" --root {directory_paths.format_path(root)}"
        lines.append(f"To continue all of them: meshrl up{option}, with the options of its start")
        one = directory_paths.format_path(Path(rows[0].run_dir))
        lines.append(f"To continue one of them: meshrl resume {one}")
    return lines
