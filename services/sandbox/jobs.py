"""A loaded job: its trusted functions in a pool of workers, its jailed ones, and their sums."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common import builtin
from common.api.sandbox import OK, RAISED, LoadJob, RewardCall, ToolCall
from services.sandbox.answer import Answer
from services.sandbox.jailed import Jailed
from services.sandbox.pool import Pool, Work
from services.sandbox.worker import REWARD, TOOL

_GRADING = "services.sandbox.grading"
TRUSTED = {
    "calculator": f"{_GRADING}.calculator:calculator",
    "math": f"{_GRADING}.maths:reward",
    "exact": f"{_GRADING}.texts:exact",
    "choice": f"{_GRADING}.texts:choice",
    "regex": f"{_GRADING}.texts:regex",
}


def trusted(loaded: LoadJob) -> dict[str, str]:
    """What a job's workers import: all that is not run in jails."""
    uses = {TOOL + name: use for name, use in loaded.tools.items()}
    uses |= {f"{REWARD}{i}": part.use for i, part in enumerate(loaded.rewards)}
    return {name: TRUSTED.get(use, use) for name, use in uses.items() if not builtin.jailed([use])}


class LoadedJob:
    """Answers its calls; every one of them, by type."""

    def __init__(self, loaded: LoadJob, pool: Pool | None, jailed: Jailed | None) -> None:
        self.loaded, self.pool, self.jailed = loaded, pool, jailed

    async def run(self, calls: Sequence[ToolCall]) -> list[Answer]:
        jailed = {
            place: call
            for place, call in enumerate(calls)
            if self.jailed is not None and builtin.jailed([self.loaded.tools.get(call.tool, "")])
        }
        rest = [call for place, call in enumerate(calls) if place not in jailed]
        work = [Work(TOOL + c.tool, [c.input], c.deadline_s, c.once) for c in rest]
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
        return [
            summed([part.weight for part in parts], answers)
            for answers in zip(*by_part, strict=True)
        ]

    async def _part(self, number: int, calls: Sequence[RewardCall]) -> Sequence[Answer]:
        part = self.loaded.rewards[number]
        if builtin.jailed([part.use]):
            assert self.jailed is not None
            grade = self.jailed.reward
            return await asyncio.gather(*(grade(c.row, c.turns, part.options) for c in calls))
        options = [part.options] if builtin.is_builtin(part.use) else []
        name = f"{REWARD}{number}"
        return await self._pooled(
            [Work(name, [c.row, c.turns, *options], c.deadline_s) for c in calls]
        )

    async def _pooled(self, work: Sequence[Work]) -> list[Answer]:
        if not work:
            return []
        if self.pool is None:
            known = ", ".join(sorted(self.loaded.tools)) or "nothing"
            error = f"job {self.loaded.job} has no such tool; it has {known}"
            return [Answer(RAISED, None, error) for _ in work]
        return await self.pool.run(work)

    async def _jailed(self, call: ToolCall) -> Answer:
        assert self.jailed is not None
        return await self.jailed.tool(call.tool, call.input, call.deadline_s, call.session)

    async def stop(self) -> None:
        if self.jailed is not None:
            self.jailed.close()
        if self.pool is not None:
            await self.pool.stop()


def summed(weights: Sequence[float], answers: Sequence[Answer]) -> Answer:
    for answer in answers:
        if answer.status != OK:
            return answer
    return Answer(OK, sum(w * a.value for w, a in zip(weights, answers, strict=True)), "")
