"""Processes of containers: what they use, and what those of a killed sandbox leave, which is found
by name and ended.

A sandbox has a directory for its containers, named by its process; they have its name in their
environment, and their own directories in it.
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
CONTAINER_ENV = "MESHRL_RUNNER"  # in the environment of what a runner starts: the container's name
DELETE_COMMAND_FILE = (
    "delete.json"  # in a container's directory: what removes what its runtime keeps of it
)
DELETE_TIMEOUT_S = 20.0  # for that
ROOT = "root"  # what bundles of a sandbox share
CONTAINER_EXIT_TIMEOUT_S, CONTAINER_EXIT_POLL_S = 30.0, 0.02  # for bridges to end their containers
TICKS = os.sysconf("SC_CLK_TCK")  # a second


# ---- what its processes use, seen from this host: a kernel inside of a container may lie ---------


@dataclass(frozen=True)
class ContainerUsage:
    cpu_s: float  # of all of them, and of those that they have waited for
    queued_s: float  # that their threads have waited for a core
    memory_bytes: int  # what is shared counts once
    is_runnable: bool = False  # one of them runs or waits for a core


def list_descendants(root_pid: int) -> list[int]:
    """The processes below `root`, itself left out, which adopts those whose parents end."""
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
    """Whether it is there, and not only for its parent to ask how it ended."""
    fields = proc.read_stat(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X")


def read_usage(pids: list[int], with_memory: bool) -> ContainerUsage:
    """Their use together; memory is looked at on demand, as it costs most."""
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
        with contextlib.suppress(OSError):  # it has ended, or is not ours to end
            os.kill(pid, signal.SIGKILL)


# ---- what is left --------------------------------------------------------------------------------


def create_directory() -> Path:
    """A new one, of this process."""
    own = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{own}-{read_start_time(own)}-"))


async def wait_and_remove(clock: Clock, directory: Path) -> None:
    """Waits until the containers of a folder have ended, and removes it."""
    until = clock.monotonic() + CONTAINER_EXIT_TIMEOUT_S
    while clock.monotonic() < until and set(os.listdir(directory)) - {ROOT}:
        await clock.sleep(CONTAINER_EXIT_POLL_S)
    kill_marked(directory.name)
    shutil.rmtree(directory, ignore_errors=True)


def remove_stale() -> None:
    """Ends what sandboxes have left that are gone. Blocks while runtimes delete containers."""
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
    """All processes that carry the name of a folder in their environment."""
    mark = f"{CONTAINER_ENV}={name}-".encode()
    for pid in [int(text) for text in os.listdir("/proc") if text.isdigit()]:
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes():
                kill_all([pid])


def delete_container(directory: Path) -> None:
    """Has its runtime remove what it keeps of the container of that directory."""
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
        print(f"a container is left: {error}")


def runner_environment() -> dict[str, str]:
    """What a runner is given of ours."""
    usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": os.environ.get("PATH", usual)}
