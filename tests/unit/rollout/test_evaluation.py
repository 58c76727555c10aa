"""An evaluation is of one version: what another one has had a part in is in no figure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.config import BudgetConfig, EvaluationConfig, EvaluationDataset, JobConfig
from common.evaluations import Plan
from common.jobdata import JobData
from services.rollout.evaluation import Evaluation
from services.rollout.job import ShardJob
from services.rollout.trajectory import Ending, Trajectory

VERSION, LINEAGE = 4, 1
PLAN = Plan("step-4", VERSION, ("sampled", "greedy"))


class Recorded(Evaluation):
    """Keeps what it would have recorded."""

    result: dict[str, Any]
    value: float | None

    async def _record(self, result: dict[str, Any], value: float | None) -> None:
        self.result, self.value = result, value


def evaluation(tmp_path: Path, outcomes: dict[tuple[int, int, float], Any]) -> Recorded:
    """On two held-out problems, and a set of two with two samples of each; `outcomes` are
    (reward or None, version) by prompt, member and temperature, else reward 1 at the version.
    """
    (tmp_path / "more.jsonl").write_text('{"n": 0}\n{"n": 1}\n{"n": 2}\n')
    dataset = EvaluationDataset(
        "more", "more.jsonl", problems=2, samples=2, temperature=0.5, pass_at=[1, 2]
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

    async def run(t: Trajectory, row: dict[str, Any]) -> None:
        assert t.id not in seen and not t.recorded and row["n"] == t.prompt
        seen.add(t.id)
        reward, version = outcomes.get((t.prompt, t.member, t.temperature), (1.0, VERSION))
        t.begin([1, 2])
        sampled = np.array([3, 4], np.int32)
        t.sampled(sampled, np.zeros(2, np.float32), np.array([VERSION, version], np.int32))
        t.ending = Ending("done", reward)

    shard.run = run  # type: ignore[method-assign]
    shard.mesh = SimpleNamespace()  # type: ignore[assignment]
    return Recorded(shard, PLAN, LINEAGE)


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
    assert made.value == made.result["figures"]["more.pass@1"]
    assert (made.result["sampled"], made.result["greedy"]) == (0.5, 1.0)
    assert made.result["length_mean"] == 4.0


async def test_a_figure_that_no_sample_speaks_for_is_left_out(tmp_path: Path) -> None:
    every = {(n, m, 0.5): (None, VERSION) for n in range(2) for m in range(2)}
    made = evaluation(tmp_path, every)
    await made.run()
    assert not [name for name in made.result["figures"] if name.startswith("more.")]
    assert made.value is None
