"""An engine that cannot have the current version waits for its trainer while that can help."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.common.base.digest import digest_of
from meshrl.common.base.errors import ConfigError
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import ModelConfigSection
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.engine.weights.versions import PATIENCE_S, Versions
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.initial.beginning import fresh_learner
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.versions.publishing import VersionIdentity
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.steps.groups_under_test import job
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

JOBS = Path(__file__).parents[2] / "mesh/jobs"
LACKING = digest_of(b"a version that the store does not hold")
LOOK_S = 100.0


async def looks(bench: StoreBench, versions: Versions, seconds: float) -> None:
    for _ in range(int(seconds / LOOK_S)):
        assert await versions.received(LACKING) is None
        await bench.clock.sleep(LOOK_S)


def test_a_trainer_that_replays_or_holds_its_next_version_is_waited_for(tmp_path: Path) -> None:
    described = tomllib.loads((JOBS / "digits.toml").read_text())["model"]["config"]
    config = replace(job("grpo"), model=ModelConfigSection(config=described))
    make_tokenizer(tmp_path)
    data = JobData("other", config, tmp_path, tmp_path)

    async def story(bench: StoreBench) -> None:
        trainer, engine = bench.mesh("trainer/other", "trainer"), bench.mesh("engine/g0", "engine")
        seat = Seat("g1", "g1", data.id, 1, core=True)
        core = TrainerCore(
            trainer, data, seat, Compute(trainer, data.id, Rank.alone(fresh_learner(data)))
        )
        await trainer.join(core)
        await engine.join(None)
        versions = Versions(engine, "other")
        await looks(bench, versions, 2 * PATIENCE_S)  # it is not ready

        core.ready, core.position.weights = True, VersionIdentity(LACKING)
        core.enter("updating", 1)
        await looks(bench, versions, 2 * PATIENCE_S)

        core.position.version = 1  # nothing has changed the weights since, and they are others
        with pytest.raises(ConfigError, match="cannot be had"):
            await looks(bench, versions, 2 * PATIENCE_S)
        for mesh in (engine, trainer):
            await mesh.leave()

    on_store(tmp_path, story)


@story_on(on_store, "tmp_path")
async def test_a_version_that_the_job_has_gone_on_from_is_not_waited_for(bench: StoreBench) -> None:
    await bench.submit()
    newest = await bench.begin()
    engine = bench.mesh("engine/g0", "engine")
    await engine.join(None)
    versions = Versions(engine, JOB)
    await looks(bench, versions, 2 * PATIENCE_S)  # nobody could write that one again
    image = await versions.received(newest)
    assert image is not None and JOB in image.tensors
    await engine.leave()
