"""A client of a job's sandboxes for tools and rewards: it spreads calls by load, repeats them when
a sandbox fails, and reports failures of the author's code as typed errors.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshrl.common.api.sandbox import (
    BAD_VALUE,
    CRASHED,
    OK,
    OUT_OF_MEMORY,
    POSTPONED,
    RAISED,
    REFUSED,
    TIMEOUT,
    UNSUPPORTED,
    CallOutcome,
    EndSessions,
    LoadJob,
    RewardBatch,
    RewardCall,
    RunTools,
    Sandbox,
    ToolCall,
)
from meshrl.common.base.errors import DeadlineExceeded, MeshError, NotFound, Overloaded, ToolFailed
from meshrl.common.job import builtin
from meshrl.common.job.bundle import bundle_files, loading
from meshrl.common.job.bundle.job_data import MODULES, JobData
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.names import sandbox, service
from meshrl.services.rollout.trajectories.failures import REWARD, Failures, TrajectoryFailed

Q = TypeVar("Q")
Answered = tuple[str, Any, Any]  # a tool, its input, its value
RewardArguments = tuple[dict[str, Any], list[dict[str, Any]]]

ATTEMPTS = 4  # calls that may crash before the trajectory fails by type
TIMEOUTS = 2  # calls that may hang: what waits for a core is not charged, so few do by accident
PATIENCE_S = 600.0  # the sandbox service itself may be away this long
RETRY_S = 0.25
LOOK_S = 2.0  # between two looks at which sandboxes there are
SLOWEST = 5  # times its limit that a jailed call may take with the queue before it
BATCH = 3  # times its deadline that a batch of calls may take: two, and what a busy host adds
QUEUE_S = 1800.0  # longest wait in the queue
SAID = {  # how a call of the author's code failed, by its status
    RAISED: "raised",
    TIMEOUT: "timed out",
    CRASHED: "crashed",
    BAD_VALUE: "returned no fit value",
    UNSUPPORTED: "has tests that it cannot run",
    OUT_OF_MEMORY: "ran out of memory",
    POSTPONED: "was not begun",
}
FINAL = (OK, RAISED, BAD_VALUE, UNSUPPORTED)  # asked again, such a call would end the same way
KEPT = (OK, OUT_OF_MEMORY, REFUSED)  # how a cell may end whose session goes on


def load_request(job: JobData) -> LoadJob:
    """What a sandbox is told of a job. Damaged: the author's code is not what was packed."""
    bundle_files.check(job.bundle, job.files, MODULES)
    return loading.load_request(job)


class Sandboxes:
    """Which of a job's sandboxes a batch goes to: the one with the fewest calls of ours, of those
    alive. Those of other jobs serve none of it.
    """

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self._first = sandbox(job, 0)  # the one that every job with tools or rewards has
        self._names: list[str] = [self._first]
        self._looked = float("-inf")
        self._out: dict[str, int] = {}

    async def look(self) -> list[str]:
        now = self._mesh.clock.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            entries = await registry.entries(self._mesh.state, "sandbox")
            alive = (e.name for e in entries if e.alive)
            ours = (name for name in alive if service(name)[1] == self._job)
            self._names = sorted(ours) or [self._first]
        return self._names

    async def choose(self, avoid: str = "") -> str:
        names = [name for name in await self.look() if name != avoid] or self._names
        return min(names, key=lambda name: self._out.get(name, 0))

    async def home(self, session: str) -> str:
        """The one for a session: the same for every incarnation of its shard."""
        names = await self.look()
        return names[zlib.crc32(session.encode()) % len(names)]

    def forget(self) -> None:
        """The next choice looks anew: one of them did not answer."""
        self._looked = float("-inf")

    def sent(self, name: str, calls: int) -> None:
        self._out[name] = self._out.get(name, 0) + calls


@dataclass(slots=True, eq=False)
class _ToolSession:
    """The state of one trajectory's tools, at the sandbox that is its home."""

    name: str = ""
    home: str = ""  # the sandbox that has it, once one may have
    calls: int = 0  # under way there
    over: bool = False  # nobody will call again


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool's call, and the state that it works on."""

    name: str
    argument: Any
    session: _ToolSession  # without a name: it needs none
    begun: bool  # the session holds what earlier calls made
    once: bool  # it is not run again when its process is lost


