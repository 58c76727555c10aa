"""How far a core is, as its worker reads it while it begins."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from meshrl.common.api.weights import Group
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import ModelConfigSection
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.initial.beginning import fresh_learner
from meshrl.services.trainer.ranks.rank import Rank
from tests.meshes import alone
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.steps.groups_under_test import group, job

DIGITS = Path(__file__).parents[3] / "mesh/jobs/digits.toml"


def core(tmp_path: Path) -> TrainerCore:
    described = tomllib.loads(DIGITS.read_text())["model"]["config"]
    config = replace(job("grpo"), model=ModelConfigSection(config=described))
    clock = SystemClock()
    mesh = alone("trainer/j", clock, Random(0), SystemHost())
    make_tokenizer(tmp_path)
    data = JobData("j", config, tmp_path, tmp_path)
    return TrainerCore(
        mesh,
        data,
        Seat("g0", "g0", data.id, 1, core=True),
        Compute(mesh, data.id, Rank.alone(fresh_learner(data))),
    )


async def test_each_replayed_step_and_each_step_of_a_warm_start_shows(tmp_path: Path) -> None:
    made = core(tmp_path)
    groups = [group([1.0, 0.0], number=number, version=0) for number in range(2)]

    async def arrive() -> AsyncIterator[Group]:
        for one in groups:
            yield one

    updates = (await made._make_step(1, "m0", made.data.config).run(arrive())).updates
    seen = [made.stats().progress]
    for _ in range(2):
        await made._make_step(1, "", made.data.config).replay(groups, updates)
        seen.append(made.stats().progress)
    made.first.fraction = 0.5
    seen.append(made.stats().progress)
    assert all(before != after for before, after in pairwise(seen)), seen
