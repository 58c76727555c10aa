"""Job whose versions go from one host to engines on others under network faults.

It checks every answer of the engines against the expected one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from torch import Tensor

from loadtests.weights import models
from loadtests.weights.members.serving import PROMPT
from loadtests.weights.scene import Member, Scene
from meshrl.common.generation.builtin.engine_builder import build_engine
from meshrl.common.generation.engine_contract import GenerationRequest
from meshrl.common.mesh.transport.address import parse_endpoint
from meshrl.common.state import registry
from tests.load import scaled
from tests.unit.common.weights.bulk.faulty_proxy import FaultyProxy

MODEL = "little"  # more than nine chunks
WHOLE = sum(tensor.nbytes for tensor in models.drawn(MODEL, 0).values())
FAR = "127.0.0.2"  # hosts of proxies
ANSWER_TOKENS = 6  # tokens, which identify a version
WITHIN_S = 60.0  # limit for operations of a second on a quiet machine
POLL_S = 0.05  # between two polls, in each of which an engine may generate
ENDLESS = 1 << 40


Answer = tuple[list[int], list[float]]  # tokens and their log-probabilities


@functools.cache
def compute_answer(seed: int) -> Answer:
    """Return the model's answer with this seed's weights."""
    return sample_answer(models.drawn(MODEL, seed))


def sample_answer(weights: Mapping[str, Tensor]) -> Answer:
    """Return the model's answer with these weights, from an engine of its own."""
    engine = build_engine(models.MODELS[MODEL], 1, 64)
    engine.wake(weights, 0)
    prompt = np.array(PROMPT, np.int32)
    engine.submit(
        [
            GenerationRequest(
                1, prompt, ANSWER_TOKENS, temperature=0.0, stop_ids=(), seed=0, session=1
            )
        ]
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < ANSWER_TOKENS:
        engine.step()
        flush = engine.drain_outputs(finished_only=False)
        if flush is not None:
            tokens += flush.tokens.tolist()
            logprobs += flush.logprobs.tolist()
    return tokens, logprobs


class TransferBench:
    """Store on host 0 with a publisher beside it, an engine on host 1 and a shard that reads it.

    Version n has the weights of seed n, unless another seed is given.
    """

    within_s = WITHIN_S

    def __init__(self, scene: Scene, opened: AsyncExitStack) -> None:
        self.scene, self._opened = scene, opened
        self.seeds: list[int] = []  # seeds by version
        self.calls: dict[str, FaultyProxy] = {}  # proxies of the processes' request ports, by name
        self._engines = 0

    async def leave(self) -> None:
        """Leave the mesh; a no-op unless a subclass has joined it."""

    async def begin(self, far: bool = False, store: str = "meshrl.services.weights") -> None:
        """Commit version 0 and wait until the engine has it.

        The publisher is on host 2 if `far`. The store runs the module `store`.
        """
        self.store, self.proxy = await self.start_behind_proxy("weights", 0, store)
        self.publisher, self.shard = await asyncio.gather(
            self.scene.publisher(host=2 if far else 0), self.scene.shard()
        )
        await self.publisher.ask("submit", run_dir=str(self.scene.directory))
        await self.publish()
        self.engine = await self.new_engine()
        await self.wait_for_version(self.engine)

    async def start_behind_proxy(
        self, name: str, host: int, module: str
    ) -> tuple[Member, FaultyProxy]:
        """Start a process that others reach only through proxies; return it with its bulk port's
        proxy.
        """
        self.scene.settings(host, advertise=FAR)
        member = self.scene.start(name, host, module)
        return member, await self._open_proxies(name, host)

    async def start_agent_behind_proxy(self, host: int) -> tuple[Member, FaultyProxy]:
        """Start an agent that serves its host's chunks, reached only through proxies."""
        self.scene.settings(host, advertise=FAR)
        agent = await self.scene.agent(host)
        return agent, await self._open_proxies(agent.name, host)

    async def _open_proxies(self, name: str, host: int) -> FaultyProxy:
        entry = await self.scene.registered(name)
        self.scene.settings(host, advertise="")
        ports = [_port(parse_endpoint(place)) for place in (entry.address, entry.bulk)]
        calls, bulk = [self._opened.enter_context(FaultyProxy(port, ENDLESS)) for port in ports]
        self.calls[name] = calls
        return bulk

    async def restart_store(self) -> None:
        """Start a store without a proxy in place of a lost one."""
        lost_store = await registry.lookup(self.scene.state, "weights")
        assert lost_store is not None
        await self.evict_name("weights")
        self.store = self.scene.start("weights", 0, "meshrl.services.weights")
        await self.scene.registered("weights", gone=lost_store.incarnation)

    async def evict_name(self, name: str) -> None:
        """Evict the name of an exited process, as its supervisor does."""
        entry = await registry.lookup(self.scene.state, name)
        assert entry is not None
        await registry.evict(self.scene.state, name, entry.incarnation)

    async def new_engine(self, host: int = 1) -> Member:
        """Start another engine, which follows the job from now on."""
        engine = await self.scene.engine(self._engines, MODEL, host)
        self._engines += 1
        await engine.ask("begin", look_s=0.2)
        return engine

    # -- versions --------------------------------------------------------------------------------

    async def stage(self, seed: int = -1, publisher: Member | None = None) -> str:
        """Stage the next version and return its digest."""
        publisher = publisher or self.publisher
        version = len(self.seeds)
        await publisher.ask("model", name=MODEL, seed=version if seed < 0 else seed)
        staged: dict[str, Any] = await publisher.ask("stage", version=version)
        return str(staged["digest"])

    async def commit(self, digest: str, seed: int = -1, publisher: Member | None = None) -> int:
        """Commit the version as the job's, and return its number."""
        version = len(self.seeds)
        await (publisher or self.publisher).ask("commit", digest=digest)
        self.seeds.append(version if seed < 0 else seed)
        return version

    async def publish(self) -> int:
        """Stage and commit the next version, and return its number."""
        return await self.commit(await self.stage())

    @property
    def newest(self) -> int:
        """Return the version that was committed last."""
        return len(self.seeds) - 1

    async def expected(self, version: int) -> Answer:
        """Return the answer expected of an engine that has this version."""
        return compute_answer(self.seeds[version])

    # -- answers of engines -----------------------------------------------------------------------

    async def read_served_version(self, engine: Member) -> int:
        """Return the complete version that an engine answers with; -1 if it has none."""
        if (await engine.ask("serves"))["version"] < 0:
            return -1
        await self.shard.ask("attach", engine=engine.name)
        output = await self.shard.ask("greedy", engine=engine.name, most=ANSWER_TOKENS)
        versions = output["versions"]
        assert len(versions) == ANSWER_TOKENS, output
        if versions[0] == versions[-1]:  # otherwise it arrived in between
            tokens, logprobs = await self.expected(versions[0])
            assert output["tokens"] == tokens, f"version {versions[0]} is not whole"
            assert output["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        return int(versions[-1])

    async def wait_for_version(self, engine: Member, version: int = -1) -> None:
        """Wait until an engine answers with a version, by default the newest. Each earlier answer
        is of a complete version.
        """
        wanted = self.newest if version < 0 else version
        end = time.monotonic() + scaled(self.within_s)
        while (now := await self.read_served_version(engine)) < wanted:
            answer = await engine.ask("serves")
            assert time.monotonic() < end, f"{now}, not {wanted}: {answer}\n{engine.log_tail}"
            await asyncio.sleep(POLL_S)

    async def waits(self, member: Member, on: str) -> None:
        """Wait until a process reports to the mesh that it waits for this."""
        async with asyncio.timeout(scaled(WITHIN_S)):
            while not any(wait["on"] == on for wait in await self._waits(member)):
                await asyncio.sleep(POLL_S)

    async def _waits(self, member: Member) -> list[dict[str, Any]]:
        entry = await registry.lookup(self.scene.state, member.name)
        return entry.waits if entry is not None else []

    # -- proxies ----------------------------------------------------------------------------------

    def stall_after(self, share: float, proxy: FaultyProxy | None = None) -> None:
        """Stop a proxy, by default the store's, after this share of a version."""
        proxy = proxy or self.proxy
        proxy.stall_at_bytes = proxy.carried_bytes + int(share * WHOLE)

    async def wait_until_stalled(self, proxy: FaultyProxy | None = None) -> None:
        """Wait until the proxy has transferred all that it may."""
        some = proxy or self.proxy
        await until(
            lambda: some.carried_bytes >= some.stall_at_bytes, "the proxy stands", self.within_s
        )

    def resume_transfer(self) -> None:
        """Let the proxy transfer everything again."""
        self.proxy.stall_at_bytes = ENDLESS


async def until(holds: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """Wait until a condition holds."""
    within_s = scaled(within_s)
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


def _port(place: str) -> int:
    return int(place.rpartition(":")[2])


W = TypeVar("W", bound=TransferBench)


@asynccontextmanager
async def open_bench(kind: type[W]) -> AsyncIterator[W]:
    """Yield a bench whose processes and proxies end with the block."""
    async with AsyncExitStack() as proxies, Scene() as scene:
        made = kind(scene, proxies)
        try:
            yield made
        finally:
            await made.leave()
