"""Evaluation of one weight version on the engines of the job: the held-out set and the other
sets.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshrl.common.job.config import EvaluationSampling
from meshrl.common.job.evaluation_plan import (
    HELD_OUT,
    LOSS,
    LOSS_METRIC,
    EvaluationPlan,
    compute_figures,
    compute_mean,
    is_comparable,
    is_loss_due,
)
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.mesh.runtime.task_groups import run_all
from meshrl.common.state import jobs, steps
from meshrl.services.rollout.runner import FIRST_EVALUATION_GROUP
from meshrl.services.rollout.shard_job import ShardJob, score_over_groups
from meshrl.services.rollout.trajectories.failures import OTHER_KIND
from meshrl.services.rollout.trajectories.trajectory import NOT_SAMPLED, Trajectory

MAX_SETS = 64  # datasets and modes of one version with their own groups
LINEAGE_BIT, LINEAGE_COUNT = (
    45,
    32,
)  # bit position of a lineage in group numbers, and number of distinct lineages


@dataclass(slots=True)
class SampledSet:
    rewards: list[list[float]]  # without failed samples and samples of mixed versions
    lengths: list[int] = field(default_factory=list)
    failed_samples: int = 0
    failure_reasons: Counter[str] = field(default_factory=Counter)  # by kind of failure
    mixed_samples: int = 0  # samples with tokens of another version
    metrics: dict[str, list[float]] = field(default_factory=dict)  # of the counted samples

    @property
    def all_rewards(self) -> list[float]:
        return [reward for problem in self.rewards for reward in problem]

    @property
    def valid_share(self) -> float:
        """Share of its samples that count in its figures."""
        return len(self.all_rewards) / max(1, len(self.lengths))

    @property
    def is_comparable(self) -> bool:
        return is_comparable(self.failed_samples + self.mixed_samples, len(self.lengths))


class EvaluationRun:
    """Run of one evaluation plan. Its groups are not recorded, and are numbered by version and
    set.
    """

    def __init__(self, shard: ShardJob, plan: EvaluationPlan, lineage: int) -> None:
        """Prepare a run. `lineage` is the lineage of the plan's version."""
        self._shard, self._plan, self._lineage = shard, plan, lineage
        self._set_count = 0
        self._sampled_sets: list[SampledSet] = []
        self._figures: dict[str, tuple[float, SampledSet]] = {}  # figures with their samples
        self._metrics: dict[str, dict[str, float]] = {}  # means of rewards' metrics, by set

    async def run(self) -> dict[str, Any]:
        """Evaluate all sets; record and return the figures by name, with their details, under the
        plan's tag.
        """
        shard, plan = self._shard, self._plan
        settings = shard.config.evaluation
        problems = shard.held_out[: settings.problems]
        result: dict[str, Any] = {"version": plan.version, "problems": len(problems)}
        shares: dict[str, float] = {}
        for mode in plan.sampling_modes if problems else ():
            sampling: EvaluationSampling = settings
            if mode == "greedy":
                sampling = replace(settings, samples=1, temperature=0.0, pass_at=[])
            name = f"{HELD_OUT}.{mode}"
            shares |= await self._evaluate_set(name, name, problems, sampling)
            if name in self._figures:
                result[mode] = self._figures[name][0]
        for dataset in settings.datasets if plan.sampling_modes else ():
            rows = shard.job.read_file_rows(dataset.path)[: dataset.problems]
            shares |= await self._evaluate_set(dataset.name, f"{dataset.name}.mean", rows, dataset)
        loss = await self._read_loss()
        lengths = [length for drawn in self._sampled_sets for length in drawn.lengths]
        result |= {
            "figures": {name: figure for name, (figure, _) in self._figures.items()}
            | ({} if loss is None else {LOSS: loss}),
            "failed": sum(drawn.failed_samples for drawn in self._sampled_sets),
            "mixed": sum(drawn.mixed_samples for drawn in self._sampled_sets),
            "shares": shares,
            "metrics": self._metrics,
            "reasons": dict(
                sum((drawn.failure_reasons for drawn in self._sampled_sets), Counter())
            ),
            "length_mean": float(np.mean(lengths)) if lengths else 0.0,
        }
        value = self._choose_best_value(settings.best)
        if settings.best == LOSS and loss is not None:
            value = -loss
        await retry(shard.mesh.clock, lambda: self._record(result, value))
        return result

    async def _read_loss(self) -> float | None:
        """Return the held-out loss that the core has committed with the version, if any."""
        version = self._plan.version
        if not is_loss_due(self._shard.config, version):
            return None
        state, job = self._shard.mesh.state, self._shard.job.id
        rows = await retry(
            self._shard.mesh.clock, lambda: steps.read_step_rows(state, job, version - 1)
        )
        return next((row.get(LOSS_METRIC) for row in rows if row["step"] == version), None)

    async def _evaluate_set(
        self,
        name: str,
        mean_name: str,
        rows: Sequence[dict[str, Any]],
        sampling: EvaluationSampling,
    ) -> dict[str, float]:
        """Sample a set, add its figures, and return the share of valid samples of each."""
        drawn = await self._sample_set(name, rows, sampling)
        found = compute_figures(mean_name, sampling, drawn.rewards)
        for figure_name, figure in found.items():
            self._figures[figure_name] = figure, drawn
        means = {metric: compute_mean(values) for metric, values in sorted(drawn.metrics.items())}
        self._metrics |= {name: means} if means else {}
        return dict.fromkeys(found or [mean_name], drawn.valid_share)

    def _choose_best_value(self, best: str) -> float | None:
        """Return the figure that selects the best version; None if it is not comparable."""
        if best not in self._figures:
            return None
        figure, drawn = self._figures[best]
        if drawn.is_comparable:
            return figure
        self._shard.mesh.telemetry.log.warning(
            "not compared with the best version: too many samples are invalid",
            figure=best,
            tag=self._plan.tag,
            samples=len(drawn.lengths),
            failed=drawn.failed_samples,
            mixed=drawn.mixed_samples,
        )
        return None

    async def _sample_set(
        self, name: str, rows: Sequence[dict[str, Any]], sampling: EvaluationSampling
    ) -> SampledSet:
        """Sample trajectories for each row of a set, on engines at the version or newer."""
        shard, version = self._shard, self._plan.version
        base = FIRST_EVALUATION_GROUP + (((version + 1) * MAX_SETS + self._set_count) << 20)
        # Engines must not reuse the KV cache of one lineage's evaluation for the next lineage's.
        base += self._lineage % LINEAGE_COUNT << LINEAGE_BIT
        self._set_count += 1
        every = [
            [
                Trajectory(base + i, member, i, version, shard.compute_seed(base + i, member))
                for member in range(sampling.samples)
            ]
            for i in range(len(rows))
        ]
        for t in itertools.chain(*every):
            t.is_recorded, t.temperature = False, sampling.temperature
            t.top_p = sampling.top_p or shard.config.rollout.top_p
            t.max_tokens = sampling.max_tokens
        each = [(t, row) for ts, row in zip(every, rows, strict=True) for t in ts]
        async with score_over_groups(shard, zip(every, rows, strict=True)):
            await run_all(shard.runner.run(t, row) for t, row in each)
        drawn = SampledSet([[] for _ in rows])
        for rewards, ts in zip(drawn.rewards, every, strict=True):
            for t in ts:
                drawn.lengths.append(t.length)
                if t.outcome is None or t.outcome.reward is None:
                    drawn.failed_samples += 1
                    drawn.failure_reasons[
                        t.outcome.failure_kind or OTHER_KIND if t.outcome else OTHER_KIND
                    ] += 1
                elif (t.versions[t.versions != NOT_SAMPLED] != version).any():
                    drawn.mixed_samples += 1
                    drawn.failure_reasons["of another version"] += 1
                else:
                    rewards.append(t.outcome.reward)
                    for metric, number in t.outcome.metrics.items():
                        drawn.metrics.setdefault(metric, []).append(number)
        self._sampled_sets.append(drawn)
        shard.samples.write_evaluation_samples(self._plan.tag, name, version, each)
        return drawn

    async def _record(self, result: dict[str, Any], value: float | None) -> None:
        mesh = self._shard.mesh
        await jobs.record_evaluation(
            mesh.state,
            self._shard.job.id,
            jobs.EvaluationRecord(
                self._plan.tag,
                self._lineage,
                self._plan.version,
                result,
                value,
                self._shard.config.evaluation.patience,
            ),
            mesh.name,
            mesh.token,
        )


async def evaluate(shard: ShardJob, plan: EvaluationPlan, lineage: int) -> None:
    """Evaluate a version of a lineage by a plan, unless a predecessor has done so."""
    recorded = await retry(
        shard.mesh.clock, lambda: jobs.read_evaluations(shard.mesh.state, shard.job.id)
    )
    if plan.tag not in {e["tag"] for e in recorded}:
        await EvaluationRun(shard, plan, lineage).run()
