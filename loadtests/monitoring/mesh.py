"""A head and a host that has joined it, both on this machine, and small jobs on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import psutil

from loadtests.measuring.commands import COMMAND_S, meshrl
from loadtests.measuring.meshed import living
from meshrl.directory.places import MeshPlace, running_launcher

EXAMPLES = Path(__file__).parents[2] / "examples"
PORTS = 40  # of a host: a head with a few jobs takes thirty
HUNT_S = 0.3  # between two looks for a process that has been started again
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
# Rewards with a defect, in the words of who makes one.
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


class WatchedMesh:
    """The two hosts. `health`: where each answers as a whole, the head's first."""

    def __init__(self, folder: Path) -> None:
        self.head, self.host = MeshPlace(folder / "head"), MeshPlace(folder / "host")
        self.health = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.mounted = False
        self.job = folder / "job" / "job.toml"
        self._folder, self._listens = folder, [_range(), _range()]

    async def start(self) -> None:
        """Both hosts; the second one's root is a small volume where this user may mount one."""
        self._write_job()
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
        """The second host joins, or comes back."""
        token = self.head.root / "mesh" / "join.token"
        known = [] if self.host.settings.exists() else [str(token)]
        words = [*known, "--root", str(self.host.root), "--workers", "1"]
        words += ["--health", self.health[1], "--listen", self._listens[1]]
        await self.meshrl("join", *words)

    async def stop(self) -> None:
        """Ends all of it."""
        for place in (self.host, self.head):
            with contextlib.suppress(RuntimeError):
                await self.meshrl("down", "--mesh", str(place.root))
        if self.mounted:
            await (await asyncio.create_subprocess_exec("umount", "-l", self.host.root)).wait()

    async def submit(self, name: str, **changes: object) -> None:
        """A small job; a key has `__` for the dot."""
        told = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
        told |= {"name": name, "out": self._folder / name}
        sets = [w for key, value in told.items() for w in ("--set", f"{key}={value}")]
        await self.meshrl("submit", str(self.job), "--mesh", str(self.head.root), *sets)

    async def remove(self, name: str) -> None:
        """Stops a job if it goes on, and takes it out of the records."""
        words = (name, "--mesh", str(self.head.root))
        with contextlib.suppress(RuntimeError):  # it has ended
            await self.meshrl("cancel", *words)
        async with asyncio.timeout(COMMAND_S):
            while True:
                with contextlib.suppress(RuntimeError):  # it is still ending
                    return await self.meshrl("delete", *words)

    async def meshrl(self, *words: str) -> None:
        """Run a command; RuntimeError with what it said when it fails."""
        await meshrl(*words, MESHRL_HOME=str(self._folder / "home"))

    async def pids(self, kinds: Iterable[str]) -> dict[str, int]:
        """Of the processes of these kinds that live by their leases, by name."""
        found = await living(self.head.redis_url, connect_s=2.0)
        return {entry.name: entry.pid for entry in found if entry.kind in kinds}

    def root_process(self, place: MeshPlace) -> int:
        """The pid of a host's root process."""
        return running_launcher(place)

    def redis(self) -> int:
        """The pid of the head's Redis."""
        for process in psutil.process_iter(["pid", "name", "cwd"]):
            if process.info["cwd"] == str(self.head.redis.resolve()):
                return int(process.info["pid"])
        raise RuntimeError("the head has no Redis")

    @contextlib.asynccontextmanager
    async def hunted(self, number: signal.Signals, *kinds: str) -> AsyncIterator[None]:
        """Within the block each process of these kinds gets this signal once it is there, also
        those that are started in its place. Those that are stopped go on after it.
        """
        hit: dict[int, None] = {}

        async def hunt() -> None:
            while True:
                for pid in (await self.pids(kinds)).values():
                    if pid not in hit:
                        hit[pid] = None
                        send(pid, number)
                await asyncio.sleep(HUNT_S)

        hunting = asyncio.create_task(hunt())
        try:
            yield
        finally:
            hunting.cancel()
            await asyncio.gather(hunting, return_exceptions=True)
            for pid in hit:
                send(pid, signal.SIGCONT)

    def _write_job(self) -> None:
        folder = self.job.parent
        shutil.copytree(EXAMPLES / "calculator", folder / "calculator")
        code = (EXAMPLES / "calculator.py").read_text()
        head, mark, tail = code.partition('\n\nif __name__ == "__main__":')
        (folder / "calculator.py").write_text(head + FAULTY + mark + tail)
        shutil.copyfile(EXAMPLES / "calculator.toml", self.job)


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]


def _range() -> str:
    low = free_ports(1)[0] // PORTS * PORTS
    return f"127.0.0.1:{low}-{low + PORTS - 1}"
