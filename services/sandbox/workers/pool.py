"""The pool of workers of one job: each call is answered, whatever it does to its process."""

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
from meshrl.common.job.bundle.authored import placed
from meshrl.common.mesh.process.handle import Child, Usage
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.runtime.calls.waits import WaitTable
from meshrl.services.sandbox.outcomes import KILLED, Answer, Ends
from meshrl.services.sandbox.workers.calls import (
    FRAME_BYTES,
    PoolCall,
    PoolFunctions,
    PoolLimits,
    WaitingCall,
    packed_arguments,
    unpacked_answer,
)
from meshrl.services.sandbox.workers.slicing import Durations, charged_s, grows, slice_size
from meshrl.services.sandbox.workers.starting import ENDING_S, WorkerStarter
from meshrl.services.sandbox.workers.worker import shown_name

BASELINE_S = 0.05  # into a call its CPU time is first read: most have ended by then
RECHECK_S = 0.02  # the least between two looks at a call that is nearly over its deadline
ATTEMPTS = 2  # for a call whose process ended: another call may have killed the first
WAITING_MOST = 20_000  # calls; beyond them callers are refused
WAIT_S = 900.0  # longest time of a batch, queue included; callers have shorter deadlines


class _WorkerEnded(Exception):
    """The process must be replaced; its calls are answered or back in the queue."""


