"""The arithmetic of one step, from groups to updates, and the record that replays it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.ranks import COMPUTE_S
from meshrl.common.api.weights import Group
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.telemetry.stopwatch import UNTIMED, Untimed
from meshrl.services.trainer.algorithms import algorithm, passes
from meshrl.services.trainer.arithmetic.aggregation import denominator
from meshrl.services.trainer.arithmetic.optimizers import lr_factor
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.packing import UNKNOWN, Bin, Sequence, fill, packed
from meshrl.services.trainer.bins.rounds import RoundMaker, RoundPlan, planned
from meshrl.services.trainer.gang.compute import Compute
from meshrl.services.trainer.hybrids.gradients import Gradients
from meshrl.services.trainer.steps.batch import Batch

Enter = Callable[[str, int], None]  # a phase, of a step


@dataclass
class Stepped:
    batch: Batch
    stats: BinStats = field(default_factory=BinStats)
    counted: float = 0.0  # what the gradients of its updates were divided by, added up
    norm: float = 0.0  # norm of the last update's gradient, before clipping
    bins: int = 0
    updates: list[RoundPlan] = field(default_factory=list)
    update_s: float = 0.0  # that the optimizer took, but for what the core slept meanwhile


class TrainingStep:
    """Step `number` turns version number - 1 into version number; `manifest` names the former."""

    def __init__(
        self,
        mesh: Mesh,
        config: JobConfig,
        compute: Compute,
        gradients: Gradients,
        number: int,
        manifest: str,
        enter: Enter,
        intake: Untimed = UNTIMED,
    ) -> None:
        """`intake` says how long groups are waited for, and how long they are packed."""
        self._mesh, self._config = mesh, config
        self._compute, self._gradients = compute, gradients
        self._number, self._manifest, self._enter = number, manifest, enter
        self._version, self._intake = number - 1, intake
        self._algorithm = algorithm(config.algorithm.name)
        self._factor = lr_factor(self._version, config.budget.steps, config.optimizer)
        self.done = Stepped(Batch(self._version, config))

    async def run(self, groups: AsyncIterator[Group]) -> Stepped:
        """Trains on groups in the order in which they come."""
        config = self._config
        whole = self._algorithm.prepare or passes(config.algorithm) or config.algorithm.updates > 1
        if not whole and not config.training.deterministic:  # bins before all groups are there
            await self._streamed(groups)
        else:
            arrived = [group async for group in groups]
            self._intake.enter("pack")
            for sequences in await self._minibatches(arrived):
                maker = self._maker()
                self._intake.enter("pack")
                rounds = await self._run(maker.add, sequences)
                rounds += await self._run(maker.flush)
                self._intake.enter("")
                await self._update(rounds, maker.plan, sequences)
        return self.done

    async def replay(self, groups: list[Group], updates: list[RoundPlan]) -> Stepped:
        """Repeats what `updates` tells of the same groups."""
        minibatches = await self._minibatches(groups)
        sequences = {(s.group, s.member): s for minibatch in minibatches for s in minibatch}
        for plan in updates:
            rounds = await self._run(planned, plan, sequences, self._measured)
            members = [
                sequences[group, member] for one in plan for bin in one for group, member in bin
            ]
            await self._update(rounds, plan, members)
        return self.done

    def _maker(self) -> RoundMaker:
        training = self._config.training
        cost = None if training.deterministic else self._gradients.costs.cost()
        return RoundMaker(training.bin_tokens, self._compute.division.bins, self._measured, cost)

    @property
    def _measured(self) -> int:
        """The version by which tokens count as fresh: after a step's first update there is none."""
        return UNKNOWN if self.done.updates else self._version

    async def _streamed(self, groups: AsyncIterator[Group]) -> None:
        maker, trained = self._maker(), []
        await self._gradients.begin(self._manifest)

        async def feed() -> None:
            async for group in groups:
                self._enter("computing", self._number)
                self._intake.enter("pack")
                sequences = await self._run(self.done.batch.add, group)
                trained.extend(sequences)
                self._gradients.offer(await self._run(maker.add, sequences))
                self._intake.enter("wait")
            self._intake.enter("pack")
            self._gradients.offer(await self._run(maker.flush))
            self._intake.enter("")
            self._gradients.close()

        stats = await both(feed(), self._gradients.run())
        await self._apply(stats, maker.plan, trained)

    async def _minibatches(self, groups: list[Group]) -> list[list[Sequence]]:
        """The sequences of each update, after all groups have come."""
        groups = sorted(groups, key=lambda group: group.group)
        by_group = [await self._run(self.done.batch.add, group) for group in groups]
        every = [sequence for one in by_group for sequence in one]
        # What is scored with the step's first weights, and the advantages that follow from it.
        for name in passes(self._config.algorithm):
            members = packed(every, self._config.training.bin_tokens)
            bins = [fill(one, self._version) for one in members]
            what = "values" if name == "values" else "logprobs"
            for one, scores in zip(members, await self._compute.score(bins, what), strict=True):
                _spread(name, one, scores)
        if self._algorithm.prepare is not None:
            await self._run(self._algorithm.prepare, every, self._config.algorithm)
        return dealt([one for one in by_group if one], self._config.algorithm.updates)

    async def _update(
        self, rounds: list[list[Bin]], plan: RoundPlan, sequences: list[Sequence]
    ) -> None:
        # What only the core has, weights between two updates of a step or a critic, is nothing that
        # hybrids could take part in.
        alone = bool(self.done.updates) or self._algorithm.critic
        await self._gradients.begin("" if alone else self._manifest)
        self._enter("computing", self._number)
        self._gradients.offer(rounds)
        self._gradients.close()
        await self._apply(await self._gradients.run(), plan, sequences)

    async def _apply(self, stats: BinStats, plan: RoundPlan, sequences: list[Sequence]) -> None:
        if not plan:
            return
        self._enter("updating", self._number)
        divisor = denominator(sequences, self._config)
        began = self._working_s()
        self.done.norm = await self._compute.apply(len(plan), divisor, self._factor)
        self.done.update_s += self._working_s() - began
        self.done.stats += stats
        self.done.counted += divisor
        self.done.bins += sum(bool(bin) for one in plan for bin in one)
        self.done.updates.append(plan)

    def _working_s(self) -> float:
        """A clock that stands while the core sleeps or waits for its turn."""
        return self._mesh.clock.monotonic() - self._gradients.idle_s()

    async def _run(self, work: Any, *args: Any) -> Any:
        return await self._mesh.host.run_blocking(work, *args, deadline_s=COMPUTE_S)


def dealt(groups: list[list[Sequence]], parts: int) -> list[list[Sequence]]:
    """Return the sequences in `parts` of whole groups, as equal as can be, or in fewer."""
    count = len(groups)
    n = min(parts, count)
    cut = [groups[i * count // n : (i + 1) * count // n] for i in range(n)]
    return [[sequence for group in part for sequence in group] for part in cut]


def _spread(name: str, sequences: list[Sequence], scores: NDArray[np.float32]) -> None:
    """Sets extra `name` of each sequence: a place's score goes to the token that follows it."""
    start = 0
    for sequence in sequences:
        values = np.zeros(len(sequence.tokens), np.float32)
        values[1:] = scores[start : start + sequence.places]
        sequence.extras[name] = values
        start += sequence.places


async def both(feeding: Awaitable[None], computing: Awaitable[BinStats]) -> BinStats:
    """Runs both at once; when one fails the other ends, and the error goes through unchanged."""
    tasks = asyncio.ensure_future(feeding), asyncio.ensure_future(computing)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in reversed(tasks):  # what feeding says of a computation that failed is no news
            if task.done():
                task.result()
        return await tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
