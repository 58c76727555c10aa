"""An evaluation is of one version: what another one has had a part in is in no figure."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded, StateUnavailable
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import BudgetConfig, EvaluationConfig, EvaluationDataset, JobConfig
from meshrl.common.job.evaluation_plan import EvaluationPlan
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.telemetry.logs import Telemetry
from meshrl.common.state.redis.client import State
from meshrl.services.rollout.evaluation import EvaluationRun
from meshrl.services.rollout.job import ShardJob
from meshrl.services.rollout.samples import Samples
from meshrl.services.rollout.trajectories.trajectory import Ending, Trajectory
from meshrl.services.rollout.trajectories.transcript import Transcript
from tests.stories import story_on
from tests.unit.rollout.test_lineages import EVERY, World, in_world

VERSION, LINEAGE = 4, 1
PLAN = EvaluationPlan("step-4", VERSION, ("sampled", "greedy"))


class Recorded(EvaluationRun):
    """Keeps what it would have recorded."""

    result: dict[str, Any]
    value: float | None
    under_way: set[int]  # trajectories

    async def _record(self, result: dict[str, Any], value: float | None) -> None:
        self.result, self.value = result, value


def evaluation(
    tmp_path: Path, outcomes: dict[tuple[int, int, float], Any], problems: int = 2
) -> Recorded:
    """On two held-out problems, and a set of `problems` with two samples of each; `outcomes` are
    (reward or None, version) by prompt, member and temperature, else reward 1 at the version. One
    may be an error instead, or an event to wait for.
    """
    (tmp_path / "more.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(problems + 1)))
    dataset = EvaluationDataset(
        "more", "more.jsonl", problems=problems, samples=2, temperature=0.5, pass_at=[1, 2]
    )
    config = JobConfig(
        evaluation=EvaluationConfig(problems=2, datasets=[dataset], best="more.pass@1"),
        budget=BudgetConfig(steps=9),
    )
    shard = ShardJob.__new__(ShardJob)
    shard.config = config
    shard.job = JobData("calc", config, tmp_path, tmp_path)
    shard.held_out = [{"n": 0}, {"n": 1}, {"n": 2}]
    seen: set[int] = set()
    under_way: set[int] = set()

    async def run(t: Trajectory, row: dict[str, Any]) -> None:
        assert t.id not in seen and not t.recorded and row["n"] == t.prompt
        seen.add(t.id)
        under_way.add(t.id)
        try:
            outcome = outcomes.get((t.prompt, t.member, t.temperature), (1.0, VERSION))
            if isinstance(outcome, Exception):
                raise outcome
            if isinstance(outcome, asyncio.Event):
                await outcome.wait()
        finally:
            under_way.discard(t.id)
        reward, version = outcome
        t.begin([1, 2])
        sampled = np.array([3, 4], np.int32)
        t.sampled(sampled, np.zeros(2, np.float32), np.array([VERSION, version], np.int32))
        t.ending = Ending("done", reward)

    shard.runner = SimpleNamespace(run=run)  # type: ignore[assignment]
    shard.mesh = SimpleNamespace(  # type: ignore[assignment]
        name="rollout/job/0",
        clock=SystemClock(),
        host=SystemHost(),
        telemetry=Telemetry("rollout/job/0"),
    )
    shard.samples = Samples(shard.mesh, shard.job, Transcript(str, (), ()))
    made = Recorded(shard, PLAN, LINEAGE)
    made.under_way = under_way
    return made


async def test_figures_are_of_samples_of_the_version_alone(tmp_path: Path) -> None:
    made = evaluation(
        tmp_path,
        {
            (0, 0, 1.0): (0.0, VERSION),
            (1, 0, 0.0): (0.0, VERSION + 1),  # greedy, by a newer version in the end
            (0, 1, 0.5): (0.0, VERSION),
            (1, 0, 0.5): (None, VERSION),
        },
    )
    await made.run()
    assert made.result["figures"] == pytest.approx(
        {
            "held_out.sampled": 0.5,
            "held_out.greedy": 1.0,
            "more.mean": 2 / 3,
            "more.pass@1": (0.5 + 1.0) / 2,
            "more.pass@2": 1.0,
        }
    )
    assert (made.result["mixed"], made.result["failed"]) == (1, 1)
    assert (made.result["sampled"], made.result["greedy"]) == (0.5, 1.0)
    assert made.result["length_mean"] == 4.0
    shares = made.result["shares"]
    assert (shares["held_out.sampled"], shares["held_out.greedy"]) == (1.0, 0.5)
    assert shares["more.mean"] == shares["more.pass@1"] == 3 / 4
    assert made.result["reasons"] == {"of another version": 1, "failed": 1}


@pytest.mark.parametrize("lost", [(None, VERSION), (1.0, VERSION + 1)], ids=["failed", "mixed"])
@pytest.mark.parametrize("missing", [0, 2, 3])
async def test_a_version_is_best_only_by_nearly_all_samples(
    missing: int, lost: tuple[float | None, int], tmp_path: Path
) -> None:
    outcomes: dict[tuple[int, int, float], Any] = {(n, 0, 0.5): lost for n in range(missing)}
    outcomes[0, 0, 1.0] = (None, VERSION)  # of another set
    made = evaluation(tmp_path, outcomes, problems=20)
    await made.run()
    assert made.result["figures"]["more.pass@1"] == 1.0
    assert made.value == (None if missing > 2 else 1.0), "at most 2 of 40 samples are missing"


async def test_an_error_in_one_trajectory_leaves_none_of_the_others_under_way(
    tmp_path: Path,
) -> None:
    error = DeadlineExceeded("an engine for a trajectory")
    made = evaluation(tmp_path, {(0, 0, 1.0): asyncio.Event(), (1, 0, 1.0): error})
    with pytest.raises(DeadlineExceeded):
        await made.run()
    assert made.under_way == set()


class AwayFor(State):
    """A simulated Redis that is away for one script."""

    script = ""

    async def run(self, script: str, keys: list[str], *args: Any) -> Any:
        if script == self.script:
            raise StateUnavailable("away")
        return await super().run(script, keys, *args)


@story_on(in_world)
async def test_nothing_is_sampled_again_because_redis_was_away_for_the_result(world: World) -> None:
    world.going.set()
    for _ in range(EVERY):
        await world.train(lineage=0)
    state = AwayFor(world.state.url, world.state.client, world.state._sync)
    world.mesh.state, state.script = state, "evaluation"
    await world.turn()
    await world.clock.sleep(60.0)
    assert await world.results() == {}
    state.script = ""
    await world.clock.sleep(2.0)
    assert list(await world.results()) == ["step-2"]
    assert len(world.sessions) == 1


async def test_a_figure_that_no_sample_speaks_for_is_left_out(tmp_path: Path) -> None:
    every = {(n, m, 0.5): (None, VERSION) for n in range(2) for m in range(2)}
    made = evaluation(tmp_path, every)
    await made.run()
    assert not [name for name in made.result["figures"] if name.startswith("more.")]
    assert made.result["shares"]["more.mean"] == 0.0, "and is said to be lost"
    assert made.value is None
