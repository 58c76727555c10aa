"""Mesh of a head and a joined host on this machine, with small jobs, and scenes that trigger
alerts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtests.measuring.commands import COMMAND_S, meshrl
from loadtests.measuring.meshed import living
from loadtests.measuring.processes import beside
from meshrl.directory.directory_paths import MeshPaths, find_root_pid

EXAMPLES = Path(__file__).parents[2] / "examples"
PORTS = 40  # of a host: a head with a few jobs takes thirty
HUNT_S = 0.3  # between two polls for a restarted process
VOLUME = "256m"  # of the host that joins: it holds logs and chunks of weights
SMALL = {
    "rollout.slots": 16,
    "rollout.max_tokens": 96,
    "algorithm.groups_per_step": 2,
    "algorithm.group_size": 4,
    "algorithm.filter_zero_variance": "false",  # so early a model earns nothing
    "warm_start.steps": 2,
    "evaluation.before": "false",
    "evaluation.after": "false",
    "evaluation.every": 0,
    "budget.steps": 1_000_000,
}
# Rewards with a typical defect.
FAULTY = """

def now_and_then(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    if row["answer"] % 3 == 0:
        raise ValueError("three divides it")
    return reward(row, turns)


def uneven(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    import time

    if random.SystemRandom().random() < 0.2:
        time.sleep(30)
    return reward(row, turns)


def never(row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
    raise KeyError("solution")
"""
FULL = 0.01  # of a disk that is left of one that is full
Play = Callable[["WatchedMesh"], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Scene:
    """Fault and the alerts that it triggers; they clear once the fault is undone."""

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


@contextlib.asynccontextmanager
async def _host_killed(mesh: WatchedMesh) -> AsyncIterator[None]:
    send(find_root_pid(mesh.host), signal.SIGKILL)
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


class WatchedMesh:
    """The two hosts. `health`: where each answers as a whole, the head's first."""

    def __init__(self, folder: Path) -> None:
        self.head, self.host = MeshPaths(folder / "head"), MeshPaths(folder / "host")
        self.health = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.mounted = False
        self.job = folder / "job" / "job.toml"
        self._folder, self._listens = folder, [_range(), _range()]

    async def start(self) -> None:
        folder = self.job.parent
        shutil.copytree(EXAMPLES / "calculator", folder / "calculator")
        code = (EXAMPLES / "calculator.py").read_text()
        head, mark, tail = code.partition('\n\nif __name__ == "__main__":')
        (folder / "calculator.py").write_text(head + FAULTY + mark + tail)
        shutil.copyfile(EXAMPLES / "calculator.toml", self.job)
        self.host.root.mkdir(parents=True, mode=0o700)
        volume = ("-o", f"size={VOLUME},mode=700", "meshrl", str(self.host.root))
        mount = await asyncio.create_subprocess_exec(
            "mount", "-t", "tmpfs", *volume, stderr=asyncio.subprocess.DEVNULL
        )
        self.mounted = await mount.wait() == 0
        words = ("--root", str(self.head.root), "--workers", "2", "--health", self.health[0])
        await self.meshrl("up", *words, "--listen", self._listens[0])
        await self.join()

    async def join(self) -> None:
        token = self.head.root / "mesh" / "join.token"
        known = [] if self.host.settings.exists() else [str(token)]
        words = [*known, "--root", str(self.host.root), "--workers", "1"]
        words += ["--health", self.health[1], "--listen", self._listens[1]]
        await self.meshrl("join", *words)

    async def stop(self) -> None:
        for place in (self.host, self.head):
            with contextlib.suppress(RuntimeError):
                await self.meshrl("down", "--mesh", str(place.root))
        if self.mounted:
            await (await asyncio.create_subprocess_exec("umount", "-l", self.host.root)).wait()

    async def submit(self, name: str, **changes: object) -> None:
        told = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
        told |= {"name": name, "out": self._folder / name}
        sets = [w for key, value in told.items() for w in ("--set", f"{key}={value}")]
        await self.meshrl("submit", str(self.job), "--mesh", str(self.head.root), *sets)

    async def remove(self, name: str) -> None:
        words = (name, "--mesh", str(self.head.root))
        with contextlib.suppress(RuntimeError):  # it has ended
            await self.meshrl("cancel", *words)
        async with asyncio.timeout(COMMAND_S):
            while True:
                with contextlib.suppress(RuntimeError):  # it is still ending
                    return await self.meshrl("delete", *words)

    async def meshrl(self, *words: str) -> None:
        await meshrl(*words, MESHRL_HOME=str(self._folder / "home"))

    def redis(self) -> int:
        for process in psutil.process_iter(["pid", "name", "cwd"]):
            if process.info["cwd"] == str(self.head.redis_directory.resolve()):
                return int(process.info["pid"])
        raise RuntimeError("the head has no Redis")

    @contextlib.asynccontextmanager
    async def hunted(self, number: signal.Signals, *kinds: str) -> AsyncIterator[None]:
        """Send a signal to each process of these kinds, and to successors, until the block ends."""
        hit: set[int] = set()

        async def hunt() -> None:
            while True:
                for entry in await living(self.head.redis_url, connect_s=2.0):
                    if entry.kind in kinds and entry.pid not in hit:
                        hit.add(entry.pid)
                        send(entry.pid, number)
                await asyncio.sleep(HUNT_S)

        try:
            async with beside(hunt()):
                yield
        finally:
            for pid in hit:
                send(pid, signal.SIGCONT)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]


def _range() -> str:
    low = free_ports(1)[0] // PORTS * PORTS
    return f"127.0.0.1:{low}-{low + PORTS - 1}"


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
    # The launcher starts another in its place after eight seconds.
    Scene(("MeshRedisAway",), "Redis is stopped", lambda mesh: _process_stopped(mesh.redis())),
    Scene(
        ("MeshHeadDown",),
        "the head's root process is stopped",
        lambda mesh: _process_stopped(find_root_pid(mesh.head)),
    ),
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
