"""Pool of workers of one job, in which each call is answered, even if its process dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgpack

from meshrl.common.api.sandbox import BAD_VALUE, CRASHED, POSTPONED, RAISED, TIMEOUT
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, MeshError, Overloaded, PeerLost
from meshrl.common.job.bundle.source_locations import append_location
from meshrl.common.mesh.process.child_handle import ChildProcess, ProcessUsage
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.outcomes import KILLED_EXIT_CODE, CallResult, ExitReporter
from meshrl.services.sandbox.workers.calls import (
    FRAME_BYTES,
    PoolCall,
    PoolFunctions,
    PoolLimits,
    WaitingCall,
    pack_arguments,
    unpack_result,
)
from meshrl.services.sandbox.workers.slice_policy import (
    CallDurationAverage,
    compute_charged_s,
    compute_slice_size,
    should_add_worker,
)
from meshrl.services.sandbox.workers.worker import format_name
from meshrl.services.sandbox.workers.worker_starter import KILL_TIMEOUT_S, WorkerStarter

FIRST_CPU_CHECK_S = 0.05  # into a call when its CPU time is first read: most have ended by then
MIN_CPU_CHECK_S = 0.02  # the minimum between two checks of a call that is nearly over its deadline
ATTEMPTS = 2  # for a call whose process ended: another call may have killed the first
MAX_WAITING_CALLS = 20_000  # calls; beyond them callers are rejected
MAX_BATCH_S = 900.0  # longest time of a batch, queue included; callers have shorter deadlines


class _WorkerExited(Exception):
    """Error raised when a process must be replaced; its calls are answered or back in the queue."""


class WorkerPool:
    """Pool that runs functions of one job in processes of its own, a few of them warm."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        functions: PoolFunctions,
        limits: PoolLimits,
        log: Path | None = None,
        waits: WaitTable | None = None,
        exit_reporter: ExitReporter | None = None,
    ) -> None:
        self._waits, self._exit_reporter = (
            waits or WaitTable(clock),
            exit_reporter or ExitReporter(),
        )
        self._job, self.functions = functions.job, functions.references
        self._clock, self._log, self._limits = clock, log, limits
        self._starter = WorkerStarter(host, clock, functions, limits, log)
        self._queue: deque[WaitingCall] = deque()
        self._idle_waiters: deque[asyncio.Future[None]] = deque()
        self._busy_since: dict[int, float] = {}
        self._durations = CallDurationAverage()
        self._workers: list[asyncio.Task[None]] = []
        self.replaced_count = 0  # processes that ended or were killed

    @property
    def size(self) -> int:
        return len(self._workers)

    async def start(self) -> None:
        """Start the warm workers; ToolFailed if the job's modules do not import."""
        starting = (self._starter.start_initial() for _ in range(self._limits.warm_workers))
        children = await asyncio.gather(*starting, return_exceptions=True)
        failures = [child for child in children if isinstance(child, BaseException)]
        for child in children:
            if not isinstance(child, BaseException):
                child.kill() if failures else self._add_worker(child)
        if failures:
            raise failures[0]

    async def stop(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        self._fail_waiting(PeerLost(f"the sandbox unloads job {self._job}"))

    async def run(
        self, calls: Sequence[PoolCall], *, postpone_slow: bool = False
    ) -> list[CallResult]:
        """Run calls and return their results, in order.

        With `postpone_slow` this takes at most two deadlines, so that a hanging function is
        detected soon. Once a call exceeds its deadline, or the calls have waited that long, those
        that no worker has begun are POSTPONED.
        """
        if len(self._queue) + len(calls) > MAX_WAITING_CALLS:
            raise Overloaded(f"{len(self._queue)} calls of job {self._job} already wait")
        loop = asyncio.get_running_loop()
        known = ", ".join(sorted(map(format_name, self.functions))) or "none"
        waiting: list[WaitingCall] = []
        for work in calls:
            call = WaitingCall(work, loop.create_future(), waiting if postpone_slow else [])
            waiting.append(call)
            if work.name in self.functions:
                self._queue.append(call)
            else:
                error = f"job {self._job} has no {format_name(work.name)}; it has {known}"
                call.result.set_result(CallResult(RAISED, None, error))
        self._wake()
        answers = asyncio.gather(*(call.result for call in waiting))
        # An abandoned batch is cancelled below, and no caller retrieves that.
        answers.add_done_callback(lambda done: done.cancelled() or done.exception())
        span_s = max((call.deadline_s for call in calls), default=0.0)
        try:
            if postpone_slow:
                with contextlib.suppress(DeadlineExceeded):
                    async with self._clock.timeout(span_s, "a batch of calls"):
                        return await asyncio.shield(answers)
                self._postpone(waiting)
            async with self._clock.timeout(MAX_BATCH_S, f"{len(calls)} calls of job {self._job}"):
                return await answers
        finally:
            answers.cancel()  # where no caller waits any more

    def _postpone(self, batch: Sequence[WaitingCall]) -> None:
        """Postpone the calls of a batch that no worker has begun."""
        batch_ids = {id(call) for call in batch}
        not_started = [call for call in self._queue if id(call) in batch_ids]
        self._queue = deque(call for call in self._queue if id(call) not in batch_ids)
        for call in not_started:
            error = f"{format_name(call.call.name)} was not started: other calls took too long"
            self._set_result(call, CallResult(POSTPONED, None, error))

    # ------------------------------------------------------------ workers

    def _wake(self) -> None:
        size = compute_slice_size(len(self._queue), self._durations.mean_s)
        for _ in range(-(-len(self._queue) // size)):
            if not self._idle_waiters:
                break
            idle = self._idle_waiters.popleft()
            if not idle.done():
                idle.set_result(None)
        now = self._clock.monotonic()
        busy = [now - since for since in self._busy_since.values()]
        held_up = min(busy) if len(busy) == len(self._workers) and busy else 0.0
        waiting = len(self._queue) if not self._idle_waiters else 0
        if should_add_worker(
            waiting, self._durations.mean_s, held_up, self.size, self._limits.max_workers
        ):
            self._add_worker(None)

    def _add_worker(self, child: ChildProcess | None) -> None:
        name = f"sandbox worker of {self._job}"
        self._workers.append(asyncio.create_task(self._run_worker(child), name=name))

    async def _run_worker(self, child: ChildProcess | None) -> None:
        """Serve slices with one process until cancelled, and replace it when it ends."""
        try:
            while True:
                if child is None:
                    child = await self._starter.restart(self._fail_waiting)
                served = 0
                why = ""  # none: it has served its number of calls
                try:
                    while served < self._limits.max_calls_per_worker:
                        calls = await self._take_slice()
                        served += len(calls)
                        await self._serve(child, calls)
                except _WorkerExited as end:
                    why = str(end)
                self.replaced_count += 1
                child.kill()
                code = await child.wait(KILL_TIMEOUT_S)
                if why:
                    name = f"worker of {self._job}"
                    self._exit_reporter.record_exit(
                        name, code or KILLED_EXIT_CODE, why, self._log, self._job
                    )
                child.close()
                child = None
        finally:
            if child is not None:
                child.kill()

    def _fail_waiting(self, error: MeshError) -> None:
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            if not call.result.done():
                call.result.set_exception(error)

    # ------------------------------------------------------------ calls

    async def _take_slice(self) -> list[WaitingCall]:
        while True:
            while self._queue and self._queue[0].result.done():  # its caller has gone
                self._queue.popleft()
            if self._queue:
                break
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(idle)
            await idle
        calls = [self._queue.popleft()]
        most = compute_slice_size(len(self._queue) + 1, self._durations.mean_s)
        # A call that has ended a process runs alone, so that it ends no other call.
        while not calls[0].attempts and self._queue and len(calls) < most:
            if self._queue[0].attempts:
                break
            calls.append(self._queue.popleft())
        return calls

    async def _serve(self, child: ChildProcess, calls: list[WaitingCall]) -> None:
        calls, frame = self._pack_slice(calls)
        if not calls:
            return
        try:
            await child.send(frame)
        except (PeerLost, DeadlineExceeded) as error:  # while idle: not caused by these calls
            self._requeue(calls)
            raise _WorkerExited(error.message) from None
        started_at = self._clock.monotonic()
        self._busy_since[child.pid] = started_at
        done = 0
        try:
            for done, call in enumerate(calls):
                self._set_result(call, await self._receive_result(child, 1 + done, call))
        except (PeerLost, BadMessage) as error:
            self._requeue(calls[done + 1 :])
            self._retry_or_fail(calls[done], str(error))
            raise _WorkerExited(error.message) from None
        except DeadlineExceeded as error:
            self._requeue(calls[done + 1 :])
            why = self._add_source_location(calls[done], str(error))
            self._set_result(calls[done], CallResult(TIMEOUT, None, why))
            self._postpone(calls[done].batch)
            raise _WorkerExited(f"the process was killed: {why}") from None
        except asyncio.CancelledError:  # the pool stops
            for call in calls[done:]:
                if not call.result.done():
                    call.result.set_exception(PeerLost(f"the sandbox unloads job {self._job}"))
            raise
        finally:
            del self._busy_since[child.pid]
            self._durations.add(self._clock.monotonic() - started_at, len(calls))

    def _pack_slice(self, calls: list[WaitingCall]) -> tuple[list[WaitingCall], bytes]:
        """Pack the calls that fit into one frame, and return them with the frame.

        A call whose arguments MessagePack or a frame cannot hold is answered. The rest waits for
        the next frame.
        """
        packed_calls: list[WaitingCall] = []
        packed: list[tuple[int, str, bytes]] = []
        size = 0
        for place, call in enumerate(calls):
            problem, arguments = pack_arguments(call.call)
            if problem:
                self._set_result(
                    call, CallResult(BAD_VALUE, None, self._add_source_location(call, problem))
                )
                continue
            if packed_calls and size + len(arguments) > FRAME_BYTES:
                self._requeue(calls[place:])
                break
            size += len(arguments)
            packed_calls.append(call)
            packed.append((len(packed_calls), call.call.name, arguments))
        return packed_calls, msgpack.packb(packed)

    async def _receive_result(
        self, child: ChildProcess, call_id: int, call: WaitingCall
    ) -> CallResult:
        """Receive the result of a call.

        This process publishes that it waits for the function, so that a slow function is named, and
        not its sandbox.
        """
        place = self._starter.source_locations.get(call.call.name, "")
        of = f"{self._job}, {place}" if place else self._job
        on = f"{format_name(call.call.name)} of {of} (pid {child.pid})"
        with self._waits.wait("the end of the call", on=on):
            try:
                return await self._receive_within_deadline(child, call_id, call)
            except PeerLost as error:
                raise PeerLost(await self._starter.describe_exit(child) or error.message) from error

    async def _receive_within_deadline(
        self, child: ChildProcess, call_id: int, call: WaitingCall
    ) -> CallResult:
        started_at = self._clock.monotonic()
        before: ProcessUsage | None = None
        wait_s = min(FIRST_CPU_CHECK_S, call.call.deadline_s)
        while True:
            try:
                got, status, value, error = unpack_result(await child.recv(wait_s))
            except DeadlineExceeded:
                usage = child.read_usage()
                if usage is None:
                    raise PeerLost("the process exited") from None
                if usage.state in "Tt":
                    raise PeerLost("the process was stopped by a signal") from None
                before = before or usage
                charged = compute_charged_s(self._clock.monotonic() - started_at, usage, before)
                remaining_s = call.call.deadline_s - charged
                if remaining_s <= 0 and wait_s <= MIN_CPU_CHECK_S:
                    took = f"took more than {call.call.deadline_s:g} s"
                    raise DeadlineExceeded(f"{format_name(call.call.name)} {took}") from None
                # The last check is short, and comes after the loop has read the socket's content.
                wait_s = max(MIN_CPU_CHECK_S, remaining_s)
                continue
            if got != call_id:
                raise BadMessage(f"an answer to call {got} instead of {call_id}")
            return CallResult(status, value, error)

    def _set_result(self, call: WaitingCall, result: CallResult) -> None:
        if not call.result.done():
            call.result.set_result(result)

    def _requeue(self, calls: list[WaitingCall]) -> None:
        self._queue.extendleft(reversed(calls))
        self._wake()

    def _retry_or_fail(self, call: WaitingCall, why: str) -> None:
        call.attempts += 1
        if call.attempts < ATTEMPTS and not call.call.no_retry:
            self._requeue([call])
        else:
            name, times = format_name(call.call.name), "twice" if call.attempts > 1 else "once"
            error = self._add_source_location(call, f"{name} failed its process {times}: {why}")
            self._set_result(call, CallResult(CRASHED, None, error))

    def _add_source_location(self, call: WaitingCall, error: str) -> str:
        return append_location(error, self._starter.source_locations.get(call.call.name, ""))
