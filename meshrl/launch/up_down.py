"""`meshrl up` and `meshrl down`: start a mesh in the background, and stop it."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

from meshrl.common.base.errors import ConfigError
from meshrl.common.base.host.ports import ANY, ports
from meshrl.common.base.host.settings import OFF
from meshrl.common.job.constraints import FileTable
from meshrl.common.job.schema import Schema
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.directory import places, user
from meshrl.directory.places import MeshPlace, find_mesh, running_launcher
from meshrl.job.checks.machine import devices
from meshrl.job.toml import reading
from meshrl.launch import background, ending
from meshrl.launch.background import RootProgram
from meshrl.launch.checks import addresses, redis_server
from meshrl.launch.console import console
from meshrl.launch.foreground import point_to
from meshrl.launch.head import from_copy, handed_out, invitations
from meshrl.launch.head.launcher import serve
from meshrl.launch.head.shape import MeshShape
from meshrl.launch.holding import DirectoryHeld
from meshrl.launch.services import plan


@dataclass(frozen=True)
class DurableConfig(FileTable):
    """Where a copy is kept of what another host goes on from when this one is gone."""

    url: str = ""  # of any kind that fsspec knows; empty: there is none


@dataclass(frozen=True)
class MeshFile(FileTable):
    """A whole `mesh.toml`, checked."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    durable: DurableConfig = field(default_factory=DurableConfig)


MESH = Schema(MeshFile, "docs/operations.md lists all keys of mesh.toml")


def read(path: Path) -> MeshFile:
    """What a file says; ConfigError names the line that is wrong."""
    document, places = reading.read(path, "the file of the mesh")

    def fail(key: str, message: str, fix: str) -> ConfigError:
        return reading.mistake(path, places, key, message, fix)

    return MESH.validated(document, fail)


NEAR = "tcp://127.0.0.1:*"  # the gateway of a mesh of one host
INVITATION = "join.token"  # in the mesh's directory
INVITATION_S = 86_400.0
LATER_S = 7 * 86_400.0  # that a queue of a cluster, or who adds hosts, may take
LAUNCHER = "launcher"  # the name of its log
PROGRAM = RootProgram(
    "meshrl.launch.head.launcher", LAUNCHER, 90.0, "the mesh did not start", "the mesh is not ready"
)


@dataclass(frozen=True)
class UpOptions:
    """Options of `meshrl up` beside the shape of the mesh."""

    config: Path | None = None
    gateway: str | None = None  # where it listens; None: as hosts that may join need it
    resume: str = ""  # URL of the durable copy of a mesh that is gone, whose jobs go on here
    health: str = ""  # HOST:PORT, where it answers for this host as a whole; empty: nowhere
    foreground: bool = False  # it runs in this process, until that is told to end
    secrets: Path | None = None  # a file of those that it takes over, whose tokens are handed out


def up(root: Path | None, wanted: MeshShape, options: UpOptions) -> int:
    """Start a mesh; the exit status. `wanted.listen`: HOST[:LOW-HIGH], by which hosts that may join
    reach this one; empty: none may.
    """
    place = MeshPlace((root or places.home()).absolute())
    user.settle(place.home)
    if options.foreground:
        console.begin(place, LAUNCHER)
    shape = _reached(wanted, options.gateway)
    told = read(options.config) if options.config is not None else None
    shape = replace(shape, workers=_startable(shape))
    pool = told.pool if told is not None else pool_without_file(shape.workers)
    if running_launcher(place):
        raise DirectoryHeld(f"a mesh runs in {place.root} already", fix="`meshrl down` stops it")
    if shape.listen:
        addresses.room(shape.listen, plan.ports_of_head(shape.workers))
    place.logs.mkdir(parents=True, exist_ok=True)
    if options.secrets is not None:
        handed_out.take(place, options.secrets)
    if options.resume:
        for run_dir in from_copy.bring(options.resume, place):
            print(f"brought {places.shown(run_dir)}", flush=True)
    elif told is not None:
        from_copy.keep(told.durable.url, place)
    invites = bool(shape.listen) and options.secrets is None
    if options.foreground:
        return _stays(place, shape, pool, options.health, invites)
    documents = (json.dumps(asdict(of)) for of in (shape, pool))
    words = zip(("--shape", "--pool", "--health"), (*documents, options.health), strict=True)
    pid = background.start(PROGRAM, place, *chain.from_iterable(words))
    places.point_to(place)
    print(f"{_called(shape.workers)} runs (pid {pid}); `meshrl down` stops it")
    if invites:
        invite(place)
    return 0


def pool_without_file(workers: int) -> PoolSettings:
    """The settings of a mesh whose head has so many workers, where no file says others. Of a head
    without any all come from elsewhere, later, and may all go again: a job waits for them.
    """
    return PoolSettings() if workers else PoolSettings(short_s=LATER_S)


def _called(workers: int) -> str:
    return f"a mesh of {workers} workers" if workers else "a mesh without workers of its own"


def _stays(
    place: MeshPlace, shape: MeshShape, pool: PoolSettings, health: str, invites: bool
) -> int:
    """The mesh in this process, until it is told to end; the exit status."""

    def ready() -> None:
        point_to(place)
        print(f"{_called(shape.workers)} runs (pid {os.getpid()})", flush=True)
        if invites:
            invite(place)

    return asyncio.run(serve(place.root, shape, pool, health, ready))


def _reached(shape: MeshShape, gateway: str | None) -> MeshShape:
    """The shape with where its processes and its gateway listen, for this host and for others."""
    if shape.listen:
        listen = addresses.reachable(shape.listen, shape.advertise)
        shape = replace(shape, listen=listen, bind=listen)
    if gateway is None:
        gateway = last_port(shape.listen) if shape.listen else NEAR
    if shape.listen and gateway == OFF:
        raise ConfigError("hosts join at the gateway", where="--gateway", fix="Leave --gateway out")
    return replace(shape, gateway=gateway)


def _startable(shape: MeshShape) -> int:
    """The number of workers, once this host has all that they need; an error says what it lacks."""
    addresses.listens(shape.bind)
    if shape.gateway != OFF:
        addresses.listens(shape.gateway, processes=1)
    gpus = devices.usable(shape.device, shape.workers)
    workers = shape.workers or len(gpus)
    services = plan.services(workers, shape.device, "")
    endpoints = len(services) + int(shape.gateway != OFF) + 2 * workers
    addresses.serves(shape.metrics, endpoints)
    redis_server.usable(shape.listen)
    return workers


def last_port(listen: str) -> str:
    """Where the gateway of hosts that join listens: tokens name its port, so it has one that no
    other process takes first.
    """
    host, among = ports(listen, "--listen")
    return listen if among == ANY else f"tcp://{host}:{among[-1]}"


def invite(place: MeshPlace) -> None:
    """Writes a new token, which lets in one host, and says what to do with it."""
    path = place.directory / INVITATION
    path.unlink(missing_ok=True)
    invitations.write(invitations.for_host(place, None, INVITATION_S), path)
    print(f"{path} lets in one host, within a day: copy it there, it is a secret, and")
    print(f"    meshrl join {path.name}")
    print("`meshrl token create --host` makes more, `meshrl hosts` shows who has come")


def down(mesh: Path | None) -> None:
    place = find_mesh(mesh)
    pid, left = ending.end(place)
    if left:
        print(f"ended {len(left)} processes that had been left behind")
    print("stopped" if pid or left else f"no mesh runs in {place.root}")
