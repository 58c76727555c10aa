"""Arithmetic of one step, from groups to updates, and the record that replays it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.ranks import COMPUTE_TIMEOUT_S
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import NULL_STOPWATCH, NullStopwatch
from meshrl.services.trainer.algorithms import get_algorithm, list_scoring_passes
from meshrl.services.trainer.bins.packing import (
    UNKNOWN,
    Bin,
    TrainingSequence,
    build_bin,
    pack_sequences,
)
from meshrl.services.trainer.bins.round_planning import RoundPlan, RoundPlanner, rebuild_rounds
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.hybrids.gradient_collector import GradientCollector
from meshrl.services.trainer.learner.aggregation import compute_denominator
from meshrl.services.trainer.learner.optimizers import compute_lr_factor
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.steps.batch import StepBatch

EnterPhase = Callable[[str, int], None]  # of a step


@dataclass
class StepResult:
    batch: StepBatch
    stats: BinStats = field(default_factory=BinStats)
    denominator_sum: float = 0.0  # sum of the divisors of its updates' gradients
    gradient_norm: float = 0.0  # of the last update's gradient, before clipping
    bin_count: int = 0
    updates: list[RoundPlan] = field(default_factory=list)
    block_rounds: list[int] = field(default_factory=list)  # of each update: see `GradientSum`
    update_s: float = 0.0  # of the optimizer, without sleep in between


class TrainingStep:
    """Step that turns version `number` - 1, of digest `manifest`, into version `number`."""

    def __init__(
        self,
        mesh: Mesh,
        config: JobConfig,
        compute: GangCompute,
        gradients: GradientCollector,
        number: int,
        manifest: str,
        enter_phase: EnterPhase,
        intake: NullStopwatch = NULL_STOPWATCH,
    ) -> None:
        """Create a step; `intake` times the wait for groups and their packing."""
        self._mesh, self._config = mesh, config
        self._compute, self._gradients = compute, gradients
        self._number, self._manifest, self._enter_phase = number, manifest, enter_phase
        self._version, self._intake = number - 1, intake
        self._algorithm = get_algorithm(config.algorithm.name)
        self._lr_factor = compute_lr_factor(self._version, config.budget.steps, config.optimizer)
        self.result = StepResult(StepBatch(self._version, config))
        self._block_rounds = 1  # of the current update

    async def run(self, groups: AsyncIterator[TrajectoryGroup]) -> StepResult:
        """Train on groups in the order of their arrival."""
        config = self._config
        needs_all_groups = (
            self._algorithm.prepare_advantages
            or list_scoring_passes(config.algorithm)
            or config.algorithm.updates > 1
        )
        # Otherwise bins can be computed before all groups have arrived.
        if not needs_all_groups and not config.training.deterministic:
            await self._run_streaming(groups)
        else:
            arrived = [group async for group in groups]
            self._intake.enter("pack")
            for sequences in await self._build_minibatches(arrived):
                round_planner = self._create_round_planner()
                self._intake.enter("pack")
                rounds = await self._run_blocking(round_planner.add, sequences)
                rounds += await self._run_blocking(round_planner.flush)
                self._intake.enter("")
                size = self._choose_block_rounds(len(rounds))
                await self._run_update(rounds, round_planner.plan, sequences, size)
        return self.result

    async def replay(
        self, groups: list[TrajectoryGroup], updates: list[RoundPlan], block_rounds: list[int]
    ) -> StepResult:
        """Repeat the updates of a step's record on the same groups."""
        minibatches = await self._build_minibatches(groups)
        sequences = {
            (s.group_id, s.member_index): s for minibatch in minibatches for s in minibatch
        }
        for plan, size in zip(updates, block_rounds, strict=True):
            rounds = await self._run_blocking(rebuild_rounds, plan, sequences, self._fresh_version)
            members = [
                sequences[group, member] for one in plan for bin in one for group, member in bin
            ]
            await self._run_update(rounds, plan, members, size)
        return self.result

    def _create_round_planner(self) -> RoundPlanner:
        training = self._config.training
        cost = None if training.deterministic else self._gradients.costs.get_cost()
        return RoundPlanner(
            training.bin_tokens, self._compute.division.bins_per_round, self._fresh_version, cost
        )

    @property
    def _fresh_version(self) -> int:
        """Version by which tokens count as fresh; UNKNOWN after a step's first update."""
        return UNKNOWN if self.result.updates else self._version

    async def _run_streaming(self, groups: AsyncIterator[TrajectoryGroup]) -> None:
        round_planner, trained = self._create_round_planner(), []
        await self._begin_update(self._manifest, self._choose_block_rounds(None))

        async def feed() -> None:
            async for group in groups:
                self._enter_phase("computing", self._number)
                self._intake.enter("pack")
                sequences = await self._run_blocking(self.result.batch.add, group)
                trained.extend(sequences)
                self._gradients.offer_rounds(await self._run_blocking(round_planner.add, sequences))
                self._intake.enter("wait")
            self._intake.enter("pack")
            self._gradients.offer_rounds(await self._run_blocking(round_planner.flush))
            self._intake.enter("")
            self._gradients.close_rounds()

        stats = await run_both(feed(), self._gradients.compute_rounds())
        await self._apply_update(stats, round_planner.plan, trained)

    async def _build_minibatches(
        self, groups: list[TrajectoryGroup]
    ) -> list[list[TrainingSequence]]:
        """Return the sequences of each update, after all groups have arrived."""
        groups = sorted(groups, key=lambda group: group.group)
        by_group = [await self._run_blocking(self.result.batch.add, group) for group in groups]
        every = [sequence for one in by_group for sequence in one]
        # Scores under the step's first weights, and the advantages that depend on them.
        for name in list_scoring_passes(self._config.algorithm):
            members = pack_sequences(every, self._config.training.bin_tokens)
            bins = [build_bin(one, self._version) for one in members]
            what = "values" if name == "values" else "logprobs"
            for one, scores in zip(members, await self._compute.score(bins, what), strict=True):
                _set_extra(name, one, scores)
        if self._algorithm.prepare_advantages is not None:
            await self._run_blocking(
                self._algorithm.prepare_advantages, every, self._config.algorithm
            )
        return split_groups([one for one in by_group if one], self._config.algorithm.updates)

    def _choose_block_rounds(self, rounds: int | None) -> int:
        """Choose the rounds of a block for an update of so many rounds; None: still unknown."""
        training = self._config.training
        if training.block_rounds or training.deterministic:
            return training.block_rounds or 1
        return self._gradients.choose_block_rounds(rounds)

    async def _begin_update(self, manifest: str, block_rounds: int) -> None:
        dtype = self._config.training.gradient_dtype
        await self._gradients.begin_update(manifest, block_rounds, dtype)
        self._block_rounds = block_rounds

    async def _run_update(
        self,
        rounds: list[list[Bin]],
        plan: RoundPlan,
        sequences: list[TrainingSequence],
        block_rounds: int,
    ) -> None:
        # Hybrids cannot take part if only the core has the weights: those between two updates of a
        # step, or a critic.
        alone = bool(self.result.updates) or self._algorithm.has_critic
        await self._begin_update("" if alone else self._manifest, block_rounds)
        self._enter_phase("computing", self._number)
        self._gradients.offer_rounds(rounds)
        self._gradients.close_rounds()
        await self._apply_update(await self._gradients.compute_rounds(), plan, sequences)

    async def _apply_update(
        self, stats: BinStats, plan: RoundPlan, sequences: list[TrainingSequence]
    ) -> None:
        if not plan:
            return
        self._enter_phase("updating", self._number)
        divisor = compute_denominator(sequences, self._config)
        began = self._read_working_clock_s()
        self.result.gradient_norm = await self._compute.apply_gradient(
            len(plan), divisor, self._lr_factor
        )
        self.result.update_s += self._read_working_clock_s() - began
        self.result.stats += stats
        self.result.denominator_sum += divisor
        self.result.bin_count += sum(bool(bin) for one in plan for bin in one)
        self.result.updates.append(plan)
        self.result.block_rounds.append(self._block_rounds)

    def _read_working_clock_s(self) -> float:
        """Return a clock that stands still while the core sleeps or waits for time slices."""
        return self._mesh.clock.monotonic() - self._gradients.measure_idle_s()

    async def _run_blocking(self, work: Any, *args: Any) -> Any:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=COMPUTE_TIMEOUT_S)


def split_groups(groups: list[list[TrainingSequence]], parts: int) -> list[list[TrainingSequence]]:
    """Return the sequences in up to `parts` parts of full groups, as equal as possible."""
    count = len(groups)
    n = min(parts, count)
    cut = [groups[i * count // n : (i + 1) * count // n] for i in range(n)]
    return [[sequence for group in part for sequence in group] for part in cut]


def _set_extra(name: str, sequences: list[TrainingSequence], scores: NDArray[np.float32]) -> None:
    """Set extra `name` of each sequence: a position's score belongs to the token that follows."""
    start = 0
    for sequence in sequences:
        values = np.zeros(len(sequence.tokens), np.float32)
        values[1:] = scores[start : start + sequence.position_count]
        sequence.extras[name] = values
        start += sequence.position_count


async def run_both(feed: Awaitable[None], compute: Awaitable[BinStats]) -> BinStats:
    """Run both at once; if one fails, cancel the other and raise the error unchanged."""
    tasks = asyncio.ensure_future(feed), asyncio.ensure_future(compute)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # The computation comes first: its failure can make the feed fail, too.
        for task in reversed(tasks):
            if task.done():
                task.result()
        return await tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
