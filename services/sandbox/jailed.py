"""Runs a job's calls of code that the model wrote, each in a fresh jail or in its session's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from common.api.sandbox import CRASHED, OK, REFUSED, LoadJob
from common.base.clock import Clock
from common.job import builtin
from services.sandbox.grading.code import grading as code
from services.sandbox.grading.code import real_pytest
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails.jail import JailFailed, Ran
from services.sandbox.isolation.jails.program import Program
from services.sandbox.isolation.resources.limits import JailLimits
from services.sandbox.isolation.resources.slots import JailSlots
from services.sandbox.outcomes.answer import Answer
from services.sandbox.sessions import Sessions

MODES = {"python": "program", "shell": "shell"}
SOURCE_BYTES = 1 << 20


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
    """How a program ended and what it wrote, as a model reads it."""
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
