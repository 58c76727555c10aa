"""Client of a job's sandboxes for tools and rewards. It spreads calls by load, retries them when a
sandbox fails, and reports failures of the author's code as typed errors.
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
from meshrl.common.job.bundle import bundle_files, sandbox_request
from meshrl.common.job.bundle.job_data import MODULES, JobData
from meshrl.common.mesh.runtime.calls.batcher import Batcher
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.process_names import parse_service_name, sandbox_name
from meshrl.services.rollout.trajectories.failures import (
    REWARD_FUNCTION,
    FailureReporter,
    TrajectoryFailed,
)

Q = TypeVar("Q")
ToolCallRecord = tuple[str, Any, Any]  # a tool, its input, its value
Turns = list[dict[str, Any]]
RewardArguments = tuple[dict[str, Any], Turns, list[Turns]]  # row, turns, those of a group

MAX_ATTEMPTS = 4  # crashed calls before the trajectory fails by type
MAX_TIMEOUTS = 2  # hung calls: time in a queue does not count, so accidental hangs are rare
UNAVAILABLE_TIMEOUT_S = 600.0  # limit for an unavailable sandbox service
RETRY_S = 0.25
POLL_S = 2.0  # interval of updates of the list of sandboxes
JAILED_CALL_DEADLINES = 5  # limit of a jailed call with its queue, in deadlines
BATCH_DEADLINES = 3  # limit of a batch of calls, in deadlines: two, and a margin for a busy host
MAX_QUEUE_S = 1800.0  # longest wait in the queue
STATUS_TEXTS = {  # failures of a call of the author's code, by status
    RAISED: "raised",
    TIMEOUT: "timed out",
    CRASHED: "crashed",
    BAD_VALUE: "returned an invalid value",
    UNSUPPORTED: "has tests that it cannot run",
    OUT_OF_MEMORY: "ran out of memory",
    POSTPONED: "was not started",
}
FINAL_STATUSES = (
    OK,
    RAISED,
    BAD_VALUE,
    UNSUPPORTED,
)  # a retry of such a call would fail the same way
LIVE_SESSION_STATUSES = (
    OK,
    OUT_OF_MEMORY,
    REFUSED,
)  # statuses of a cell after which the session continues


def build_load_request(job: JobData) -> LoadJob:
    """Build the load request of a job. Raise CorruptData if the author's code differs from the
    packed files.
    """
    bundle_files.check_files(job.bundle, job.files, MODULES)
    return sandbox_request.build_load_request(job)


class SandboxSelector:
    """Selection of a sandbox per batch: the live sandbox of the job with the fewest calls of this
    client.
    """

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh, self._job = mesh, job
        self._first = sandbox_name(job, 0)  # each job with tools or rewards has this one
        self._names: list[str] = [self._first]
        self._polled_at_s = float("-inf")
        self._calls_in_flight: dict[str, int] = {}

    async def list_sandboxes(self) -> list[str]:
        now = self._mesh.clock.monotonic()
        if now - self._polled_at_s > POLL_S:
            self._polled_at_s = now
            entries = await registry.list_entries(self._mesh.state, "sandbox")
            alive = (e.name for e in entries if e.alive)
            ours = (name for name in alive if parse_service_name(name)[1] == self._job)
            self._names = sorted(ours) or [self._first]
        return self._names

    async def choose(self, avoid: str = "") -> str:
        names = [name for name in await self.list_sandboxes() if name != avoid] or self._names
        return min(names, key=lambda name: self._calls_in_flight.get(name, 0))

    async def choose_for_session(self, session: str) -> str:
        """Choose the sandbox of a session, equal for every incarnation of its shard."""
        names = await self.list_sandboxes()
        return names[zlib.crc32(session.encode()) % len(names)]

    def invalidate(self) -> None:
        """Invalidate the list of sandboxes, as one of them did not answer."""
        self._polled_at_s = float("-inf")

    def count_calls(self, name: str, calls: int) -> None:
        self._calls_in_flight[name] = self._calls_in_flight.get(name, 0) + calls


@dataclass(slots=True, eq=False)
class _ToolSession:
    """State of one trajectory's tools, at one sandbox."""

    name: str = ""
    sandbox: str = ""  # sandbox with its state, once it may exist
    calls_in_flight: int = 0  # calls in progress there
    is_finished: bool = False  # no further call follows