class WorkerPool:
    """Runs functions of one job in processes of its own, a few of them warm."""

    def __init__(
        self,
        host: Host,
        clock: Clock,
        functions: PoolFunctions,
        limits: PoolLimits,
        log: Path | None = None,
        waits: WaitTable | None = None,
        ends: Ends | None = None,
    ) -> None:
        self._waits, self._ends = waits or WaitTable(clock), ends or Ends()
        self._job, self.functions = functions.job, functions.references
        self._clock, self._log, self._limits = clock, log, limits
        self._starter = WorkerStarter(host, clock, functions, limits, log)
        self._queue: deque[WaitingCall] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._busy_since: dict[int, float] = {}
        self._durations = Durations()
        self._workers: list[asyncio.Task[None]] = []
        self.replaced = 0  # processes that ended or were killed

    @property
    def size(self) -> int:
        return len(self._workers)

    async def start(self) -> None:
        """Starts the warm workers; ToolFailed if the job's modules do not import."""
        starting = (self._starter.begun() for _ in range(self._limits.warm))
        children = await asyncio.gather(*starting, return_exceptions=True)
        failures = [child for child in children if isinstance(child, BaseException)]
        for child in children:
            if not isinstance(child, BaseException):
                child.kill() if failures else self._keep(child)
        if failures:
            raise failures[0]

    async def stop(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        self._fail_waiting(PeerLost(f"the sandbox unloads job {self._job}"))

    async def run(self, calls: Sequence[PoolCall], *, early: bool = False) -> list[Answer]:
        """What they came to, in order.

        `early`: within two deadlines, so that a function that hangs is known soon. Once one of the
        calls is over its deadline, or they have waited for as long, those that nobody has begun are
        POSTPONED.
        """
        if len(self._queue) + len(calls) > WAITING_MOST:
            raise Overloaded(f"{len(self._queue)} calls of job {self._job} wait already")
        loop = asyncio.get_running_loop()
        known = ", ".join(sorted(map(shown_name, self.functions))) or "nothing"
        waiting: list[WaitingCall] = []
        for work in calls:
            call = WaitingCall(work, loop.create_future(), waiting if early else [])
            waiting.append(call)
            if work.name in self.functions:
                self._queue.append(call)
            else:
                error = f"job {self._job} has no {shown_name(work.name)}; it has {known}"
                call.answer.set_result(Answer(RAISED, None, error))
        self._wake()
        answers = asyncio.gather(*(call.answer for call in waiting))
        span_s = max((call.deadline_s for call in calls), default=0.0)
        try:
            if early:
                with contextlib.suppress(DeadlineExceeded):
                    async with self._clock.timeout(span_s, "a batch of calls"):
                        return await asyncio.shield(answers)
                self._postpone(waiting)
            async with self._clock.timeout(WAIT_S, f"{len(calls)} calls of job {self._job}"):
                return await answers
        finally:
            answers.cancel()  # where nobody waits any more

    def _postpone(self, batch: Sequence[WaitingCall]) -> None:
        """Sends back those of a batch that nobody has begun."""
        asked = {id(call) for call in batch}
        unbegun = [call for call in self._queue if id(call) in asked]
        self._queue = deque(call for call in self._queue if id(call) not in asked)
        for call in unbegun:
            error = f"{shown_name(call.asked.name)} was not begun: others took their time"
            self._settle(call, Answer(POSTPONED, None, error))

    # ------------------------------------------------------------ workers

    def _wake(self) -> None:
        size = slice_size(len(self._queue), self._durations.mean_s)
        for _ in range(-(-len(self._queue) // size)):
            if not self._idle:
                break
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
        now = self._clock.monotonic()
        busy = [now - since for since in self._busy_since.values()]
        held_up = min(busy) if len(busy) == len(self._workers) and busy else 0.0
        waiting = len(self._queue) if not self._idle else 0
        if grows(waiting, self._durations.mean_s, held_up, self.size, self._limits.most):
            self._keep(None)

    def _keep(self, child: Child | None) -> None:
        name = f"sandbox worker of {self._job}"
        self._workers.append(asyncio.create_task(self._keep_worker(child), name=name))

    async def _keep_worker(self, child: Child | None) -> None:
        """Has one process serve slices for ever, and replaces it when it ends."""
        try:
            while True:
                if child is None:
                    child = await self._starter.restarted(self._fail_waiting)
                served = 0
                why = ""  # none: it has served its time
                try:
                    while served < self._limits.recycle:
                        calls = await self._next_slice()
                        served += len(calls)
                        await self._serve(child, calls)
                except _WorkerEnded as end:
                    why = str(end)
                self.replaced += 1
                child.kill()
                code = await child.wait(ENDING_S)
                if why:
                    name = f"worker of {self._job}"
                    self._ends.saw(name, code or KILLED, why, self._log, self._job)
                child.close()
                child = None
        finally:
            if child is not None:
                child.kill()

    def _fail_waiting(self, error: MeshError) -> None:
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            if not call.answer.done():
                call.answer.set_exception(error)

    # ------------------------------------------------------------ calls

    async def _next_slice(self) -> list[WaitingCall]:
        while True:
            while self._queue and self._queue[0].answer.done():  # its caller has gone
                self._queue.popleft()
            if self._queue:
                break
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await idle
        taken = [self._queue.popleft()]
        most = slice_size(len(self._queue) + 1, self._durations.mean_s)
        # A call that has ended a process runs alone: it takes no neighbour with it.
        while not taken[0].attempts and self._queue and len(taken) < most:
            if self._queue[0].attempts:
                break
            taken.append(self._queue.popleft())
        return taken

    async def _serve(self, child: Child, calls: list[WaitingCall]) -> None:
        calls, frame = self._packed(calls)
        if not calls:
            return
        try:
            await child.send(frame)
        except (PeerLost, DeadlineExceeded) as error:  # while idle: not these calls' doing
            self._put_back(calls)
            raise _WorkerEnded(error.message) from None
        begun = self._clock.monotonic()
        self._busy_since[child.pid] = begun
        done = 0
        try:
            for done, call in enumerate(calls):
                self._settle(call, await self._answer(child, 1 + done, call))
        except (PeerLost, BadMessage) as error:
            self._put_back(calls[done + 1 :])
            self._retry(calls[done], str(error))
            raise _WorkerEnded(error.message) from None
        except DeadlineExceeded as error:
            self._put_back(calls[done + 1 :])
            self._settle(calls[done], Answer(TIMEOUT, None, self._placed(calls[done], str(error))))
            self._postpone(calls[done].batch)
            raise _WorkerEnded(f"it was killed: {error.message}") from None
        except asyncio.CancelledError:  # the pool stops
            for call in calls[done:]:
                if not call.answer.done():
                    call.answer.set_exception(PeerLost(f"the sandbox unloads job {self._job}"))
            raise
        finally:
            del self._busy_since[child.pid]
            self._durations.saw(self._clock.monotonic() - begun, len(calls))

    def _packed(self, calls: list[WaitingCall]) -> tuple[list[WaitingCall], bytes]:
        """Those that a frame can hold together, and the frame. Another whose arguments MessagePack
        cannot hold, or no frame, is answered; what fits into the next one waits for it.
        """
        kept: list[WaitingCall] = []
        packed: list[tuple[int, str, bytes]] = []
        size = 0
        for place, call in enumerate(calls):
            problem, arguments = packed_arguments(call.asked)
            if problem:
                self._settle(call, Answer(BAD_VALUE, None, self._placed(call, problem)))
                continue
            if kept and size + len(arguments) > FRAME_BYTES:
                self._put_back(calls[place:])
                break
            size += len(arguments)
            kept.append(call)
            packed.append((len(kept), call.asked.name, arguments))
        return kept, msgpack.packb(packed)

    async def _answer(self, child: Child, call_id: int, call: WaitingCall) -> Answer:
        """What a call comes to. Meanwhile this process says that it waits for the function, so that
        one that takes long is named, and not its sandbox.
        """
        place = self._starter.places.get(call.asked.name, "")
        of = f"{self._job}, {place}" if place else self._job
        on = f"{shown_name(call.asked.name)} of {of} (pid {child.pid})"
        with self._waits.wait("its end", on=on):
            try:
                return await self._answered(child, call_id, call)
            except PeerLost as error:
                raise PeerLost(await self._starter.end_of(child) or error.message) from error

    async def _answered(self, child: Child, call_id: int, call: WaitingCall) -> Answer:
        begun = self._clock.monotonic()
        before: Usage | None = None
        wait_s = min(BASELINE_S, call.asked.deadline_s)
        while True:
            try:
                got, status, value, error = unpacked_answer(await child.recv(wait_s))
            except DeadlineExceeded:
                usage = child.usage()
                if usage is None:
                    raise PeerLost("the process ended") from None
                if usage.state in "Tt":
                    raise PeerLost("somebody stopped the process") from None
                before = before or usage
                charged = charged_s(self._clock.monotonic() - begun, usage, before)
                left = call.asked.deadline_s - charged
                if left <= 0 and wait_s <= RECHECK_S:
                    took = f"took more than {call.asked.deadline_s:g} s"
                    raise DeadlineExceeded(f"{shown_name(call.asked.name)} {took}") from None
                # The last look is short, and comes after the loop has read what lay in the socket.
                wait_s = max(RECHECK_S, left)
                continue
            if got != call_id:
                raise BadMessage(f"an answer to call {got} in place of {call_id}")
            return Answer(status, value, error)

    def _settle(self, call: WaitingCall, answer: Answer) -> None:
        if not call.answer.done():
            call.answer.set_result(answer)

    def _put_back(self, calls: list[WaitingCall]) -> None:
        self._queue.extendleft(reversed(calls))
        self._wake()

    def _retry(self, call: WaitingCall, why: str) -> None:
        call.attempts += 1
        if call.attempts < ATTEMPTS and not call.asked.once:
            self._put_back([call])
        else:
            name, times = shown_name(call.asked.name), "twice" if call.attempts > 1 else "once"
            error = self._placed(call, f"{name} failed its process {times}: {why}")
            self._settle(call, Answer(CRASHED, None, error))

    def _placed(self, call: WaitingCall, error: str) -> str:
        return placed(error, self._starter.places.get(call.asked.name, ""))
