"""SGLang engine that computes in time slices, and releases its memory by tag between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.common.api.calls.role import MoveKinds
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.generation.engine_contract import NO_VERSION
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.engine.service import EngineService
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.launch_config import (
    BACKUP_FLAG,
    LaunchConfig,
    prefers_weights_backup,
)
from meshrl.services.engine.sglang.ports import PortBlock
from tests.meshes import alone
from tests.unit.common.generation.engines_under_test import Listener, built_in, request
from tests.unit.engine.sglang.test_updates import STATE, Bench, bodies

STEPS_OF_A_SLICE = 3


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def get_paths(bench: Bench) -> list[str]:
    return [path for path, _ in bench.server.calls]


def run_slices(bench: Bench, between: tuple[str, ...]) -> None:
    """Run slices until no request is left; release the memory of these tags after each."""
    engine = bench.engine
    memories = {"weights": engine.collect_weights(), "kv_cache": engine.collect_cache()}
    bench.server.takes_steps = 0
    while engine.num_running or engine.num_waiting:
        bench.server.takes_steps += STEPS_OF_A_SLICE
        bench.generate(1)
        engine.end_slice()
        assert not bench.engine.requests.sent_requests
        for tag in between:
            memories[tag].release()
        for tag in between:
            memories[tag].reallocate()
        if "weights" in between:
            engine.quarantine()
            engine.wake(STATE, 0)
        bench.listener.drain()


@pytest.mark.parametrize("released", [(), ("kv_cache",), ("kv_cache", "weights")])
def test_requests_continue_over_slices_with_equal_tokens(
    bench: Bench, released: tuple[str, ...]
) -> None:
    expected = Listener(built_in("eager", seed=1)).run(request(1, max_new=12, temperature=0.0))[1]
    bench.engine.update_weights(STATE, 0)
    begun = len(bench.server.calls)
    bench.engine.end_slice()  # as before the first slice
    bench.engine.submit([request(1, max_new=12, temperature=0.0)])
    assert v0_5.GENERATE not in get_paths(bench), "sent without a slice"
    run_slices(bench, released)
    heard = bench.listener.outputs[1]
    assert heard.tokens == expected.tokens and set(heard.versions) == {0}
    paths = [
        path
        for path in get_paths(bench)[begun:]
        if path in (v0_5.GENERATE, v0_5.PAUSE, v0_5.CONTINUE, v0_5.RELEASE, v0_5.RESUME)
    ]
    assert paths.count(v0_5.GENERATE) > 1
    cycle = [v0_5.PAUSE, *[v0_5.RELEASE] * len(released), *[v0_5.RESUME] * len(released)]
    first = paths.index(v0_5.GENERATE) + 1
    assert paths[first : first + len(cycle) + 2] == [*cycle, v0_5.CONTINUE, v0_5.GENERATE]


def test_each_tag_is_released_and_restored_once(bench: Bench) -> None:
    engine = bench.engine
    engine.end_slice()
    weights, cache = engine.collect_weights(), engine.collect_cache()
    for memory in (cache, cache, weights):
        memory.release()
    assert bodies(bench, v0_5.RELEASE) == [{"tags": ["kv_cache"]}, {"tags": ["weights"]}]
    cache.reallocate()
    cache.reallocate()
    assert bodies(bench, v0_5.RESUME) == [{"tags": ["kv_cache"]}]
    engine.sleep()  # releases what is left
    assert bodies(bench, v0_5.RELEASE)[2:] == [{"tags": ["kv_cache"]}]
    engine.resume()
    engine.wake(STATE, 3)
    assert bodies(bench, v0_5.RESUME)[1:] == [{"tags": ["weights", "kv_cache"]}]


def test_empty_engine_has_no_work_for_a_slice_and_a_waiting_one_has(bench: Bench) -> None:
    bench.engine.end_slice()
    assert not bench.engine.step() and not bench.engine.num_waiting
    bench.engine.end_slice()
    bench.engine.submit([request(1, max_new=4)])
    waiting: int = bench.engine.num_waiting
    assert waiting == 1
    assert bench.engine.step()


@pytest.mark.parametrize("keeps_weights", [True, False])
async def test_released_weights_are_sent_again_unless_the_server_backs_them_up(
    keeps_weights: bool, tmp_path: Path
) -> None:
    about = {"enable_weights_cpu_backup": keeps_weights}
    sizes = {"weights": 3 << 20, "kv_cache": 5 << 20}
    bench = Bench(tmp_path, about=about, memory_bytes=sizes)
    mesh = alone("engine/g0.0", SystemClock(), Random(1), SystemHost())
    slices = SliceClient(mesh, "worker/w0", "g0.0", 1, enabled=True)
    service = EngineService(mesh, bench.engine, lambda action: action(), time_slices=slices)

    async def run_commands() -> None:
        while True:
            service.run_commands(True)
            await asyncio.sleep(0.001)

    running = asyncio.create_task(run_commands())
    try:
        bench.engine.update_weights(STATE, 0)
        bench.engine.end_slice()
        service.weights.loaded_bytes = sizes["weights"]
        states = await service.kinds.move_kinds(MoveKinds(1, "drop", ["parameters"], ""))
        by_kind = {one.kind: (one.accelerator_bytes, one.size_bytes) for one in states.kinds}
        assert by_kind == {"parameters": (0, 3 << 20), "kv_cache": (5 << 20, 5 << 20)}
        await service.kinds.move_kinds(MoveKinds(2, "load", ["parameters"], ""))
        assert bench.engine.version == (0 if keeps_weights else NO_VERSION)
        if keeps_weights:
            expected = Listener(built_in("eager", seed=1)).run(request(1, temperature=0.0))[1]
            heard = bench.listener.run(request(1, temperature=0.0))[1]
            assert heard.tokens == expected.tokens
            assert get_paths(bench).count(v0_5.FROM_DISK) == 2, "none after the release"
        assert bodies(bench, v0_5.RELEASE) == bodies(bench, v0_5.RESUME) == [{"tags": ["weights"]}]
    finally:
        running.cancel()
        await service.stop()
        bench.close()


def test_weights_are_backed_up_where_they_fit_into_host_memory() -> None:
    assert prefers_weights_backup(30 << 30, 38 << 30)
    assert not prefers_weights_backup(30 << 30, (38 << 30) - 1)
    how = LaunchConfig("python", Path("m"), 4, 64, device="cuda", backs_up_weights=True)
    assert BACKUP_FLAG in how.build_arguments(PortBlock(20000))
    assert BACKUP_FLAG not in replace(how, device="cpu").build_arguments(PortBlock(20000))
    assert not v0_5.keeps_released_weights({})
    shared = {"enable_weights_cpu_backup": True, "weight_cache_mode": "daemon"}
    assert not v0_5.keeps_released_weights(shared)


def test_bytes_by_tag_are_those_that_the_server_reports() -> None:
    about = {"internal_states": [{"memory_usage": {"weight": 1.5, "kvcache": 2.25}}]}
    assert v0_5.parse_memory_bytes(about) == {"weights": 3 << 29, "kv_cache": 9 << 28}
    assert v0_5.parse_memory_bytes({}) == {"weights": 0, "kv_cache": 0}
