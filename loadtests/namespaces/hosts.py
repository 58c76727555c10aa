"""Hosts that share only a network: namespaces of this machine, created and removed here.

Usage:

    async with Hosts(3) as hosts:
        await hosts[0].run("meshrl", "up", "--listen", hosts[0].address)

Each has its own processes, file tree, loopback, shared memory, abstract sockets, name and control
groups, and a link to a router, whose rate and delay are those of `Hosts`. Code, Python and the
system's directories are this machine's, and cannot be written to. Needs root, `ip`, `tc`,
`iptables` and a kernel with network namespaces and tunnels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import psutil

from loadtests.namespaces import groups
from loadtests.namespaces.host import Host
from loadtests.namespaces.init import HOME, SPACES, Tree, are_permitted
from loadtests.namespaces.network import Network, address

CODE = Path(__file__).parents[2]
READY_S = 30.0
END_S = 15.0
NEEDED = ("ip", "tc", "iptables", "unshare", "nsenter", "mount", "umount", "pivot_root", "env")
KEPT = ("LANG", "LC_ALL", "PYTHONPATH")  # of this process' environment


def list_missing_tools() -> str:
    """Return the prerequisites of hosts that this machine lacks; empty if there are none."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    return ", ".join(absent) or ("" if are_permitted() else "root with namespaces and /dev/net/tun")


class Hosts:
    """Some hosts and the network between them, numbered from 0."""

    def __init__(
        self,
        count: int,
        *,
        rate: str = "1gbit",
        delay_s: float = 0.002,
        warm: bool = True,
        shared: str = "",
    ) -> None:
        """`rate` of each link in each direction, as of `tc`; `delay_s`: one way, between any two;
        `warm`: hosts have a copy of what this user's cache has (compiled code, first weights);
        `shared`: where all of them see one directory, which each can write to, as a file server's.
        """
        self.count, self.delay_s, self.router = count, delay_s, -1
        self._rate, self._warm, self._shared = rate, warm, shared
        self._hosts: list[Host] = []
        self._feeds: dict[int, asyncio.subprocess.Process] = {}  # by pid of the first process
        self._network = Network(-1, rate, bool(delay_s))
        self._folder = Path()
        self._rules: dict[int, list[str]] = {}

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    async def __aenter__(self) -> Hosts:
        groups.sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=groups.mark()))
        (self._folder / "shared").mkdir()
        try:
            self.router = await self._first("loadtests.namespaces.router", str(self.delay_s))
            self._network = Network(self.router, self._rate, bool(self.delay_s))
            await self._network.begin()
            self._hosts = list(await asyncio.gather(*map(self._host, range(self.count))))
        except BaseException:
            await self._clear()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clear()

    async def cut(self, number: int) -> None:
        """Drop all packets from and to that host."""
        await self._network.rules(number, [""])

    async def mend(self, number: int) -> None:
        await self._network.rules(number, [])

    async def lose(self, number: int, share: float) -> None:
        """Drop a random share of the packets from and to that host.

        Segments that the kernel has not cut into packets yet are dropped whole.
        """
        await self._network.rules(number, [f"-m statistic --mode random --probability {share}"])

    @contextlib.asynccontextmanager
    async def partition(self, number: int) -> AsyncIterator[None]:
        """Cut off a host for as long as the block lasts."""
        await self.cut(number)
        try:
            yield
        finally:
            await asyncio.shield(self.mend(number))

    async def kill(self, number: int) -> None:
        """Kill a host as a power cut does: all its processes in one step, without notice."""
        await self.cut(number)
        await self._end(self._hosts[number].init)
        await self._network.unlink(number)

    async def revive(self, number: int) -> Host:
        """Start a killed host again with the files on its disk."""
        host = await self._host(number)
        self._hosts[number] = host
        await self.mend(number)
        return host

    def router_cpu_s(self) -> float:
        """Return the CPU-seconds of the process that delays packets."""
        times = psutil.Process(self.router).cpu_times()
        return float(times.user + times.system)

    async def _host(self, number: int) -> Host:
        name = f"h{number}"
        place = self._folder / name
        for part in ("root", "files"):
            (place / part).mkdir(parents=True, exist_ok=True)
        if self._warm:
            await asyncio.to_thread(_warmed, place / "files" / HOME.lstrip("/"))
        made = groups.create(f"{self._folder.name}-{name}")
        tree = Tree(
            name,
            str(place / "root"),
            str(place / "files"),
            _list_code_directories(),
            {f"h{one}": address(one) for one in range(self.count)},
            groups.entered(made),
            (str(self._folder / "shared"), self._shared) if self._shared else (),
        )
        init = await self._first("loadtests.namespaces.init", json.dumps(asdict(tree)))
        await self._network.link(number, init)
        return Host(name, number, address(number), init, made, _environment())

    async def _first(self, module: str, *words: str) -> int:
        """Start the first process of new namespaces; return its pid once it is ready."""
        log = self._folder / f"{module}.log"
        with log.open("ab") as error:
            feed = await asyncio.create_subprocess_exec(
                *("unshare", *SPACES, sys.executable, "-m", module, *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=error,
                cwd=CODE,
                env=_environment(),
            )
        try:
            async with asyncio.timeout(READY_S):
                output = await feed.stdout.readline() if feed.stdout else b""
            if output != b"ready\n":
                raise RuntimeError(f"{module} has not begun: {log.read_text()}")
            pid: int = psutil.Process(feed.pid).children()[0].pid
        except BaseException:
            await asyncio.shield(_closed(feed))
            raise
        self._feeds[pid] = feed
        return pid

    async def _end(self, init: int) -> None:
        feed = self._feeds.pop(init, None)
        if feed is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
            await asyncio.shield(_closed(feed))

    async def _clear(self) -> None:
        try:
            await asyncio.gather(*(self._end(init) for init in list(self._feeds)))
        finally:
            for number in range(self.count):
                groups.removed(f"{self._folder.name}-h{number}")
            shutil.rmtree(self._folder)


async def _closed(feed: asyncio.subprocess.Process) -> None:
    if feed.stdin is not None:
        feed.stdin.close()
    async with asyncio.timeout(END_S):
        await feed.wait()


def _list_code_directories() -> tuple[str, ...]:
    """List code directories that are not inside one another; Python's own may be in /usr."""
    wanted = sorted({str(CODE), sys.prefix, sys.base_prefix})
    system = tuple(f"/{name}/" for name in ("usr", "opt", "etc"))
    return tuple(
        place
        for place in wanted
        if not any(place != other and Path(place).is_relative_to(other) for other in wanted)
        and not f"{place}/".startswith(system)
    )


def _environment() -> dict[str, str]:
    here = {key: os.environ[key] for key in KEPT if key in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return here | {"PATH": path, "HOME": HOME, "OMP_NUM_THREADS": "1"}


def _warmed(home: Path) -> None:
    cache = Path.home() / ".cache" / "meshrl"
    if cache.is_dir():
        # Types that were checked are of no use there, and change as they are copied.
        passed = shutil.ignore_patterns("mypy*")
        shutil.copytree(cache, home / ".cache" / "meshrl", ignore=passed, dirs_exist_ok=True)
