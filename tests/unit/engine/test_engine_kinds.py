"""Built-in engine whose weights and cache leave the accelerator between its steps."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.calls.role import KindState, MoveKinds
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import Refused
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.base.random import Random
from meshrl.common.generation.builtin.engine import BuiltinEngine
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.services.engine.engine_kinds import SLICE_KINDS
from meshrl.services.engine.kv.cache_retention import prefers_recomputation
from meshrl.services.engine.service import EngineService
from tests.load import scaled
from tests.meshes import alone
from tests.stories import story_on
from tests.unit.common.generation.engines_under_test import (
    CollectedOutput,
    Listener,
    built_in,
    decoder,
    request,
)
from tests.unit.node.time_slices.test_slice_scheduler import Stage, on_stage

BOTH = ("parameters", "kv_cache")
REQUESTS = {  # by step: new ones, and one that continues a session
    0: [request(i, range(2 + i, 24 + 5 * i), max_new=10, session=i) for i in range(3)],
    13: [request(10, range(2, 40), max_new=9, session=0)],
    16: [request(11 + i, range(3, 20 + i), max_new=12) for i in range(3)],
}


class ScarceMemory:
    """Memory of tensors that can be allocated again only while the host `has_memory`."""

    def __init__(self, memory: ReleasableMemory, has_memory: Callable[[], bool]) -> None:
        self._memory, self._has_memory = memory, has_memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def reallocate(self) -> None:
        if not self._has_memory():
            raise MemoryError("no pages")
        self._memory.reallocate()


class Bench:
    """Engine service whose commands a task runs, and orders of its worker."""

    def __init__(
        self, engine: BuiltinEngine, directory: Path, slices: SliceClient, mesh: Mesh
    ) -> None:
        self.engine = engine
        self.service = EngineService(mesh, engine, lambda action: action(), time_slices=slices)
        self.service.kinds.set_targets("", str(directory))
        self.poll_s = 0.0005
        self._numbers = itertools.count(1)

    async def order(self, action: str, *kinds: str) -> dict[str, KindState]:
        tier = "disk" if action == "offload" else ""
        order = MoveKinds(next(self._numbers), action, list(kinds), tier)
        states = await self.service.kinds.move_kinds(order)
        return {state.kind: state for state in states.kinds}

    async def step(self) -> bool:
        async with self.service.kinds.use_kinds(*SLICE_KINDS["generate"]):
            return self.engine.step()

    async def run_commands(self, in_slice: bool = True) -> None:
        while True:
            self.service.run_commands(in_slice)
            await asyncio.sleep(self.poll_s)


@asynccontextmanager
async def open_bench(
    path: str,
    directory: Path,
    in_slice: bool = True,
    *,
    member: tuple[Mesh, SliceClient] | None = None,
    has_memory: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Bench]:
    mesh = member[0] if member else alone("engine/g0.0", SystemClock(), Random(1), SystemHost())
    slices = member[1] if member else SliceClient(mesh, "worker/w0", "g0.0", 1, enabled=True)
    engine = built_in(path)
    collect_weights = engine.collect_weights
    with pytest.MonkeyPatch.context() as patch:
        scarce = lambda: ScarceMemory(collect_weights(), has_memory)  # noqa: E731
        patch.setattr(engine, "collect_weights", scarce)
        bench = Bench(engine, directory, slices, mesh)
    running = asyncio.create_task(bench.run_commands(in_slice))
    try:
        yield bench
    finally:
        running.cancel()
        await bench.service.stop()


def run_undisturbed(path: str) -> dict[int, CollectedOutput]:
    engine = built_in(path)
    listener = Listener(engine)
    for step in range(60):
        engine.submit(REQUESTS.get(step, []))
        engine.step()
        listener.drain()
    return listener.outputs


@pytest.mark.parametrize("action", ["offload", "drop"])
@pytest.mark.parametrize("path", ["native", "eager"])
async def test_requests_continue_with_the_same_tokens_after_a_switch(
    path: str, action: str, tmp_path: Path
) -> None:
    expected = run_undisturbed(path)
    async with open_bench(path, tmp_path) as bench:
        listener = Listener(bench.engine)
        for step in range(60):
            if is_away := step % 3 == 1:
                await bench.order("offload", "parameters")
                found = await bench.order(action, "kv_cache")
                assert [found[kind].accelerator_bytes for kind in BOTH] == [0, 0]
            bench.engine.submit(REQUESTS.get(step, []))  # at 13 and 16, while the tensors are away
            if is_away:
                await bench.order("load", *BOTH)
            await bench.step()
            listener.drain()
        assert not bench.engine.num_running and not bench.engine.num_waiting
    for number, output in expected.items():
        assert listener.outputs[number].tokens == output.tokens, number
        assert listener.outputs[number].finish == output.finish
        assert listener.outputs[number].logprobs == pytest.approx(output.logprobs, abs=1e-4)


@pytest.mark.parametrize("path", ["native", "eager"])
async def test_dropped_weights_are_fetched_before_the_next_step(path: str, tmp_path: Path) -> None:
    expected = run_undisturbed(path)
    async with open_bench(path, tmp_path) as bench:
        service, listener = bench.service, Listener(bench.engine)
        service.weights.manifest = "m0"
        bench.engine.submit(REQUESTS[0])
        for step in range(40):
            if step == 4:
                await bench.order("drop", *BOTH)
                await bench.order("load", *BOTH)
                assert not await bench.step() and service.slice_function == ""
                assert service.weights.manifest == "" and service.weights.change_event.is_set()
                await service.weights.update_weights(decoder().state_dict(), 0, "m0")
            await bench.step()
            listener.drain()
    for number in (one.id for one in REQUESTS[0]):
        assert listener.outputs[number].tokens == expected[number].tokens


async def test_installed_weights_differ_from_their_copy(tmp_path: Path) -> None:
    async with open_bench("eager", tmp_path) as bench:
        await bench.order("offload", "parameters")
        assert not (await bench.order("load", "parameters"))["parameters"].is_dirty
        # also in a slice of another function
        await bench.service.weights.update_weights(decoder().state_dict(), 1, "m1")
        assert (await bench.order("load", "parameters"))["parameters"].is_dirty


async def test_tensors_move_before_a_command_that_waits_for_a_slice(tmp_path: Path) -> None:
    async with open_bench("eager", tmp_path, in_slice=False) as bench:
        bench.service.commands.enqueue(lambda: None, needs_slice=True)
        async with bench.service.mesh.clock.timeout(scaled(20.0), "the moves"):
            await bench.order("offload", *BOTH)
            found = await bench.order("load", *BOTH)
        assert found["parameters"].accelerator_bytes == found["parameters"].size_bytes
        assert bench.service.commands.needs_slice


@story_on(on_stage)
async def test_engine_without_memory_for_its_tensors_requests_its_slice_again(
    stage: Stage, tmp_path: Path
) -> None:
    _, scheduler = await stage.workers()
    member, (_, other) = [await stage.join_instance(number) for number in (0, 1)]
    free_at_s = 20.0
    async with open_bench(
        "eager",
        tmp_path,
        member=member,
        has_memory=lambda: stage.clock.monotonic() >= free_at_s,
    ) as bench:
        bench.poll_s = 0.05
        await bench.order("drop", *BOTH)
        beginning = asyncio.create_task(bench.service.begin_slice(member[1], "generate"))
        await stage.compute("other", other, 1.0, times=5)
        assert not beginning.done() and stage.clock.monotonic() < free_at_s
        ticket = await beginning
        assert stage.clock.monotonic() >= free_at_s
        assert scheduler.stats().slice_holders == ["g0.0"]
        bench.service.end_slice(member[1], ticket, "generate", 0.5)
        assert member[1].estimate_s("generate") == 0.5  # unused slices are no samples
        assert not stage.kills

        await bench.order("drop", *BOTH)
        free_at_s = math.inf
        with pytest.raises(Refused, match="cannot allocate"):
            await bench.service.begin_slice(member[1], "generate")
        await stage.compute("other", other, 1.0)
        await stage.clock.sleep(1.0)
        assert scheduler.stats().slice_holders == []


@pytest.mark.parametrize(
    ("copy_s", "tokens", "rate", "expected"),
    [
        (1.0, 0, 100.0, True),
        (0.0, 10, 100.0, False),
        (1.0, 10, 0.0, False),
        (1.0, 90, 100.0, True),
        (1.0, 110, 100.0, False),
    ],
)
def test_cache_is_recomputed_if_that_is_sooner(
    copy_s: float, tokens: int, rate: float, expected: bool
) -> None:
    assert prefers_recomputation(copy_s, tokens, rate) == expected