class SandboxClient:
    """Tools and rewards of one job, batched."""

    def __init__(self, mesh: Mesh, job: JobData, failures: Failures | None = None) -> None:
        self._mesh, self._job = mesh, job
        self._failures = failures or Failures(mesh, job.id)
        config = job.config
        self._sandboxes = Sandboxes(mesh, job.id)
        self._jailed = {
            name for name, use in config.environment.tools.items() if builtin.jailed([use])
        }
        self._with_session = {
            name for name in self._jailed if builtin.TOOLS[config.environment.tools[name]].session
        }
        self._once = set(config.environment.once) | self._with_session
        self._sessions: dict[str, _ToolSession] = {}  # by trajectory
        self._ending: set[asyncio.Task[None]] = set()  # sandboxes are being told of ended sessions
        self._tools: Batcher[_Call, CallOutcome] = Batcher(self._run_tools, in_flight=2)
        self._slow: Batcher[_Call, CallOutcome] = Batcher(self._run_tools, limit=1, in_flight=256)
        jailed_reward = builtin.jailed([part.use for part in config.reward.declared])
        self._rewards: Batcher[RewardArguments, CallOutcome] = Batcher(
            self._score, limit=1 if jailed_reward else 256, in_flight=256 if jailed_reward else 2
        )
        self._slow_reward = bool(jailed_reward)

    async def load(self) -> None:
        """Tells the sandboxes about the job; one without tools and reward needs none."""
        if self._job.config.sandboxes:
            for name in await self._sandboxes.look():
                await self._mesh.ref(name).call(Sandbox.load, load_request(self._job))

    async def tool(
        self, name: str, argument: Any, session: str = "", earlier: Sequence[Answered] = ()
    ) -> Any:
        """A tool's value; ToolFailed when it raises, or keeps hanging or crashing.

        `session` names the trajectory, whose `earlier` calls say whether its state must be there.
        What runs the model's code has a value whatever became of it: the model reads how it ended.
        """
        config = self._job.config.environment
        tools = config.tools
        if name not in tools:
            known = ", ".join(sorted(tools)) or "none"
            raise TrajectoryFailed(
                f"no tool is called {name!r}", kind="no such tool", fix=f"the job names: {known}"
            )
        kept = _ToolSession()
        if name in self._with_session and session:
            kept = self._sessions.setdefault(session, _ToolSession(session))
        values = [value for tool, _, value in earlier if tool in self._with_session]
        begun = bool(values) and values[-1].get("status") in KEPT
        call = _Call(name, argument, kept, begun, name in self._once)
        calls = self._slow if name in self._jailed else self._tools
        outcome = await self._decided(calls, call, f"tool {name}", config.tool_deadline_s)
        if outcome.value is not None and name in self._jailed:
            return outcome.value
        if outcome.status == CRASHED and call.once:
            return {"status": CRASHED, "output": f"[crashed: {outcome.error}]"}
        return _value(outcome, f"tool {name}")

    async def reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> float:
        """The job's reward; ToolFailed when the function raises, hangs or returns garbage."""
        deadline_s = self._job.config.reward.deadline_s
        call = self._decided(self._rewards, (row, turns), REWARD, deadline_s)
        return float(_value(await call, REWARD))

    def ended(self, session: str) -> None:
        """A trajectory is over: its session need not be kept. Its sandbox is told meanwhile, after
        the last call that is under way there.
        """
        kept = self._sessions.pop(session, None)
        if kept is not None:
            kept.over = True
            self._end(kept)

    def _end(self, session: _ToolSession) -> None:
        if not session.name or not session.home or session.calls:
            return
        request = EndSessions(self._job.id, [session.name])
        told = self._mesh.ref(session.home).cast(Sandbox.end_sessions, request)
        task = asyncio.get_running_loop().create_task(told, name=f"end of {session.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _decided(
        self, calls: Batcher[Q, CallOutcome], call: Q, what: str, deadline_s: float
    ) -> CallOutcome:
        """The outcome, asked for again when the process that ran the call was lost or too slow, and
        when nobody has begun it in time.
        """
        clock = self._mesh.job_clock
        began = clock.monotonic()
        once = isinstance(call, _Call) and (call.once or call.name in self._jailed)
        attempts = hangs = 0
        while True:
            outcome = await calls.put(call)
            if outcome.status == POSTPONED and clock.monotonic() - began < QUEUE_S:
                continue
            hung = outcome.status == TIMEOUT and outcome.value is None
            if hung:
                kind = f"{what} {SAID[TIMEOUT]}"
                key = "reward.deadline_s" if what == REWARD else "environment.tool_deadline_s"
                self._failures.gave_up(what, kind, outcome.error, deadline_s, key)
            else:
                self._failures.answered(what)
            if outcome.status in FINAL or (once and outcome.value is not None):
                return outcome
            attempts, hangs = attempts + 1, hangs + hung
            spent = attempts == ATTEMPTS or hangs == TIMEOUTS or outcome.status == POSTPONED
            if spent or (isinstance(call, _Call) and call.once):
                return outcome
            await clock.sleep(RETRY_S * attempts)

    async def _run_tools(self, batch: list[_Call]) -> list[CallOutcome | Exception]:
        config = self._job.config.environment
        jailed = batch[0].name in self._jailed
        deadline_s = self._job.config.sandbox.wall_s if jailed else config.tool_deadline_s
        job = self._job.id
        calls = [
            ToolCall(i, job, c.name, c.argument, deadline_s, c.session.name, c.begun, c.once)
            for i, c in enumerate(batch)
        ]
        patience_s = SLOWEST * deadline_s + QUEUE_S if jailed else BATCH * deadline_s + 5.0
        if any(c.once for c in batch):
            outcomes: list[CallOutcome | Exception] = []
            for asked, call in zip(batch, calls, strict=True):
                asked.session.calls += 1
                try:
                    outcomes.append(await self._one(asked, call, patience_s))
                finally:
                    asked.session.calls -= 1
                    if asked.session.over:
                        self._end(asked.session)
            return outcomes
        return await self._patiently(Sandbox.run, RunTools(calls), len(calls), patience_s)

    async def _one(self, asked: _Call, call: ToolCall, patience_s: float) -> CallOutcome:
        """A call that is not asked twice: if its sandbox is lost, it comes back as crashed."""
        session = asked.session
        name = session.home or await self._chosen(session=session.name)
        session.home = name
        for _ in range(ATTEMPTS):
            self._sandboxes.sent(name, 1)
            try:
                ref = self._mesh.ref(name)
                answer = await ref.call(Sandbox.run, RunTools([call]), deadline_s=patience_s)
                outcome: CallOutcome = answer.outcomes[0]
                return outcome
            except NotFound:  # it was not run: this sandbox does not know the job
                await self._load_on(name)
            except Overloaded:  # nor then
                await self._mesh.clock.sleep(RETRY_S)
            except MeshError as error:
                if not error.retryable:
                    raise
                self._sandboxes.forget()
                session.home = ""
                lost = f"the sandbox was lost, with all that the call has done: {error}"
                value = {"status": CRASHED, "output": f"[{CRASHED}: {lost}]"}
                jailed = asked.name in self._jailed
                return CallOutcome(call.id, CRASHED, value if jailed else None, lost)
            finally:
                self._sandboxes.sent(name, -1)
        return CallOutcome(call.id, CRASHED, None, "no sandbox takes the job")

    async def _score(self, batch: list[RewardArguments]) -> list[CallOutcome | Exception]:
        deadline_s = self._job.config.reward.deadline_s
        calls = [
            RewardCall(i, self._job.id, row, turns, deadline_s)
            for i, (row, turns) in enumerate(batch)
        ]
        patience_s = BATCH * deadline_s + (QUEUE_S if self._slow_reward else 5.0)
        return await self._patiently(Sandbox.score, RewardBatch(calls), len(calls), patience_s)

    async def _patiently(
        self, method: Any, request: Any, calls: int, deadline_s: float
    ) -> list[CallOutcome | Exception]:
        """Sandboxes may die and come back: what is asked here is safe to run again, elsewhere."""
        clock = self._mesh.job_clock
        started = clock.monotonic()
        avoid = ""
        while True:
            name = await self._chosen(avoid)
            self._sandboxes.sent(name, calls)
            try:
                answer = await self._mesh.ref(name).call(method, request, deadline_s=deadline_s)
                return list(answer.outcomes)
            except NotFound as error:
                if clock.monotonic() - started > PATIENCE_S:
                    return [ToolFailed(f"{name} does not keep the job: {error}")] * calls
                await self._load_on(name)
            except MeshError as error:
                if not error.retryable:
                    raise
                if clock.monotonic() - started > PATIENCE_S:
                    if not isinstance(error, DeadlineExceeded):
                        raise
                    return [ToolFailed(f"no sandbox answers: {error}")] * calls
                self._sandboxes.forget()
                avoid = name
            finally:
                self._sandboxes.sent(name, -calls)
            await clock.sleep(RETRY_S)

    async def _chosen(self, avoid: str = "", session: str = "") -> str:
        try:
            if session:
                return await self._sandboxes.home(session)
            return await self._sandboxes.choose(avoid)
        except MeshError as error:
            if not error.retryable:
                raise
            return sandbox(self._job.id, 0)

    async def _load_on(self, name: str) -> None:
        """Damaged, if the modules are not what was packed: a sandbox imports them again."""
        try:
            await self._mesh.ref(name).call(Sandbox.load, load_request(self._job))
        except MeshError as error:
            if not error.retryable:
                raise

    async def close(self) -> None:
        await self._tools.close()
        await self._slow.close()
        await self._rewards.close()
        await asyncio.gather(*self._ending)  # a cast is sent or dropped within its deadline


def _value(outcome: CallOutcome, what: str) -> Any:
    if outcome.status == OK:
        return outcome.value
    raise TrajectoryFailed(
        f"{what}: {outcome.status}: {outcome.error}",
        kind=f"{what} {SAID.get(outcome.status, outcome.status)}",
        detail=outcome.error,
        fix="mend the row's tests" if outcome.status == UNSUPPORTED else "see the job's module",
    )
