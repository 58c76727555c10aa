"""`meshrl up` and `meshrl down`: start a mesh in the background, and stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.errors import DeadlineExceeded, MeshError, Refused
from meshrl import logs
from meshrl.launch import leftovers, places, plan
from meshrl.launch.liveness import running_launcher
from meshrl.launch.places import MeshPlace, find_mesh, read_if_whole
from meshrl.preflight import addresses, devices, redis_server

START_S = 90.0
STOP_S = 60.0
POLL_S = 0.1


def up(
    root: Path | None,
    workers: int,
    shards: int,
    device: str,
    bind: str,
    advertise: str,
    metrics: str,
    ranks: int,
    sandboxes: int,
) -> None:
    addresses.listens(bind)
    services = plan.services(workers, shards, device, "", ranks, sandboxes)
    addresses.serves(metrics, len(services) + 2 * workers)
    devices.usable(device)
    redis_server.usable()
    place = MeshPlace((root or places.home()).absolute())
    if running_launcher(place):
        raise Refused(f"a mesh runs in {place.root} already", fix="`meshrl down` stops it")
    place.logs.mkdir(parents=True, exist_ok=True)
    log = place.log("launcher")
    with log.open("a") as output:
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshrl.launch.launcher", "--root", str(place.root)),
                *("--workers", str(workers), "--shards", str(shards)),
                *("--device", device, "--bind", bind, "--advertise", advertise),
                *("--metrics", metrics, "--ranks", str(ranks), "--sandboxes", str(sandboxes)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    until = time.monotonic() + START_S
    while not _ready(place, launcher.pid):
        if launcher.poll() is not None:
            said = "\n".join(logs.tail(log, 5))
            raise MeshError(f"the mesh did not start:\n{said}", fix=f"The log is {log}")
        if time.monotonic() > until:
            raise DeadlineExceeded(f"the mesh is not ready after {START_S:g} s", where=str(log))
        time.sleep(POLL_S)
    places.point_to(place)
    print(f"a mesh of {workers} workers runs (pid {launcher.pid}); `meshrl down` stops it")


def down(mesh: Path | None) -> None:
    place = find_mesh(mesh)
    pid = running_launcher(place)
    if pid:
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while running_launcher(place) and time.monotonic() < until:
            time.sleep(POLL_S)
        if running_launcher(place):
            os.kill(pid, signal.SIGKILL)
    left = asyncio.run(leftovers.end_all(place.settings.resolve(), STOP_S))
    if left:
        print(f"ended {len(left)} processes that had been left behind")
    print("stopped" if pid or left else f"no mesh runs in {place.root}")


def _ready(place: MeshPlace, pid: int) -> bool:
    if running_launcher(place) != pid:
        return False
    return bool(read_if_whole(place.launcher).get("ready"))
