"""Loaded job: trusted functions in a pool of workers, jailed functions, and sums of rewards."""

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
    RewardPart,
    ToolCall,
)
from meshrl.common.base.clock import Clock
from meshrl.common.environment.reward_numbers import split_reward
from meshrl.common.job import builtin
from meshrl.services.sandbox.grading.code import code_reward as code
from meshrl.services.sandbox.grading.code import pytest_tests
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed, ProgramResult
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.outcomes import CallResult
from meshrl.services.sandbox.sessions import Sessions
from meshrl.services.sandbox.workers.calls import PoolCall
from meshrl.services.sandbox.workers.pool import WorkerPool
from meshrl.services.sandbox.workers.worker import GROUP_REWARD, REWARD, TOOL, format_name

_GRADING = "meshrl.services.sandbox.grading"
TRUSTED_BUILTINS = {
    "calculator": f"{_GRADING}.calculator:calculate",
    "math": f"{_GRADING}.mathematics.math_reward:compute_reward",
    "exact": f"{_GRADING}.text_rewards:score_exact",
    "choice": f"{_GRADING}.text_rewards:score_choice",
    "regex": f"{_GRADING}.text_rewards:score_regex",
}
MODES = {"python": "program", "shell": "shell"}
SOURCE_BYTES = 1 << 20


def list_worker_functions(loaded: LoadJob) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a job's workers import, by name: our own and the author's; jails run the rest."""
    uses = {TOOL + name: use for name, use in loaded.tools.items()}
    uses |= {name_reward(i, part): part.use for i, part in enumerate(loaded.rewards)}
    ours = {name: TRUSTED_BUILTINS[use] for name, use in uses.items() if use in TRUSTED_BUILTINS}
    authors = {name: use for name, use in uses.items() if not builtin.is_builtin(use)}
    return ours, authors


def name_reward(number: int, part: RewardPart) -> str:
    """Return the name of a part's function in the workers, by which they check its results."""
    return f"{GROUP_REWARD if part.over_group else REWARD}{number}"


class JailedFunctions:
    """Jailed tools and rewards of one job."""

    def __init__(
        self,
        launcher: JailLauncher,
        pytest_launcher: JailLauncher,
        clock: Clock,
        slots: JailSlots,
        loaded: LoadJob,
        isolation: str,
        job_clock: Clock | None = None,
    ) -> None:
        """Create the jailed functions.

        Args:
            pytest_launcher: Launcher of jails with pytest.
            isolation: Description of what contains the jails.
            job_clock: Clock by which sessions are idle.
        """
        self.isolation = isolation
        self._pytest_jails = pytest_tests.PytestJails(pytest_launcher)
        jail = loaded.jail
        self._launcher, self._slots = launcher, slots
        self._limits = JailLimits(*(getattr(jail, field.name) for field in fields(JailLimits)))
        self._tools = loaded.tools
        most, idle_s = jail.sessions, jail.session_idle_s
        self.sessions = Sessions(launcher, clock, self._limits, most, idle_s, job_clock)

    async def run_tool(
        self, name: str, argument: Any, deadline_s: float, session: str, has_session_state: bool
    ) -> CallResult:
        """Run a tool and return the text that the model reads, also for a failure."""
        use = self._tools[name]
        if not isinstance(argument, str) or len(argument) > SOURCE_BYTES:
            kind = builtin.TOOLS[use].argument
            problem = f"{name} accepts {kind} as a text of at most {SOURCE_BYTES} characters"
            return CallResult(
                REFUSED, {"status": REFUSED, "output": f"[{REFUSED}: {problem}]"}, problem
            )
        limits = self._limits.lower(wall_s=deadline_s, cpu_s=deadline_s)
        try:
            async with self._slots.acquire():
                if builtin.TOOLS[use].has_session:
                    ran = await self.sessions.run(session, argument, has_session_state)
                else:
                    ran = await self._launcher.run(JailProgram(argument, MODES[use]), limits)
        except JailFailed as error:
            return CallResult(CRASHED, None, str(error))
        return CallResult(ran.status, format_result(ran), ran.error)

    async def compute_reward(
        self, row: dict[str, Any], turns: list[dict[str, Any]], options: dict[str, Any]
    ) -> CallResult:
        """Compute the reward `code_tests`."""
        grading = code.CodeGrader(
            self._launcher, self._slots, self._limits, options, self._pytest_jails
        )
        return await grading.compute_reward(row, turns)

    def close(self) -> None:
        self.sessions.close()


def format_result(result: ProgramResult) -> dict[str, Any]:
    output, errors = (
        stream.decode("utf-8", "replace") for stream in (result.stdout, result.stderr)
    )
    for more in (errors, f"[{result.status}: {result.error}]" if result.error else ""):
        ends = not more or not output or output.endswith("\n")
        output += more if ends else f"\n{more}"
    fields: dict[str, Any] = {"status": result.status, "output": output}
    if result.status == OK and result.exit_code:
        fields["exit"] = result.exit_code
    if result.denied_calls:
        fields["refused"] = list(result.denied_calls)
    return fields


