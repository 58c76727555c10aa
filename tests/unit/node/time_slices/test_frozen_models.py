"""Frozen models that share an accelerator by time slices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from meshrl.common.api.calls.role import MoveKinds
from meshrl.common.api.scoring import ScoreBatch
from meshrl.common.base.random import Random
from meshrl.common.state.pool.workers.rows import TensorKind
from meshrl.services.scoring.frozen_models import BuildModels, FrozenModel, FrozenModels
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from tests.unit.common.generation.engines_under_test import built_in
from tests.unit.node.time_slices.test_slice_scheduler import Stage

BATCH = ScoreBatch(["reference"], np.array([8], np.int32), np.arange(8, dtype=np.int32))


def test_models_are_built_in_a_slice_and_score_the_same_after_all_their_memory_has_left(
    tmp_path: Path,
) -> None:
    events: list[str] = []
    engine = built_in("eager", 1, 32, 0)
    size_bytes = engine.collect_weights().total_bytes + engine.cache_size_bytes

    async def build() -> dict[str, FrozenModel]:
        events.append("built")
        return {"reference": FrozenModel(engine, size_bytes=size_bytes)}

    async def read() -> BuildModels:
        events.append("read")
        return build

    async def main(clock: VirtualClock, random: Random) -> None:
        stage = Stage(clock, random)
        await stage.workers()
        (_, core), (mesh, slices) = [await stage.join_instance(i) for i in (1, 0)]
        await core.acquire_slice("train_step")
        served = FrozenModels(mesh, read, slices)
        served.kinds.set_targets("", str(tmp_path / "kept"))
        loading = asyncio.create_task(served.load())
        await clock.sleep(1.0)
        assert events == ["read"], "another instance computes"
        core.release_slice(1, "train_step", 1.0)
        await loading
        assert events == ["read", "built"]
        [kind] = served.kinds.describe_kinds().kinds
        assert kind.accelerator_bytes == size_bytes > engine.cache_size_bytes > 0
        before = (await served.score(BATCH)).scores[0].logprobs
        parameters = [str(TensorKind.PARAMETERS)]
        left = await served.kinds.move_kinds(MoveKinds(1, "offload", parameters, "disk"))
        assert left.kinds[0].accelerator_bytes == 0 < left.kinds[0].disk_bytes < size_bytes
        after = (await served.score(BATCH)).scores[0].logprobs
        np.testing.assert_array_equal(before, after)
        assert events == ["read", "built"], "a copy is loaded, not the source"

    run_virtual(main, limit_s=600.0)
