"""For each alert what makes it fire on a real mesh, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from loadtests.monitoring.mesh import WatchedMesh, send

FULL = 0.01  # of a disk that is left of one that is full

Play = Callable[[WatchedMesh], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Scene:
    """What is done, and the alerts that fire by it; they clear once it is undone."""

    alerts: tuple[str, ...]
    what: str
    play: Play
    mounted: bool = False  # it takes the right to mount a volume


def _stopped(*kinds: str) -> Play:
    return lambda mesh: mesh.hunted(signal.SIGSTOP, *kinds)


def _job(name: str, **changes: object) -> Play:
    @contextlib.asynccontextmanager
    async def play(mesh: WatchedMesh) -> AsyncIterator[None]:
        await mesh.submit(name, **changes)
        try:
            yield
        finally:
            await mesh.remove(name)

    return play


@contextlib.asynccontextmanager
async def _process_stopped(pid: int) -> AsyncIterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


def _head_stopped(mesh: WatchedMesh) -> contextlib.AbstractAsyncContextManager[None]:
    return _process_stopped(mesh.root_process(mesh.head))


def _redis_stopped(mesh: WatchedMesh) -> contextlib.AbstractAsyncContextManager[None]:
    """The launcher starts another in its place after eight seconds."""
    return _process_stopped(mesh.redis())


@contextlib.asynccontextmanager
async def _host_killed(mesh: WatchedMesh) -> AsyncIterator[None]:
    send(mesh.root_process(mesh.host), signal.SIGKILL)
    try:
        yield
    finally:
        await mesh.join()


@contextlib.asynccontextmanager
async def _disk_filled(mesh: WatchedMesh) -> AsyncIterator[None]:
    path = mesh.host.root / "filled"
    found = os.statvfs(mesh.host.root)
    takes = found.f_frsize * int(found.f_bavail - FULL * found.f_blocks)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, takes)
    try:
        yield
    finally:
        path.unlink()


# `calc` trains beside all of them.
SCENES = (
    Scene(
        ("MeshStalenessRefusals",),
        "one reward of five takes so long that others' steps make its tokens old",
        _job(
            "uneven",
            reward__use="calculator:uneven",
            reward__deadline_s=120,
            sandbox__processes=2,
            algorithm__groups_per_step=1,
            algorithm__group_size=2,
            algorithm__max_staleness=4,
        ),
    ),
    Scene(
        ("MeshProcessRestarts",),
        "the gateway is killed again and again",
        lambda mesh: mesh.hunted(signal.SIGKILL, "gateway"),
    ),
    Scene(
        ("MeshJobNoStep", "MeshStall"),
        "the trainer is stopped, and whoever is started in its place",
        _stopped("trainer"),
    ),
    Scene(("MeshLeaderMissing",), "all planners are stopped", _stopped("planner")),
    Scene(("MeshProcessSilent",), "the gateway is stopped", _stopped("gateway")),
    Scene(("MeshRedisAway",), "Redis is stopped", _redis_stopped),
    Scene(("MeshHeadDown",), "the head's root process is stopped", _head_stopped),
    Scene(("MeshHostAway", "MeshHostDown"), "a host's root process is killed", _host_killed),
    Scene(("MeshDiskNearlyFull", "MeshDiskFull"), "a host's volume is filled", _disk_filled, True),
    Scene(
        ("MeshJobWaits",),
        "a job needs more workers than are left",
        _job("wide", pool__workers__least=3),
    ),
    Scene(
        ("MeshFailures",),
        "a reward raises for every third row",
        _job("raises", reward__use="calculator:now_and_then"),
    ),
    Scene(
        ("MeshJobFailed",), "a reward always raises", _job("broken", reward__use="calculator:never")
    ),
)
