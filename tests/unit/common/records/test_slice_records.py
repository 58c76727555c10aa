"""Profiles and traces that a role process records of its pieces."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from meshrl.common.api.calls.role import KindState, KindStates
from meshrl.common.base.errors import Fenced
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, TrackingConfig
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.instances.time_slices import SliceClient, UsedSlice
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.line_files import TraceWriter
from meshrl.common.records.slice_records import WRITE_INTERVAL_S, SliceRecorder
from meshrl.common.state.pool.store.profile_rows import read_profile
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.redis.client import StateClient
from meshrl.sim.redis.simulated_state import open_simulated_state_as
from meshrl.sim.virtual_loop import VirtualClock
from tests.meshes import alone
from tests.profiles import KEY
from tests.simulated_host import SimulatedHost, virtual

PLACEMENT = Placement("g0", "g0.1", "tiny", 1)


class FaultyState(StateClient):
    """Redis client that may reject the writes of profiles."""

    is_failing = False

    async def run_mesh_script(self, script: str, /, **args: Any) -> Any:
        if self.is_failing and script == "write_profile":
            raise Fenced("no write")
        return await super().run_mesh_script(script, **args)


class Bench:
    """Processes of one kind, one after another or together."""

    def __init__(self, clock: VirtualClock, random: Random, root: Path) -> None:
        self.clock, self._random = clock, random
        self.state = open_simulated_state_as(FaultyState, clock)
        config = JobConfig(name="tiny", tracking=TrackingConfig(trace=1.0))
        self._job = JobData("tiny", config, root / "bundle", root)

    def create(self, kinds: KindController | None = None) -> tuple[SliceRecorder, SliceClient]:
        host = SimulatedHost(self.clock, self._random.child("host"))
        mesh: Mesh = alone("engine/g0.1", self.clock, self._random, host, state=self.state)
        time_slices = SliceClient(mesh, "", "g0.1", 1)
        traces = TraceWriter(mesh, self._job, "slices-g0.1")
        return SliceRecorder(mesh, KEY, PLACEMENT, time_slices, traces, kinds), time_slices

    async def compute(self, time_slices: SliceClient, *seconds: float) -> None:
        for one in seconds:
            async with time_slices.time_slice("generate"):
                await self.clock.sleep(one)


@virtual
async def test_process_starts_from_the_profile_of_an_earlier_one(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    bench = Bench(clock, random, tmp_path)
    recorder, time_slices = bench.create()
    await recorder.start()
    assert time_slices.estimate_s("generate") == 0.0
    await bench.compute(time_slices, 0.25, 2.0, 0.5)  # without time slices: nothing is shared
    await recorder.close()
    later, time_slices = bench.create()
    await later.start()
    assert time_slices.estimate_s("generate") == 2.0
    await bench.compute(time_slices, 0.5)
    assert time_slices.estimate_s("generate") == pytest.approx(0.95 * 2.0)
    await later.close()
    found = (await read_profile(bench.state, KEY)).profile["generate"]
    assert round(found.durations.count) == 4
    assert found.gaps.max_s == 0.0


@virtual
async def test_samples_are_written_periodically_by_two_processes(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    bench = Bench(clock, random, tmp_path)
    both = [bench.create() for _ in range(2)]
    for recorder, _ in both:
        await recorder.start()
    await asyncio.gather(*(bench.compute(slices, 1.0, 1.0) for _, slices in both))
    assert (await read_profile(bench.state, KEY)).revision == 0
    await clock.sleep(WRITE_INTERVAL_S)
    row = await read_profile(bench.state, KEY)
    assert (row.revision, round(row.profile["generate"].durations.count)) == (2, 4)
    for recorder, _ in both:
        await recorder.close()
    assert (await read_profile(bench.state, KEY)).revision == 2  # nothing was left to write


@virtual
async def test_samples_are_retained_until_a_write_succeeds(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    bench = Bench(clock, random, tmp_path)
    recorder, time_slices = bench.create()
    await recorder.start()
    bench.state.is_failing = True
    await bench.compute(time_slices, 1.0)
    await clock.sleep(2 * WRITE_INTERVAL_S)
    bench.state.is_failing = False
    await bench.compute(time_slices, 3.0)
    await recorder.close()
    found = (await read_profile(bench.state, KEY)).profile["generate"].durations
    assert found.count == pytest.approx(2.0, abs=0.01) and found.max_s == 3.0


class Sizes:
    """Table of kinds with fixed sizes."""

    def describe_kinds(self) -> KindStates:
        sizes = {"parameters": 100, "optimizer": 200, "gradients": 0}
        return KindStates(
            [KindState(kind, size, 0, 0, 0, False, False) for kind, size in sizes.items()]
        )


@virtual
async def test_profile_has_the_bytes_of_the_kinds_that_a_function_needs(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    bench = Bench(clock, random, tmp_path)
    recorder, time_slices = bench.create(cast(Any, Sizes()))
    await recorder.start()
    async with time_slices.time_slice("optim_step"):  # needs all
        await clock.sleep(1.0)
    async with time_slices.time_slice("sync", kinds=("parameters",)):
        await clock.sleep(1.0)
    await recorder.close()
    found = (await read_profile(bench.state, KEY)).profile
    assert found["optim_step"].bytes_by_kind == {"parameters": 100, "optimizer": 200}
    assert found["sync"].bytes_by_kind == {"parameters": 100}


@virtual
async def test_failed_piece_is_no_sample(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    recorder, time_slices = Bench(clock, random, tmp_path).create()
    await recorder.start()
    with pytest.raises(ValueError, match="broken"):
        async with time_slices.time_slice("generate"):
            raise ValueError("broken")
    assert time_slices.profile.take_batch() == {}
    await recorder.close()


@virtual
async def test_released_slice_is_traced_with_its_wait(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    recorder, time_slices = Bench(clock, random, tmp_path).create()
    await recorder.start()
    began = clock.wall()
    await clock.sleep(3.0)
    used = UsedSlice("sync", clock.monotonic() - 3.0, clock.monotonic() - 2.0, clock.monotonic())
    time_slices.on_release(replace(used, switch_s=0.25, loaded_bytes=8, hidden_bytes=4))
    await recorder.close()
    rows = (tmp_path / "trace" / "slices-g0.1.jsonl").read_text().splitlines()
    [row] = [json.loads(line) for line in rows]
    assert row["at"] == pytest.approx(began)
    assert row["parts"] == ["wait", 750.0, "switch", 250.0, "slice", 2000.0]
    assert (row["loaded_bytes"], row["hidden_bytes"]) == (8, 4)
    assert (row["gang"], row["instance"], row["function"]) == ("g0", "g0.1", "sync")
