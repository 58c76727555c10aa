"""Processes of containers: their resource usage, and removal of those of killed sandboxes.

A sandbox has a directory for its containers, named by its process. The processes have the name in
their environment, and their own directories in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.base.clock import Clock
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.services.sandbox.jail.metering import proc

PREFIX = "meshrl-runner-"
CONTAINER_ENV = "MESHRL_RUNNER"  # in the environment of a runner's processes: the container's name
DELETE_COMMAND_FILE = (
    "delete.json"  # in a container's directory: the command that removes its runtime's state
)
DELETE_TIMEOUT_S = 20.0  # for that
ROOT = "root"  # shared by the bundles of a sandbox
CONTAINER_EXIT_TIMEOUT_S, CONTAINER_EXIT_POLL_S = 30.0, 0.02  # for bridges to end their containers
TICKS = os.sysconf("SC_CLK_TCK")  # ticks a second


# ---- usage of its processes, seen from this host: a kernel inside of a container may lie ---------


@dataclass(frozen=True)
class ContainerUsage:
    cpu_s: float  # of all of them, and of their reaped children
    queued_s: float  # that their threads have waited for a core
    memory_bytes: int  # shared memory counts once
    is_runnable: bool = False  # one of them runs or waits for a core


def list_descendants(root_pid: int) -> list[int]:
    """Return the descendants of `root_pid`, itself excluded, which adopts orphans."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := proc.read_stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = children.get(root_pid, [])
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    fields = proc.read_stat(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def read_usage(pids: list[int], with_memory: bool) -> ContainerUsage:
    """Return the total usage of processes; memory only on request, as it costs most."""
    ticks, queued_s, size, runnable = 0, 0.0, 0, False
    for pid in pids:
        if fields := proc.read_stat(pid):
            ticks += sum(map(int, fields[11:15]))
            with contextlib.suppress(OSError):
                threads = os.listdir(f"/proc/{pid}/task")
                queued_s += sum(
                    proc.read_schedstat_s(f"{pid}/task/{thread}")[1] for thread in threads
                )
            runnable = runnable or fields[0] == b"R"
            size += proc.read_pss_bytes(pid) if with_memory else 0
    return ContainerUsage(ticks / TICKS, queued_s, size, runnable)


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or may not be killed by us
            os.kill(pid, signal.SIGKILL)


# ---- remains -------------------------------------------------------------------------------------


def create_directory() -> Path:
    """Create a directory for the containers of this process."""
    own = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own}-{read_start_time(own)}-"))


async def wait_and_remove(clock: Clock, directory: Path) -> None:
    """Wait until the containers of a folder have ended, and remove it."""
    until = clock.monotonic() + CONTAINER_EXIT_TIMEOUT_S
    while clock.monotonic() < until and set(os.listdir(directory)) - {ROOT}:
        await clock.sleep(CONTAINER_EXIT_POLL_S)
    kill_marked(directory.name)
    shutil.rmtree(directory, ignore_errors=True)


def remove_stale() -> None:
    """End the containers of sandboxes that are gone. Blocks while runtimes delete containers."""
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid, _, rest = place.name.removeprefix(PREFIX).partition("-")
        started = rest.partition("-")[0]
        if not (pid.isdigit() and started.isdigit()) or read_start_time(int(pid)) == int(started):
            continue
        kill_marked(place.name)
        if not place.is_dir() or place.stat().st_uid != os.getuid():
            continue  # scratch of a container, or of another user
        for container in place.iterdir():
            delete_container(container)
        shutil.rmtree(place, ignore_errors=True)


def kill_marked(name: str) -> None:
    """Kill all processes with the name of a folder in their environment."""
    mark = f"{CONTAINER_ENV}={name}-".encode()
    for pid in [int(text) for text in os.listdir("/proc") if text.isdigit()]:
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes():
                kill_all([pid])


def delete_container(directory: Path) -> None:
    """Make the runtime remove its state of the container of that directory."""
    command = None
    with contextlib.suppress(OSError, ValueError):
        command = json.loads((directory / DELETE_COMMAND_FILE).read_text())
    if not command:
        return
    try:
        subprocess.run(
            command,
            timeout=DELETE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=runner_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"a container could not be removed: {error}")


def runner_environment() -> dict[str, str]:
    """Return the environment variables that a runner gets."""
    usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": os.environ.get("PATH", usual)}
