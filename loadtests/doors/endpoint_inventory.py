"""Inventory of a mesh's open endpoints as root sees it: processes, listeners, files."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from loadtests.doors.plan import Plan, Port, Process
from loadtests.measuring.meshed import living
from meshrl.common.base.host.settings import MeshSettings
from meshrl.directory.directory_paths import MeshPaths, find_root_pid
from meshrl.launch.leftover_processes import find_leftovers

SHARED = ("/dev/shm/", "/tmp/", "/var/tmp/")  # world-writable directories
CODE = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))  # open, at any path


async def plan_of(place: MeshPaths, settings: MeshSettings) -> Plan:
    entries = await living(settings.redis_url)
    launcher = psutil.Process(find_root_pid(place))
    below = {child.pid for child in launcher.children(recursive=True)}
    pids = {launcher.pid, *below, *find_leftovers(place.settings.resolve())} - {os.getpid()}
    plan = Plan(pids={pid: named(pid) for pid in sorted(pids)})
    served = {urlsplit(settings.redis_url).port or -1: ("redis", "the mesh")}
    for entry in entries:
        plan.processes.append(Process(entry.name, entry.address, entry.incarnation))
        for serves in ("calls", "bulk", "metrics"):
            address = getattr(entry, "address" if serves == "calls" else serves)
            served[port_in(address)] = serves, entry.name
    for pid in plan.pids:
        for connection in connections(pid):
            if connection.family.name == "AF_UNIX":
                if str(connection.laddr).startswith("@"):
                    plan.sockets.append(str(connection.laddr))
            elif connection.status == psutil.CONN_LISTEN:
                host, port = connection.laddr
                about = served.get(port, ("", f"pid {pid}: {named(pid)}"))
                plan.ports.append(Port(host, port, *about))
    opened = {path for pid in plan.pids for path in shared_files(pid)}
    for path in [place.root, *sorted(place.root.rglob("*")), *sorted(opened)]:
        with contextlib.suppress(FileNotFoundError):
            is_socket = stat.S_ISSOCK(path.lstat().st_mode)
            (plan.sockets if is_socket else plan.files).append(str(path))
    plan.sockets = sorted(set(plan.sockets))
    return plan


def port_in(address: str) -> int:
    """Return the TCP port of an address of the registry; -1 if it has none."""
    port = address.partition("#")[0].rpartition(":")[2]
    return int(port) if port.isdigit() else -1


def connections(pid: int) -> list[Any]:
    try:
        return list(psutil.Process(pid).net_connections("all"))
    except psutil.NoSuchProcess:
        return []


def named(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[-80:]
    except psutil.NoSuchProcess:
        return "ended"


def shared_files(pid: int) -> Iterator[Path]:
    """Return the files that it has open or mapped in world-writable directories."""
    for folder in ("fd", "map_files"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for name in os.listdir(f"/proc/{pid}/{folder}"):
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(f"/proc/{pid}/{folder}/{name}")
                    code = target.startswith(CODE)
                    if target.startswith(SHARED) and not code and os.path.exists(target):
                        yield Path(target)
