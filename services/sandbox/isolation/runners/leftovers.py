"""What containers of a killed sandbox leave: found by name, and ended.

A sandbox has a directory for its containers, named by its process; they have its name in their
environment, and their own directories in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.base.clock import Clock
from common.mesh.process.handle import start_time
from services.sandbox.isolation.runners import usage

PREFIX = "meshrl-runner-"
MARK = "MESHRL_RUNNER"  # in the environment of what a runner starts: the container's name
DELETE = "delete.json"  # in a container's directory: what removes what its runtime keeps of it
DELETE_S = 20.0  # for that
ROOT = "root"  # what bundles of a sandbox share
SETTLE_S, SETTLE_LOOK_S = 30.0, 0.02  # for bridges to end their containers


def folder() -> Path:
    """A new one, of this process."""
    own = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own}-{start_time(own)}-"))


async def settled(clock: Clock, place: Path) -> None:
    """Waits until the containers of a folder have ended, and removes it."""
    until = clock.monotonic() + SETTLE_S
    while clock.monotonic() < until and set(os.listdir(place)) - {ROOT}:
        await clock.sleep(SETTLE_LOOK_S)
    kill(place.name)
    shutil.rmtree(place, ignore_errors=True)


def sweep() -> None:
    """Ends what sandboxes have left that are gone. Blocks while runtimes delete containers."""
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid, _, rest = place.name.removeprefix(PREFIX).partition("-")
        started = rest.partition("-")[0]
        if not (pid.isdigit() and started.isdigit()) or start_time(int(pid)) == int(started):
            continue
        kill(place.name)
        if not place.is_dir() or place.stat().st_uid != os.getuid():
            continue  # scratch of a container, or of another user
        for container in place.iterdir():
            delete(container)
        shutil.rmtree(place, ignore_errors=True)


def kill(name: str) -> None:
    """All processes that carry the name of a folder in their environment."""
    mark = f"{MARK}={name}-".encode()
    for pid in [int(text) for text in os.listdir("/proc") if text.isdigit()]:
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes():
                usage.kill([pid])


def delete(place: Path) -> None:
    """Has its runtime remove what it keeps of the container of that directory."""
    try:
        command = json.loads((place / DELETE).read_text())
    except (OSError, ValueError):
        return
    if not command:
        return
    try:
        subprocess.run(
            command,
            timeout=DELETE_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"a container is left: {error}")


def environment() -> dict[str, str]:
    """What a runner is given of ours."""
    usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": os.environ.get("PATH", usual)}
