"""Evaluates one weight version on the engines of the job: the held-out set and the other sets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshrl.common.job.evaluation_plan import HELD_OUT, EvaluationPlan, comparable, estimates, mean
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.mesh.runtime.tasks import all_of
from meshrl.common.state import jobs
from meshrl.services.rollout.job import ShardJob
from meshrl.services.rollout.runner import EVALUATION_GROUP
from meshrl.services.rollout.trajectories.failures import OTHER
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory

TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}  # the modes in which the held-out set is evaluated
SETS = 64  # datasets and modes of one version that have groups of their own
LINEAGE_BIT, LINEAGES = 45, 32  # where a lineage shows in their numbers, and how many differ


@dataclass(slots=True)
class DrawnSet:
    rewards: list[list[float]]  # without samples that failed or ran on into another version
    lengths: list[int] = field(default_factory=list)
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why, by kind
    mixed: int = 0  # samples that another version has had a part in

    @property
    def every(self) -> list[float]:
        return [reward for problem in self.rewards for reward in problem]

    @property
    def share(self) -> float:
        """Of its samples, those that have a say in its figures."""
        return len(self.every) / max(1, len(self.lengths))

    @property
    def comparable(self) -> bool:
        return comparable(self.failed + self.mixed, len(self.lengths))


class EvaluationRun:
    """One plan, carried out; groups are off the books and numbered by version and set."""

    def __init__(self, shard: ShardJob, plan: EvaluationPlan, lineage: int) -> None:
        """`lineage` is that of the plan's version."""
        self._shard, self._plan, self._lineage = shard, plan, lineage
        self._sets = 0
        self._drawn: list[DrawnSet] = []
        self._said: dict[str, tuple[float, DrawnSet]] = {}  # figures, and what they are of

    async def run(self) -> dict[str, Any]:
        """The result, recorded under the plan's tag: figures by name, and how they came about."""
        shard, plan = self._shard, self._plan
        settings = shard.config.evaluation
        problems = shard.held_out[: settings.problems]
        result: dict[str, Any] = {"version": plan.version, "problems": len(problems)}
        shares: dict[str, float] = {}
        for mode in plan.modes if problems else ():
            drawn = await self._draw(f"{HELD_OUT}.{mode}", problems, 1, TEMPERATURES[mode])
            shares[f"{HELD_OUT}.{mode}"] = drawn.share
            if drawn.every:
                result[mode] = mean(drawn.every)
                self._said[f"{HELD_OUT}.{mode}"] = result[mode], drawn
        for dataset in settings.datasets:
            rows = shard.job.rows_of(dataset.path)[: dataset.problems]
            drawn = await self._draw(dataset.name, rows, dataset.samples, dataset.temperature)
            found = estimates(dataset, drawn.rewards)
            shares |= dict.fromkeys(found or [f"{dataset.name}.mean"], drawn.share)
            for name, figure in found.items():
                self._said[name] = figure, drawn
        lengths = [length for drawn in self._drawn for length in drawn.lengths]
        result |= {
            "figures": {name: figure for name, (figure, _) in self._said.items()},
            "failed": sum(drawn.failed for drawn in self._drawn),
            "mixed": sum(drawn.mixed for drawn in self._drawn),
            "shares": shares,
            "reasons": dict(sum((drawn.reasons for drawn in self._drawn), Counter())),
            "length_mean": float(np.mean(lengths)) if lengths else 0.0,
        }
        value = self._value(settings.best)
        await patiently(shard.mesh.clock, lambda: self._record(result, value))
        return result

    def _value(self, best: str) -> float | None:
        """The figure that makes a version the best one; None: it is not to be compared."""
        if best not in self._said:
            return None
        figure, drawn = self._said[best]
        if drawn.comparable:
            return figure
        self._shard.mesh.telemetry.log.warning(
            "not compared with the best version: too many samples have no say",
            figure=best,
            tag=self._plan.tag,
            samples=len(drawn.lengths),
            failed=drawn.failed,
            mixed=drawn.mixed,
        )
        return None

    async def _draw(
        self, name: str, rows: Sequence[dict[str, Any]], samples: int, temperature: float
    ) -> DrawnSet:
        """`samples` trajectories of each row of a set, on engines at the version or newer."""
        shard, version = self._shard, self._plan.version
        base = EVALUATION_GROUP + (((version + 1) * SETS + self._sets) << 20)
        # Engines must not take the keys and values of one lineage's evaluation for the next one's.
        base += self._lineage % LINEAGES << LINEAGE_BIT
        self._sets += 1
        every = [
            [
                Trajectory(base + i, member, i, version, shard.seed_of(base + i, member))
                for member in range(samples)
            ]
            for i in range(len(rows))
        ]
        for t in itertools.chain(*every):
            t.recorded, t.temperature = False, temperature
        each = [(t, row) for ts, row in zip(every, rows, strict=True) for t in ts]
        await all_of(shard.runner.run(t, row) for t, row in each)
        drawn = DrawnSet([[] for _ in rows])
        for rewards, ts in zip(drawn.rewards, every, strict=True):
            for t in ts:
                drawn.lengths.append(t.length)
                if t.ending is None or t.ending.reward is None:
                    drawn.failed += 1
                    drawn.reasons[t.ending.kind or OTHER if t.ending else OTHER] += 1
                elif (t.versions[t.versions != NOT_SAMPLED] != version).any():
                    drawn.mixed += 1
                    drawn.reasons["of another version"] += 1
                else:
                    rewards.append(t.ending.reward)
        self._drawn.append(drawn)
        shard.samples.evaluated(self._plan.tag, name, version, each)
        return drawn

    async def _record(self, result: dict[str, Any], value: float | None) -> None:
        mesh = self._shard.mesh
        await jobs.record_evaluation(
            mesh.state,
            self._shard.job.id,
            jobs.RecordedResult(self._plan.tag, self._lineage, self._plan.version, result, value),
            mesh.name,
            mesh.token,
        )


async def evaluate(shard: ShardJob, plan: EvaluationPlan, lineage: int) -> None:
    """Carries out a plan for a version of a lineage, unless a predecessor has."""
    recorded = await patiently(
        shard.mesh.clock, lambda: jobs.evaluations(shard.mesh.state, shard.job.id)
    )
    if plan.tag not in {e["tag"] for e in recorded}:
        await EvaluationRun(shard, plan, lineage).run()
