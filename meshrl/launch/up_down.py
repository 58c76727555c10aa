"""`meshrl up` and `meshrl down`: start a mesh in the background, and stop it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from common.base.errors import ConfigError, DeadlineExceeded, MeshError
from common.base.host.ports import ANY, ports
from common.base.host.settings import OFF
from common.state.pool.placing.taking import written
from common.state.pool.workers.settings import PoolSettings
from meshrl import logs, tokens
from meshrl.directory import places, user
from meshrl.directory.liveness import running_launcher
from meshrl.directory.places import MeshPlace, find_mesh, read_if_whole
from meshrl.job.checks.machine import devices
from meshrl.launch import ending, mesh_file, plan
from meshrl.launch.checks import addresses, redis_server
from meshrl.launch.console import console
from meshrl.launch.foreground import point_to
from meshrl.launch.head import from_copy, handed_out
from meshrl.launch.head.launcher import MeshShape, serve
from meshrl.launch.holding import DirectoryHeld
from meshrl.launch.roles import HostRole

START_S = 90.0
POLL_S = 0.1
NEAR = "tcp://127.0.0.1:*"  # the gateway of a mesh of one host
INVITATION = "join.token"  # in the mesh's directory
INVITATION_S = 86_400.0
LATER_S = 7 * 86_400.0  # that a queue of a cluster, or who adds hosts, may take
LAUNCHER = "launcher"  # the name of its log


def up(
    root: Path | None,
    role: HostRole,
    bind: str,
    advertise: str,
    metrics: str,
    config: Path | None = None,
    gateway: str | None = None,
    listen: str = "",
    resume: str = "",
    encrypt: bool | None = None,
    health: str = "",
    foreground: bool = False,
    secrets: Path | None = None,
    rates: tuple[int, int] = (0, 0),
) -> int:
    """`listen`: HOST[:LOW-HIGH], by which hosts that may join reach this one; empty: none may.
    `resume`: the URL of the durable copy of a mesh that is gone, whose jobs go on here.
    `encrypt`: bulk bytes, too; None: where other hosts may join.
    `health`: HOST:PORT, where it answers for this host as a whole; empty: nowhere.
    `foreground`: it runs in this process, until that is told to end; the exit status.
    `secrets`: a file with those that it takes over, of which tokens have been handed out already.
    `rates`: bytes a second that this host's processes send and receive at bulk ports; 0: no bound.
    """
    place = MeshPlace((root or places.home()).absolute())
    user.settle(place.home)
    if foreground:
        console.begin(place, LAUNCHER)
    bind, gateway, listen = _reached(bind, gateway, listen, advertise)
    told = mesh_file.read(config) if config is not None else None
    workers = _startable(role, bind, metrics, gateway, listen)
    pool = told.pool if told is not None else pool_without_file(workers)
    if running_launcher(place):
        raise DirectoryHeld(f"a mesh runs in {place.root} already", fix="`meshrl down` stops it")
    if listen:
        addresses.room(listen, plan.ports_of_head(workers))
    place.logs.mkdir(parents=True, exist_ok=True)
    if secrets is not None:
        handed_out.take(place, secrets)
    if resume:
        for run_dir in from_copy.bring(resume, place):
            print(f"brought {places.shown(run_dir)}", flush=True)
    elif told is not None:
        from_copy.keep(told.durable.url, place)
    if foreground:
        reached = (bind, advertise, metrics, gateway, listen)
        shape = MeshShape(workers, role.device, *reached, encrypt, role.takes, *rates)
        return _stays(place, shape, pool, health, invites=bool(listen) and secrets is None)
    launcher = _launched(
        place,
        *("--workers", str(workers)),
        *("--device", role.device, "--services", written(role.takes)),
        *("--bind", bind, "--advertise", advertise),
        *("--metrics", metrics),
        *("--gateway", gateway, "--listen", listen, "--health", health),
        *("--rate-up", str(rates[0]), "--rate-down", str(rates[1])),
        *([] if encrypt is None else ["--encrypt" if encrypt else "--no-encrypt"]),
        *("--pool", json.dumps(asdict(pool))),
    )
    _wait_until_ready(place, launcher)
    places.point_to(place)
    print(f"{_called(workers)} runs (pid {launcher.pid}); `meshrl down` stops it")
    if listen and secrets is None:
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


def _reached(bind: str, gateway: str | None, listen: str, advertise: str) -> tuple[str, str, str]:
    """Where its processes and its gateway listen, for this host's and for those that join."""
    if listen:
        listen = bind = addresses.reachable(listen, advertise)
    if gateway is None:
        gateway = last_port(listen) if listen else NEAR
    if listen and gateway == OFF:
        raise ConfigError("hosts join at the gateway", where="--gateway", fix="Leave --gateway out")
    return bind, gateway, listen


def _startable(role: HostRole, bind: str, metrics: str, gateway: str, listen: str) -> int:
    """The number of workers, once this host has all that they need; an error says what it lacks."""
    addresses.listens(bind)
    if gateway != OFF:
        addresses.listens(gateway, processes=1)
    gpus = devices.usable(role.device, role.workers)
    workers = role.workers or len(gpus)
    services = plan.services(workers, role.device, "")
    addresses.serves(metrics, len(services) + int(gateway != OFF) + 2 * workers)
    redis_server.usable(listen)
    return workers


def _launched(place: MeshPlace, *words: str) -> subprocess.Popen[bytes]:
    """The root process of the mesh, which goes on when this one ends."""
    with place.log(LAUNCHER).open("a") as output:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "meshrl.launch.head.launcher",
                "--root",
                str(place.root),
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _wait_until_ready(place: MeshPlace, launcher: subprocess.Popen[bytes]) -> None:
    """MeshError with the end of its log when it ends before that; DeadlineExceeded."""
    until, log = time.monotonic() + START_S, place.log(LAUNCHER)
    while not _ready(place, launcher.pid):
        if launcher.poll() is not None:
            said = "\n".join(logs.tail(log, 5))
            raise MeshError(f"the mesh did not start:\n{said}", fix=f"The log is {log}")
        if time.monotonic() > until:
            raise DeadlineExceeded(f"the mesh is not ready after {START_S:g} s", where=str(log))
        time.sleep(POLL_S)


def _ready(place: MeshPlace, pid: int) -> bool:
    if running_launcher(place) != pid:
        return False
    return bool(read_if_whole(place.launcher).get("ready"))


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
    tokens.write(tokens.for_host(place, None, INVITATION_S), path)
    print(f"{path} lets in one host, within a day: copy it there, it is a secret, and")
    print(f"    meshrl join {path.name}")
    print("`meshrl token create --host` makes more, `meshrl hosts` shows who has come")


def down(mesh: Path | None) -> None:
    place = find_mesh(mesh)
    pid, left = ending.end(place)
    if left:
        print(f"ended {len(left)} processes that had been left behind")
    print("stopped" if pid or left else f"no mesh runs in {place.root}")