@dataclass(frozen=True, slots=True)
class _QueuedToolCall:
    """Tool call with its session."""

    name: str
    argument: Any
    session: _ToolSession  # without a name: not needed
    session_begun: bool  # earlier calls have created session state
    runs_once: bool  # not repeated when its process is lost


class SandboxClient:
    """Batched client of one job's tools and rewards."""

    def __init__(self, mesh: Mesh, job: JobData, failures: FailureReporter | None = None) -> None:
        self._mesh, self._job = mesh, job
        self._failures = failures or FailureReporter(mesh, job.id)
        config = job.config
        self._selector = SandboxSelector(mesh, job.id)
        self._jailed_tools = {
            name for name, use in config.environment.tools.items() if builtin.select_jailed([use])
        }
        self._session_tools = {
            name
            for name in self._jailed_tools
            if builtin.TOOLS[config.environment.tools[name]].has_session
        }
        self._once_tools = set(config.environment.no_retry_tools) | self._session_tools
        self._sessions: dict[str, _ToolSession] = {}  # by trajectory
        # notifications of ended sessions to sandboxes
        self._end_tasks: set[asyncio.Task[None]] = set()
        self._tool_batcher: Batcher[_QueuedToolCall, CallOutcome] = Batcher(
            self._run_tools, max_in_flight=2
        )
        self._jailed_batcher: Batcher[_QueuedToolCall, CallOutcome] = Batcher(
            self._run_tools, max_batch_size=1, max_in_flight=256
        )
        jailed_reward = builtin.select_jailed([part.use for part in config.reward.reward_parts])
        self._reward_batcher: Batcher[RewardArguments, CallOutcome] = Batcher(
            self._score_batch,
            max_batch_size=1 if jailed_reward else 256,
            max_in_flight=256 if jailed_reward else 2,
        )
        self._is_reward_jailed = bool(jailed_reward)

    async def load_job(self) -> None:
        """Load the job on the sandboxes; do nothing without tools and reward."""
        if self._job.config.sandbox_count:
            for name in await self._selector.list_sandboxes():
                await self._mesh.ref(name).call(Sandbox.load_job, build_load_request(self._job))

    async def call_tool(
        self, name: str, argument: Any, session: str = "", earlier: Sequence[ToolCallRecord] = ()
    ) -> Any:
        """Call a tool and return its value. Raise ToolFailed if it raises, or repeatedly hangs or
        crashes.

        `session` names the trajectory; its `earlier` calls show whether session state must exist. A
        tool that runs the model's code always returns a value, which describes failures to the
        model.
        """
        config = self._job.config.environment
        tools = config.tools
        if name not in tools:
            known = ", ".join(sorted(tools)) or "none"
            raise TrajectoryFailed(
                f"there is no tool {name!r}",
                kind="no such tool",
                fix=f"Use a tool of the job: {known}",
            )
        tool_session = _ToolSession()
        if name in self._session_tools and session:
            tool_session = self._sessions.setdefault(session, _ToolSession(session))
        values = [value for tool, _, value in earlier if tool in self._session_tools]
        session_begun = bool(values) and values[-1].get("status") in LIVE_SESSION_STATUSES
        call = _QueuedToolCall(
            name, argument, tool_session, session_begun, name in self._once_tools
        )
        calls = self._jailed_batcher if name in self._jailed_tools else self._tool_batcher
        outcome = await self._call_with_retries(calls, call, f"tool {name}", config.tool_deadline_s)
        if outcome.value is not None and name in self._jailed_tools:
            return outcome.value
        if outcome.status == CRASHED and call.runs_once:
            return {"status": CRASHED, "output": f"[crashed: {outcome.error}]"}
        return _get_value(outcome, f"tool {name}")

    async def compute_reward(self, row: dict[str, Any], turns: list[dict[str, Any]]) -> Any:
        """Compute the job's reward: a number, or with metrics as in `reward_numbers`. Raise
        ToolFailed if the function raises, hangs or returns an invalid value.
        """
        return await self._call_reward((row, turns, []))

    async def compute_group_rewards(self, row: dict[str, Any], group: list[Turns]) -> list[Any]:
        """Compute the rewards of all members of a group, whose turns are given; see
        `compute_reward`.
        """
        return list(await self._call_reward((row, [], group)))

    async def _call_reward(self, arguments: RewardArguments) -> Any:
        deadline_s = self._job.config.reward.deadline_s
        call = self._call_with_retries(self._reward_batcher, arguments, REWARD_FUNCTION, deadline_s)
        return _get_value(await call, REWARD_FUNCTION)

    def end_session(self, session: str) -> None:
        """End the session of a trajectory. Its sandbox is notified in the background, after the
        last call in progress there.
        """
        tool_session = self._sessions.pop(session, None)
        if tool_session is not None:
            tool_session.is_finished = True
            self._send_end(tool_session)

    def _send_end(self, session: _ToolSession) -> None:
        if not session.name or not session.sandbox or session.calls_in_flight:
            return
        request = EndSessions(self._job.id, [session.name])
        end_call = self._mesh.ref(session.sandbox).cast(Sandbox.end_sessions, request)
        task = asyncio.get_running_loop().create_task(end_call, name=f"end of {session.name}")
        self._end_tasks.add(task)
        task.add_done_callback(self._end_tasks.discard)

    async def _call_with_retries(
        self, batcher: Batcher[Q, CallOutcome], call: Q, what: str, deadline_s: float
    ) -> CallOutcome:
        """Call with retries: repeat a call whose process was lost or too slow, or that was not
        started in time.
        """
        clock = self._mesh.job_clock
        began = clock.monotonic()
        once = isinstance(call, _QueuedToolCall) and (
            call.runs_once or call.name in self._jailed_tools
        )
        attempts = hangs = 0
        while True:
            outcome = await batcher.submit(call)
            if outcome.status == POSTPONED and clock.monotonic() - began < MAX_QUEUE_S:
                continue
            hung = outcome.status == TIMEOUT and outcome.value is None
            if hung:
                kind = f"{what} {STATUS_TEXTS[TIMEOUT]}"
                key = (
                    "reward.deadline_s"
                    if what == REWARD_FUNCTION
                    else "environment.tool_deadline_s"
                )
                self._failures.count_timeout(what, kind, outcome.error, deadline_s, key)
            else:
                self._failures.clear_timeouts(what)
            if outcome.status in FINAL_STATUSES or (once and outcome.value is not None):
                return outcome
            attempts, hangs = attempts + 1, hangs + hung
            spent = attempts == MAX_ATTEMPTS or hangs == MAX_TIMEOUTS or outcome.status == POSTPONED
            if spent or (isinstance(call, _QueuedToolCall) and call.runs_once):
                return outcome
            await clock.sleep(RETRY_S * attempts)

    async def _run_tools(self, batch: list[_QueuedToolCall]) -> list[CallOutcome | Exception]:
        config = self._job.config.environment
        jailed = batch[0].name in self._jailed_tools
        deadline_s = self._job.config.sandbox.wall_s if jailed else config.tool_deadline_s
        job = self._job.id
        calls = [
            ToolCall(
                i, job, c.name, c.argument, deadline_s, c.session.name, c.session_begun, c.runs_once
            )
            for i, c in enumerate(batch)
        ]
        patience_s = (
            JAILED_CALL_DEADLINES * deadline_s + MAX_QUEUE_S
            if jailed
            else BATCH_DEADLINES * deadline_s + 5.0
        )
        if any(c.runs_once for c in batch):
            outcomes: list[CallOutcome | Exception] = []
            for queued_call, call in zip(batch, calls, strict=True):
                queued_call.session.calls_in_flight += 1
                try:
                    outcomes.append(await self._run_once(queued_call, call, patience_s))
                finally:
                    queued_call.session.calls_in_flight -= 1
                    if queued_call.session.is_finished:
                        self._send_end(queued_call.session)
            return outcomes
        return await self._send_with_retries(
            Sandbox.run_tools, RunTools(calls), len(calls), patience_s
        )

    async def _run_once(
        self, queued: _QueuedToolCall, call: ToolCall, timeout_s: float
    ) -> CallOutcome:
        """Run a call at most once: if its sandbox is lost, return it as crashed."""
        session = queued.session
        name = session.sandbox or await self._choose_sandbox(session=session.name)
        session.sandbox = name
        for _ in range(MAX_ATTEMPTS):
            self._selector.count_calls(name, 1)
            try:
                ref = self._mesh.ref(name)
                answer = await ref.call(Sandbox.run_tools, RunTools([call]), deadline_s=timeout_s)
                outcome: CallOutcome = answer.outcomes[0]
                return outcome
            except NotFound:  # it did not run: this sandbox has not loaded the job
                await self._load_on(name)
            except Overloaded:  # it did not run either
                await self._mesh.clock.sleep(RETRY_S)
            except MeshError as error:
                if not error.retryable:
                    raise
                self._selector.invalidate()
                session.sandbox = ""
                lost = f"the sandbox was lost with the state of the session: {error}"
                value = {"status": CRASHED, "output": f"[{CRASHED}: {lost}]"}
                jailed = queued.name in self._jailed_tools
                return CallOutcome(call.id, CRASHED, value if jailed else None, lost)
            finally:
                self._selector.count_calls(name, -1)
        return CallOutcome(call.id, CRASHED, None, "no sandbox accepts the job")

    async def _score_batch(self, batch: list[RewardArguments]) -> list[CallOutcome | Exception]:
        deadline_s = self._job.config.reward.deadline_s
        calls = [
            RewardCall(i, self._job.id, row, turns, deadline_s, group)
            for i, (row, turns, group) in enumerate(batch)
        ]
        patience_s = BATCH_DEADLINES * deadline_s + (MAX_QUEUE_S if self._is_reward_jailed else 5.0)
        return await self._send_with_retries(
            Sandbox.score_trajectories, RewardBatch(calls), len(calls), patience_s
        )

    async def _send_with_retries(
        self, method: Any, request: Any, calls: int, deadline_s: float
    ) -> list[CallOutcome | Exception]:
        """Send idempotent calls, and retry them on other sandboxes if one is lost."""
        clock = self._mesh.job_clock
        started = clock.monotonic()
        avoid = ""
        while True:
            name = await self._choose_sandbox(avoid)
            self._selector.count_calls(name, calls)
            try:
                answer = await self._mesh.ref(name).call(method, request, deadline_s=deadline_s)
                return list(answer.outcomes)
            except NotFound as error:
                if clock.monotonic() - started > UNAVAILABLE_TIMEOUT_S:
                    return [ToolFailed(f"{name} unloads the job repeatedly: {error}")] * calls
                await self._load_on(name)
            except MeshError as error:
                if not error.retryable:
                    raise
                if clock.monotonic() - started > UNAVAILABLE_TIMEOUT_S:
                    if not isinstance(error, DeadlineExceeded):
                        raise
                    return [ToolFailed(f"no sandbox answers: {error}")] * calls
                self._selector.invalidate()
                avoid = name
            finally:
                self._selector.count_calls(name, -calls)
            await clock.sleep(RETRY_S)

    async def _choose_sandbox(self, avoid: str = "", session: str = "") -> str:
        try:
            if session:
                return await self._selector.choose_for_session(session)
            return await self._selector.choose(avoid)
        except MeshError as error:
            if not error.retryable:
                raise
            return sandbox_name(self._job.id, 0)

    async def _load_on(self, name: str) -> None:
        """Load the job on a sandbox. Raise CorruptData if the modules differ from the packed files,
        as a sandbox imports them again.
        """
        try:
            await self._mesh.ref(name).call(Sandbox.load_job, build_load_request(self._job))
        except MeshError as error:
            if not error.retryable:
                raise

    async def close(self) -> None:
        await self._tool_batcher.close()
        await self._jailed_batcher.close()
        await self._reward_batcher.close()
        await asyncio.gather(*self._end_tasks)  # a cast is sent or dropped within its deadline


def _get_value(outcome: CallOutcome, what: str) -> Any:
    if outcome.status == OK:
        return outcome.value
    raise TrajectoryFailed(
        f"{what}: {outcome.status}: {outcome.error}",
        kind=f"{what} {STATUS_TEXTS.get(outcome.status, outcome.status)}",
        detail=outcome.error,
        fix="Correct the row's tests"
        if outcome.status == UNSUPPORTED
        else "Correct the function in the job's module",
    )
