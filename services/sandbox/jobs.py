"""A loaded job: its trusted functions in a pool of workers, its jailed ones, and their sums."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import fields
from typing import Any

from meshrl.common.api.sandbox import (
    BAD_VALUE,
    CRASHED,
    OK,
    RAISED,
    REFUSED,
    LoadJob,
    RewardCall,
    ToolCall,
)
from meshrl.common.base.clock import Clock
from meshrl.common.job import builtin
from meshrl.services.sandbox.grading.code import grading as code
from meshrl.services.sandbox.grading.code import real_pytest
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed, Ran
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import Answer
from meshrl.services.sandbox.sessions import Sessions
from meshrl.services.sandbox.workers.calls import PoolCall
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.services.sandbox.workers.worker import REWARD, TOOL, shown_name

_GRADING = "meshrl.services.sandbox.grading"
TRUSTED = {
    "calculator": f"{_GRADING}.calculator:calculator",
    "math": f"{_GRADING}.mathematics.maths:reward",
    "exact": f"{_GRADING}.texts:exact",
    "choice": f"{_GRADING}.texts:choice",
    "regex": f"{_GRADING}.texts:regex",
}
MODES = {"python": "program", "shell": "shell"}
SOURCE_BYTES = 1 << 20


def trusted(loaded: LoadJob) -> tuple[dict[str, str], dict[str, str]]:
    """What a job's workers import, by name: our own, and the author's. The rest is run in jails."""
    uses = {TOOL + name: use for name, use in loaded.tools.items()}
    uses |= {f"{REWARD}{i}": part.use for i, part in enumerate(loaded.rewards)}
    ours = {name: TRUSTED[use] for name, use in uses.items() if use in TRUSTED}
    authors = {name: use for name, use in uses.items() if not builtin.is_builtin(use)}
    return ours, authors


class Jailed:
    """The jailed tools and rewards of one job."""

    def __init__(
        self,
        launcher: JailLauncher,
        suites: JailLauncher,
        clock: Clock,
        slots: JailSlots,
        loaded: LoadJob,
        isolation: str,
        job_clock: Clock | None = None,
    ) -> None:
        """`suites` makes jails with pytest; `isolation` says in words what contains them; sessions
        are idle by the `job_clock`.
        """
        self.isolation = isolation
        self._suites = real_pytest.Suites(suites)
        jail = loaded.jail
        self._launcher, self._slots = launcher, slots
        self._limits = JailLimits(*(getattr(jail, field.name) for field in fields(JailLimits)))
        self._tools = loaded.tools
        most, idle_s = jail.sessions, jail.session_idle_s
        self.sessions = Sessions(launcher, clock, self._limits, most, idle_s, job_clock)

    async def tool(
        self, name: str, argument: Any, deadline_s: float, session: str, begun: bool
    ) -> Answer:
        """What the model reads, whatever became of its code."""
        use = self._tools[name]
        if not isinstance(argument, str) or len(argument) > SOURCE_BYTES:
            kind = builtin.TOOLS[use].argument
            said = f"{name} takes {kind} as a text of at most {SOURCE_BYTES} characters"
            return Answer(REFUSED, {"status": REFUSED, "output": f"[{REFUSED}: {said}]"}, said)
        limits = self._limits.capped(wall_s=deadline_s, cpu_s=deadline_s)
        try:
            async with self._slots.one():
                if builtin.TOOLS[use].session:
                    ran = await self.sessions.run(session, argument, begun)
                else:
                    ran = await self._launcher.run(Program(argument, MODES[use]), limits)
        except JailFailed as error:
            return Answer(CRASHED, None, str(error))
        return Answer(ran.status, told(ran), ran.error)

    async def reward(
        self, row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]
    ) -> Answer:
        """`code_tests`."""
        grading = code.Grading(self._launcher, self._slots, self._limits, options, self._suites)
        return await grading.reward(row, turns)

    def close(self) -> None:
        self.sessions.close()


def told(ran: Ran) -> dict[str, Any]:
    output, errors = (said.decode("utf-8", "replace") for said in (ran.stdout, ran.stderr))
    for more in (errors, f"[{ran.status}: {ran.error}]" if ran.error else ""):
        ends = not more or not output or output.endswith("\n")
        output += more if ends else f"\n{more}"
    said: dict[str, Any] = {"status": ran.status, "output": output}
    if ran.status == OK and ran.exit:
        said["exit"] = ran.exit
    if ran.refused:
        said["refused"] = list(ran.refused)
    return said


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