class LoadedJob:
    """Job that answers every call by type."""

    def __init__(
        self, loaded: LoadJob, pools: Sequence[WorkerPool], jailed: JailedFunctions | None
    ) -> None:
        self.loaded, self.pools, self.jailed = loaded, pools, jailed

    async def run(self, calls: Sequence[ToolCall]) -> list[CallResult]:
        jailed = {
            place: call
            for place, call in enumerate(calls)
            if self.jailed is not None
            and builtin.select_jailed([self.loaded.tools.get(call.tool, "")])
        }
        rest = [call for place, call in enumerate(calls) if place not in jailed]
        work = [PoolCall(TOOL + c.tool, [c.input], c.deadline_s, c.no_retry) for c in rest]
        ran, answers = await asyncio.gather(
            self._run_in_pools(work), asyncio.gather(*map(self._run_in_jail, jailed.values()))
        )
        others, own = iter(ran), iter(answers)
        return [next(own if place in jailed else others) for place in range(len(calls))]

    async def score(self, calls: Sequence[RewardCall]) -> list[CallResult]:
        """Return the weighted sum of the parts if all are scores; else the first that is none."""
        parts = self.loaded.rewards
        if not parts:
            missing = f"job {self.loaded.job} has no reward"
            return [CallResult(RAISED, None, missing) for _ in calls]
        by_part = await asyncio.gather(*(self._score_part(i, calls) for i in range(len(parts))))
        if parts[0].over_group:
            return list(by_part[0])
        return [sum_rewards(parts, answers) for answers in zip(*by_part, strict=True)]

    async def _score_part(self, number: int, calls: Sequence[RewardCall]) -> Sequence[CallResult]:
        part = self.loaded.rewards[number]
        if builtin.select_jailed([part.use]):
            assert self.jailed is not None
            graded = (self.jailed.compute_reward(c.row, c.turns, part.options) for c in calls)
            return await asyncio.gather(*map(catch_errors, graded))
        options = [part.options] if builtin.is_builtin(part.use) else []
        name = name_reward(number, part)
        scored = [c.group if part.over_group else c.turns for c in calls]
        work = [
            PoolCall(name, [c.row, turns, *options], c.deadline_s)
            for c, turns in zip(calls, scored, strict=True)
        ]
        return await self._run_in_pools(work)

    async def _run_in_pools(self, work: Sequence[PoolCall]) -> list[CallResult]:
        """Run each call in the pool of its function."""
        answers: dict[int, CallResult] = {}

        async def by(pool: WorkerPool) -> None:
            places = [i for i, call in enumerate(work) if call.name in pool.functions]
            ran = await pool.run([work[i] for i in places], postpone_slow=True) if places else []
            answers.update(zip(places, ran, strict=True))

        await asyncio.gather(*map(by, self.pools))
        known = ", ".join(sorted(self.loaded.tools)) or "none"
        return [
            answers.get(i)
            or CallResult(RAISED, None, f"there is no tool {format_name(call.name)}; {known}")
            for i, call in enumerate(work)
        ]

    async def _run_in_jail(self, call: ToolCall) -> CallResult:
        assert self.jailed is not None
        return await catch_errors(
            self.jailed.run_tool(
                call.tool, call.input, call.deadline_s, call.session, call.has_session_state
            )
        )

    async def stop(self) -> None:
        if self.jailed is not None:
            self.jailed.close()
        await asyncio.gather(*(pool.stop() for pool in self.pools))


async def catch_errors(work: Awaitable[CallResult]) -> CallResult:
    try:
        return await work
    except Exception as error:
        traceback.print_exc()
        return CallResult(CRASHED, None, f"{type(error).__name__}: {error}"[:500])


def sum_rewards(parts: Sequence[RewardPart], answers: Sequence[CallResult]) -> CallResult:
    """Return the weighted sum, rounded once, with the parts' metrics; else the first answer that is
    no score.

    BAD_VALUE if the sum is not finite.
    """
    if wrong := [answer for answer in answers if answer.status != OK]:
        return wrong[0]
    found = [split_reward(answer.value) for answer in answers]
    values = [reward or 0.0 for reward, _ in found]
    terms = [part.weight * value for part, value in zip(parts, values, strict=True)]
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # beyond the largest number; inf - inf
        total = math.nan
    if math.isfinite(total):
        metrics = found[0][1]
        if len(parts) > 1:
            metrics = join_metrics(name_parts(parts), values, [own for _, own in found])
        return CallResult(OK, {"reward": total, "metrics": metrics} if metrics else total, "")
    sum_text = " + ".join(
        f"{part.weight:g} * {value:g}" for part, value in zip(parts, values, strict=True)
    )
    return CallResult(BAD_VALUE, None, f"the sum of reward.parts is not finite: {sum_text}")


def name_parts(parts: Sequence[RewardPart]) -> list[str]:
    """Return a name for each part: its function's, with a number if an earlier part has it."""
    names: list[str] = []
    for part in parts:
        name = part.use.rpartition(":")[2]
        earlier = sum(n == name or n.startswith(f"{name}_") for n in names)
        names.append(f"{name}_{earlier + 1}" if name in names else name)
    return names


def join_metrics(
    names: Sequence[str], values: Sequence[float], metrics: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return each part's value under its name, and its metrics under `part/metric`."""
    found = dict(zip(names, values, strict=True))
    for name, own in zip(names, metrics, strict=True):
        found |= {f"{name}/{key}": number for key, number in own.items()}
    return found
