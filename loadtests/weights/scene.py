"""Weight store with publishers and receivers, each a process, on hosts that are directories or
networks.

Everything ends with the block; a process that has failed reports the reason.

Usage:

    async with Scene() as scene:
        await scene.store()
        trainer, engine = await scene.publisher("job"), await scene.receiver(0, host=1)
        staged = await trainer.ask("stage", version=0)
        await engine.ask("receive", digest=staged["digest"])
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.measuring.meshed import ROOT, START_S, redis, start_fork_server
from loadtests.weights.network import Links
from meshrl.common.api.weights import STORE_NAME
from meshrl.common.base.host.settings import SECRET_BYTES, SETTINGS_ENV
from meshrl.common.mesh.process.child_handle import SystemChild
from meshrl.common.mesh.process.forking.fork_client import FORK_SERVER_ENV
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.mesh.runtime.mesh import MeshSettings
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient, open_sync_client, run_script_once
from meshrl.common.state.redis.keys import MESH_PREFIX

ORDER_S = 900.0
LOOK_S = 0.02
ADMIT_S = 10.0  # for Redis to take the name of a host
FORKED = (
    "meshrl.services.weights.store",
    "meshrl.services.engine.role_process",
    "meshrl.services.node.agent",
    "loadtests.weights.members.member",
    "loadtests.weights.members.serving",
    "torch.distributed",
    "numpy.ma",
    "encodings.idna",
)
ENVIRON = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    rounds: int = 7
    one_host: int = 1024 * MIB
    fanout: int = 32 * MIB
    link: int = 256 * MIB
    codec: int = 256 * MIB
    memory: int = 2048 * MIB
    server_push: int = 352 * MIB
    swaps: int = 25  # of an engine, for its pauses
    steps: int = 6  # of the small real run
    directory: str = ""  # where versions lie; empty: the system's temporary directory

    def scene(self, rates: Iterable[str] = ()) -> Scene:
        return Scene(rates, Path(self.directory) if self.directory else None)


class OrderFailed(RuntimeError):
    """Failed order. `code`: of the error that the process raised."""

    def __init__(self, name: str, answer: dict[str, Any]) -> None:
        super().__init__(f"{name}: {answer['error']}\n{answer['trace']}")
        self.code = answer["code"]


class Member:
    """Process of the scene, with its output."""

    def __init__(self, name: str, child: SystemChild, log: Path) -> None:
        self.name, self.log = name, log
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    async def await_start(self) -> None:
        await self._heard(START_S)

    async def ask(self, order: str, within_s: float = ORDER_S, **words: Any) -> Any:
        frame = json.dumps({"order": order} | words).encode()
        await self._child.send(frame)
        answer = await self._heard(within_s)
        if "error" in answer:
            raise OrderFailed(self.name, answer)
        return answer["answer"]

    async def _heard(self, within_s: float) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(await self._child.recv(within_s))
        except Exception as error:
            raise RuntimeError(f"{self.name}: {error!r}\n{self.log_tail}") from error
        return found

    @property
    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def cpu_s(self) -> float:
        usage = self._child.read_usage()
        return usage.cpu_s if usage is not None else 0.0

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def kill(self) -> None:
        self._child.kill()
        await self._child.wait(10.0)


class Scene:
    """Scene with a Redis and a fork server at first; hosts are created as processes start on
    them.
    """

    def __init__(self, rates: Iterable[str] = (), directory: Path | None = None) -> None:
        """`rates`: of the links of hosts 0, 1 and so on; without any they share a loopback."""
        self.links = Links(rates) if (rates := list(rates)) else None
        self._within = directory
        self._opened = contextlib.AsyncExitStack()
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._host = SystemHost()
        self.members: list[Member] = []

    async def __aenter__(self) -> Scene:
        async with contextlib.AsyncExitStack() as opened:
            scratch = tempfile.TemporaryDirectory(prefix="meshrl-weights-", dir=self._within)
            self.directory = Path(opened.enter_context(scratch))
            if self.links is not None:
                await opened.enter_async_context(self.links)
            self._url = opened.enter_context(redis(self.directory))
            if FORK_SERVER_ENV not in os.environ:  # else a test's run or a caller has one
                about: dict[str, Any] = {"how": SpawnOptions(own_session=True), **ENVIRON}
                fork_server = start_fork_server(
                    self._host, self.directory, "fork-server", *FORKED, **about
                )
                os.environ[FORK_SERVER_ENV], _ = await opened.enter_async_context(fork_server)
                opened.callback(os.environ.pop, FORK_SERVER_ENV)
            self.state = await StateClient.open(self._url)
            opened.push_async_callback(self.state.close)
            opened.push_async_callback(self._end_all)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def _end_all(self) -> None:
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.signal(signal.SIGKILL)
        for member in self.members:
            await member.kill()

    # -- hosts -----------------------------------------------------------------------------------

    def root(self, host: int) -> Path:
        return self.directory / f"h{host}"

    def settings(self, host: int, **more: Any) -> Path:
        path = self.root(host) / "settings.json"
        if more or not path.exists():
            self.root(host).mkdir(exist_ok=True)
            with contextlib.closing(open_sync_client(self._url, ADMIT_S)) as client:
                run_script_once(client, "admit_host", [MESH_PREFIX], {"host": f"h{host}"})
            bound = {"bind": self.links.bind(host)} if self.links is not None else {}
            MeshSettings(
                redis_url=self._url,
                run_root=str(self.root(host)),
                host=f"h{host}",
                secret=self._secret,
                metrics="off",
                **(bound | more),
            ).to_file(path)
        return path

    # -- processes -------------------------------------------------------------------------------

    def start(
        self, name: str, host: int, module: str, *words: str, pipe: bool = False, **env: str
    ) -> Member:
        log = self.root(host) / f"{name.replace('/', '-')}.log"
        settings = self.settings(host)
        net = str(self.links.pids[host] if self.links is not None else 0)
        argv = [sys.executable, "-m", "loadtests.weights.members.within", net, module, *words]
        about = ENVIRON | {SETTINGS_ENV: str(settings), "MALLOC_ARENA_MAX": "2"} | env
        child = self._host.spawn(
            argv, name=name, env=about, log=log, options=SpawnOptions(has_channel=pipe)
        )
        member = Member(name, child, log)
        self.members.append(member)
        return member

    async def store(self, host: int = 0) -> Member:
        member = self.start(STORE_NAME, host, "meshrl.services.weights")
        await self.registered(STORE_NAME)
        return member

    async def member(
        self, kind: str, name: str, host: int, *words: str, module: str = "member"
    ) -> Member:
        """Start a process of `loadtests.weights.members` that takes orders."""
        where = f"loadtests.weights.members.{module}"
        member = self.start(name, host, where, kind, name, *words, pipe=True)
        await member.await_start()
        return member

    async def publisher(self, job: str = "job", host: int = 0) -> Member:
        return await self.member("publisher", f"trainer/{job}", host, job)

    async def receiver(self, number: int, host: int = 0, job: str = "job") -> Member:
        return await self.member("receiver", f"engine/g{number}", host, job)

    async def receivers(self, hosts: Sequence[int], first: int = 0) -> list[Member]:
        """Start a receiver on each of these hosts, numbered in order from `first`."""
        started = [self.receiver(first + number, host) for number, host in enumerate(hosts)]
        return list(await asyncio.gather(*started))

    async def engine(self, number: int, model: str, host: int = 0, job: str = "job") -> Member:
        return await self.member("engine", f"engine/g{number}", host, job, model, module="serving")

    async def shard(self, number: int = 0, host: int = 0, job: str = "job") -> Member:
        return await self.member("shard", f"rollout/{job}/{number}", host, job, module="serving")

    async def agents(self, hosts: Iterable[int]) -> list[Member]:
        return list(await asyncio.gather(*map(self.agent, hosts)))

    async def agent(self, host: int) -> Member:
        return await self.member("agent", f"node/h{host}", host, "")

    @staticmethod
    def send_order(member: Member, order: str, **words: Any) -> asyncio.Task[Any]:
        """Send an order in the background; the task returns the answer or the error."""

        async def answered() -> Any:
            try:
                return await member.ask(order, **words)
            except (RuntimeError, OSError) as error:
                return error

        return asyncio.create_task(answered())

    async def registered(self, name: str, gone: str = "") -> registry.RegistryEntry:
        """Return a process's entry, once it has a live lease under another incarnation than `gone`.

        TimeoutError if there is none in time.
        """
        async with asyncio.timeout(START_S):
            while True:
                entry = await registry.lookup(self.state, name)
                if entry is not None and entry.alive and entry.incarnation != gone:
                    return entry
                await asyncio.sleep(LOOK_S)


def now() -> float:
    """Return seconds of a clock that all processes of this machine share."""
    return time.monotonic()
