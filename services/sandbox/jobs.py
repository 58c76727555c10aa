"""A loaded job: its trusted functions in a pool of workers, its jailed ones, and their sums."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Sequence

from common.api.sandbox import BAD_VALUE, CRASHED, OK, RAISED, LoadJob, RewardCall, ToolCall
from common.job import builtin
from services.sandbox.jailed import Jailed
from services.sandbox.outcomes.answer import Answer
from services.sandbox.workers.calls import PoolCall
from services.sandbox.workers.pool import WorkerPool
from services.sandbox.workers.worker import REWARD, TOOL, shown_name

_GRADING = "services.sandbox.grading"
TRUSTED = {
    "calculator": f"{_GRADING}.calculator:calculator",
    "math": f"{_GRADING}.mathematics.maths:reward",
    "exact": f"{_GRADING}.texts:exact",
    "choice": f"{_GRADING}.texts:choice",
    "regex": f"{_GRADING}.texts:regex",
}


def trusted(loaded: LoadJob) -> tuple[dict[str, str], dict[str, str]]:
    """What a job's workers import, by name: our own, and the author's. The rest is run in jails."""
    uses = {TOOL + name: use for name, use in loaded.tools.items()}
    uses |= {f"{REWARD}{i}": part.use for i, part in enumerate(loaded.rewards)}
    ours = {name: TRUSTED[use] for name, use in uses.items() if use in TRUSTED}
    authors = {name: use for name, use in uses.items() if not builtin.is_builtin(use)}
    return ours, authors


class LoadedJob:
    """Answers its calls; every one of them, by type."""

    def __init__(self, loaded: LoadJob, pools: Sequence[WorkerPool], jailed: Jailed | None) -> None:
        self.loaded, self.pools, self.jailed = loaded, pools, jailed

    async def run(self, calls: Sequence[ToolCall]) -> list[Answer]:
        jailed = {
            place: call
            for place, call in enumerate(calls)
            if self.jailed is not None and builtin.jailed([self.loaded.tools.get(call.tool, "")])
        }
        rest = [call for place, call in enumerate(calls) if place not in jailed]
        work = [PoolCall(TOOL + c.tool, [c.input], c.deadline_s, c.once) for c in rest]
        ran, answers = await asyncio.gather(
            self._pooled(work), asyncio.gather(*map(self._jailed, jailed.values()))
        )
        others, own = iter(ran), iter(answers)
        return [next(own if place in jailed else others) for place in range(len(calls))]

    async def score(self, calls: Sequence[RewardCall]) -> list[Answer]:
        """The weighted sum of the parts, if all of them are scores; else the first that is none."""
        parts = self.loaded.rewards
        if not parts:
            missing = f"job {self.loaded.job} has no reward; it has none at all"
            return [Answer(RAISED, None, missing) for _ in calls]
        by_part = await asyncio.gather(*(self._part(i, calls) for i in range(len(parts))))
        weights = [part.weight for part in parts]
        return [summed(weights, answers) for answers in zip(*by_part, strict=True)]

    async def _part(self, number: int, calls: Sequence[RewardCall]) -> Sequence[Answer]:
        part = self.loaded.rewards[number]
        if builtin.jailed([part.use]):
            assert self.jailed is not None
            graded = (self.jailed.reward(c.row, c.turns, part.options) for c in calls)
            return await asyncio.gather(*map(apart, graded))
        options = [part.options] if builtin.is_builtin(part.use) else []
        name = f"{REWARD}{number}"
        work = [PoolCall(name, [c.row, c.turns, *options], c.deadline_s) for c in calls]
        return await self._pooled(work)

    async def _pooled(self, work: Sequence[PoolCall]) -> list[Answer]:
        """Each by the pool that has it."""
        answers: dict[int, Answer] = {}

        async def by(pool: WorkerPool) -> None:
            places = [i for i, call in enumerate(work) if call.name in pool.functions]
            ran = await pool.run([work[i] for i in places], early=True) if places else []
            answers.update(zip(places, ran, strict=True))

        await asyncio.gather(*map(by, self.pools))
        known = ", ".join(sorted(self.loaded.tools)) or "nothing"
        return [
            answers.get(i) or Answer(RAISED, None, f"no tool {shown_name(call.name)}; {known}")
            for i, call in enumerate(work)
        ]

    async def _jailed(self, c: ToolCall) -> Answer:
        assert self.jailed is not None
        return await apart(self.jailed.tool(c.tool, c.input, c.deadline_s, c.session, c.begun))

    async def stop(self) -> None:
        if self.jailed is not None:
            self.jailed.close()
        await asyncio.gather(*(pool.stop() for pool in self.pools))


async def apart(work: Awaitable[Answer]) -> Answer:
    """The call's answer; an unforeseen error in one call does not fail its neighbours."""
    try:
        return await work
    except Exception as error:
        traceback.print_exc()
        return Answer(CRASHED, None, f"{type(error).__name__}: {error}"[:500])


def summed(weights: Sequence[float], answers: Sequence[Answer]) -> Answer:
    """The weighted sum, rounded once; the first answer that is no score; BAD_VALUE if the sum is
    not finite.
    """
    if wrong := [answer for answer in answers if answer.status != OK]:
        return wrong[0]
    terms = [weight * answer.value for weight, answer in zip(weights, answers, strict=True)]
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # beyond the largest number; inf - inf
        total = math.nan
    if math.isfinite(total):
        return Answer(OK, total, "")
    told = " + ".join(f"{w:g} * {a.value:g}" for w, a in zip(weights, answers, strict=True))
    return Answer(BAD_VALUE, None, f"the sum of reward.parts is not finite: {told}")
