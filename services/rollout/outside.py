"""What a shard asks of the sandbox: tools and rewards, retried when the sandbox fails and typed
when the author's code does.
"""

from __future__ import annotations

from typing import Any, TypeVar

from common.api.sandbox import (
    BAD_VALUE,
    OK,
    RAISED,
    LoadJob,
    Outcome,
    RewardCall,
    RunTools,
    Sandbox,
    ScoreBatch,
    ToolCall,
)
from common.errors import MeshError, NotFound, ToolFailed
from common.jobdata import JobData
from common.mesh import Mesh
from services.rollout.batching import Batcher

Q = TypeVar("Q")

ATTEMPTS = 4  # calls that may hang or crash before the trajectory fails by type
PATIENCE_S = 600.0  # the sandbox service itself may be away this long
RETRY_S = 0.25


class Outside:
    """Tools and rewards of one job, batched."""

    def __init__(self, mesh: Mesh, job: JobData, sandbox: str = "sandbox/0") -> None:
        self._mesh, self._job = mesh, job
        self._name = sandbox
        self._sandbox = mesh.ref(sandbox)
        self._tools: Batcher[tuple[str, Any], Outcome] = Batcher(self._run_tools, in_flight=2)
        self._rewards: Batcher[tuple[dict[str, Any], list[dict[str, Any]]], Outcome] = Batcher(
            self._score, in_flight=2
        )

    async def load(self) -> None:
        """Tells the sandbox about the job; one without tools and reward needs none."""
        config = self._job.config
        if not config.environment.tools and not config.reward.use:
            return
        request = LoadJob(
            self._job.id,
            str(self._job.modules),
            dict(config.environment.tools),
            config.reward.use,
        )
        await self._sandbox.call(Sandbox.load, request)

    async def tool(self, name: str, argument: Any) -> Any:
        """A tool's value; ToolFailed when it raises, or keeps hanging or crashing."""
        if name not in self._job.config.environment.tools:
            known = ", ".join(sorted(self._job.config.environment.tools)) or "none"
            raise ToolFailed(f"no tool is called {name!r}", fix=f"the job names: {known}")
        return _value(await self._decided(self._tools, (name, argument)), f"tool {name}")

    async def reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """The job's reward; ToolFailed when the function raises, hangs or returns garbage."""
        if not self._job.config.reward.use:
            return 0.0
        return float(_value(await self._decided(self._rewards, (row, turns)), "reward"))

    async def _decided(self, calls: Batcher[Q, Outcome], call: Q) -> Outcome:
        """The outcome, asked for again when the process that ran the call was lost or too slow."""
        for attempt in range(1, ATTEMPTS + 1):
            outcome = await calls.put(call)
            if outcome.status in (OK, RAISED, BAD_VALUE):
                break
            await self._mesh.clock.sleep(RETRY_S * attempt)
        return outcome

    async def _run_tools(self, batch: list[tuple[str, Any]]) -> list[Outcome | Exception]:
        deadline_s = self._job.config.environment.tool_deadline_s
        calls = [
            ToolCall(i, self._job.id, name, argument, deadline_s)
            for i, (name, argument) in enumerate(batch)
        ]
        return await self._patiently(Sandbox.run, RunTools(calls), deadline_s)

    async def _score(
        self, batch: list[tuple[dict[str, Any], list[dict[str, Any]]]]
    ) -> list[Outcome | Exception]:
        deadline_s = self._job.config.reward.deadline_s
        calls = [
            RewardCall(i, self._job.id, row, turns, deadline_s)
            for i, (row, turns) in enumerate(batch)
        ]
        return await self._patiently(Sandbox.score, ScoreBatch(calls), deadline_s)

    async def _patiently(
        self, method: Any, request: Any, deadline_s: float
    ) -> list[Outcome | Exception]:
        """The sandbox may die and come back: tools are taken to be safe to run again."""
        clock = self._mesh.clock
        started = clock.monotonic()
        while True:
            try:
                answer = await self._sandbox.call(method, request, deadline_s=2 * deadline_s + 5.0)
                return list(answer.outcomes)
            except NotFound:
                await self._reload()
            except MeshError as error:
                if not error.retryable or clock.monotonic() - started > PATIENCE_S:
                    raise
            await clock.sleep(RETRY_S)

    async def _reload(self) -> None:
        try:
            await self.load()
        except MeshError as error:
            if not error.retryable:
                raise

    async def close(self) -> None:
        await self._tools.close()
        await self._rewards.close()


def _value(outcome: Outcome, what: str) -> Any:
    if outcome.status == OK:
        return outcome.value
    raise ToolFailed(f"{what}: {outcome.status}: {outcome.error}", fix="see the job's module")
