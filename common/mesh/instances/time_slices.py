"""Time slices of an instance within its gang, each around one piece of arithmetic only.

Example:
    async with time_slices.time_slice("train_step"):
        await run_blocking(compute)

The block awaits nothing outside of the gang: no store, no shard, no other job. If the instance is
not time-sliced, the block runs at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.node import AcquireSlice, ReleaseSlice, TimeSlice, Worker
from meshrl.common.base.errors import DeadlineExceeded, MeshError, Refused
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import RetryPolicy
from meshrl.common.mesh.runtime.serial_executor import consume_exception
from meshrl.common.state.pool.demand.profiles import ProfileRecorder

T = TypeVar("T")

RETRY_S = 0.1  # between two requests, while the scheduler or this instance is unavailable
ESTIMATE_DECAY = 0.95  # factor of the longest duration so far, per time slice


@dataclass(frozen=True, slots=True)
class UsedSlice:
    """Time slice that a process has had. Times are seconds of its monotonic clock."""

    function: str
    requested_s: float
    granted_s: float
    ended_s: float
    switch_s: float = 0.0  # of the wait: moves of its tensors
    loaded_bytes: int = 0  # moved to the accelerators then
    hidden_bytes: int = 0  # moved there before, while others computed
    other_jobs_s: float = 0.0  # of the wait: slices of other jobs


class SliceClient:
    """Time slices of one instance: one at a time, whichever function requests it."""

    def __init__(
        self,
        mesh: Mesh,
        scheduler: str,
        instance: str,
        generation: int,
        *,
        enabled: bool = False,
        starts_process: bool = False,
    ) -> None:
        """Create a client. `scheduler` is the process of the gang's first worker; it may be ""
        until enabled. See `AcquireSlice` for `starts_process`.
        """
        self._starts_process = starts_process
        self._mesh, self._scheduler = mesh, scheduler
        self._instance, self._generation = instance, generation
        self.is_enabled = enabled  # see `set_enabled`
        self._last_ticket = 0
        self._busy = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self._unsliced_count = 0  # pieces that run without a time slice
        self._all_sliced = asyncio.Event()
        self._all_sliced.set()
        self._longest_s: dict[str, float] = {}  # decaying maximum by function
        # time of the request and answer, by ticket until its release
        self._granted: dict[int, tuple[float, TimeSlice]] = {}
        self.profile = ProfileRecorder()
        self.kinds_by_function: dict[str, Sequence[str]] = {}  # as last requested; none: all
        self.on_release: Callable[[UsedSlice], None] = lambda _: None
        self._release_task: asyncio.Task[None] | None = None
        self._detached: set[asyncio.Task[Any]] = set()  # pieces whose caller was cancelled
        self.quantum_s = 0.0  # of the last time slice: see `TimeSlice`
        self.slice_count, self.wait_time_s, self.run_time_s = 0, 0.0, 0.0
        self._run_time_by_function: dict[str, float] = {}
        self._switch_time_s, self._loaded_bytes, self._hidden_bytes = 0.0, 0, 0

    def stats(self) -> dict[str, Any]:
        """Return counts and seconds of time slices so far; `slice_s` by function."""
        return {
            "turns": self.slice_count,
            "turn_wait_s": round(self.wait_time_s, 3),
            "turn_held_s": round(self.run_time_s, 3),
            "slice_s": {
                function: round(seconds, 3)
                for function, seconds in self._run_time_by_function.items()
            },
            "slice_switch_s": round(self._switch_time_s, 3),
            "slice_loaded_bytes": self._loaded_bytes,
            "slice_hidden_bytes": self._hidden_bytes,
        }

    def estimate_s(self, function: str) -> float:
        """Return the expected seconds of a function's next piece, from earlier pieces, or from the
        profile of its kind; 0 without any.
        """
        return self._longest_s.get(function) or self.profile.estimate_s(function)

    async def set_enabled(self, enabled: bool) -> None:
        """Set whether pieces run in time slices from now on.

        Returns when no piece runs without a time slice that it needs. A current time slice is
        released as usual.
        """
        self.is_enabled = enabled
        if enabled:
            await self._all_sliced.wait()

    @asynccontextmanager
    async def time_slice(
        self, function: str, estimate_s: float = 0.0, kinds: Sequence[str] = ()
    ) -> AsyncIterator[None]:
        """Run the block in a time slice; other computations of this process wait for its end.

        `estimate_s` raises the measured estimate of the block's duration. `kinds` of the instance's
        tensors are on the accelerator in the block; none: all. Requests to an
        unavailable scheduler are repeated within a bound (`RetryPolicy`), whose last error is
        raised. Raises Refused within another time slice.
        """
        if not self.is_enabled:
            with self._run_unsliced(function, kinds):
                yield
            return
        if self._holder is not None and self._holder is asyncio.current_task():
            raise Refused(f"{function} starts within a time slice", where=self._mesh.name)
        async with self._busy:
            ticket = await self.acquire_slice(function, estimate_s, kinds)
            self._holder = asyncio.current_task()
            began = self._mesh.clock.monotonic()
            try:
                yield
            finally:
                self._holder = None
                self.release_slice(ticket, function, self._mesh.clock.monotonic() - began)

    async def run_in_slice(
        self,
        function: str,
        work: Callable[[], Awaitable[T]],
        estimate_s: float = 0.0,
        kinds: Sequence[str] = (),
    ) -> T:
        """Run `work` in a time slice and return its result.

        Work that has begun keeps its time slice until it ends, even if the caller is cancelled: its
        thread continues to compute.
        """
        if not self.is_enabled:
            with self._run_unsliced(function, kinds):
                return await work()
        has_started = False

        async def piece() -> T:
            nonlocal has_started
            async with self.time_slice(function, estimate_s, kinds):
                has_started = True
                return await work()

        task = asyncio.create_task(piece(), name=function)
        task.add_done_callback(consume_exception)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not has_started:
                task.cancel()
            self._detached.add(task)
            task.add_done_callback(self._detached.discard)
            raise

    async def acquire_slice(
        self, function: str, estimate_s: float = 0.0, kinds: Sequence[str] = ()
    ) -> int:
        """Acquire a time slice outside a block and return its ticket.

        The caller must call `release_slice` in every case, and request no other time slice before.
        """
        clock = self._mesh.clock
        began = clock.monotonic()
        if self._release_task is not None:
            await asyncio.wait([self._release_task])  # the scheduler needs requests in order
        self._last_ticket += 1
        self.kinds_by_function[function] = kinds
        request = AcquireSlice(
            instance=self._instance,
            generation=self._generation,
            process=self._mesh.name,
            incarnation=self._mesh.incarnation,
            ticket=self._last_ticket,
            function=function,
            estimate_s=max(estimate_s, self.estimate_s(function)),
            kinds=list(kinds),
            is_first=function not in self._longest_s,
            starts_process=self._starts_process,
            repeat_gap_s=self.profile.find_repeat_gap_s(function),
        )
        try:
            granted = await self._call_scheduler(Worker.acquire_slice, request)
            self.quantum_s = granted.quantum_s
        except BaseException:
            self._release_in_background(request.ticket)
            raise
        finally:
            self.wait_time_s += clock.monotonic() - began
        self.slice_count += 1
        self._granted[request.ticket] = began, granted
        self._switch_time_s += granted.switch_s
        self._loaded_bytes += granted.loaded_bytes
        self._hidden_bytes += granted.hidden_bytes
        return request.ticket

    def release_slice(self, ticket: int, function: str, duration_s: float) -> None:
        """Release a time slice of `acquire_slice` after `duration_s` seconds, in the background.

        One of 0 seconds was not used, and is no sample of the function's duration.
        """
        ended = self._mesh.clock.monotonic()
        self.run_time_s += duration_s
        of = self._run_time_by_function
        of[function] = of.get(function, 0.0) + duration_s
        requested, granted = self._granted.pop(ticket)
        if duration_s:
            self.add_piece(function, requested, duration_s, ended)
        self._release_in_background(ticket)
        moves = granted.switch_s, granted.loaded_bytes, granted.hidden_bytes, granted.other_jobs_s
        self.on_release(UsedSlice(function, requested, ended - duration_s, ended, *moves))

    def add_piece(
        self, function: str, requested_s: float, duration_s: float, ended_s: float
    ) -> None:
        """Add a piece, in a time slice or without, to the estimates and to the profile."""
        self._longest_s[function] = max(duration_s, ESTIMATE_DECAY * self.estimate_s(function))
        self.profile.add(function, requested_s, duration_s, ended_s)

    def _release_in_background(self, ticket: int) -> None:
        self._release_task = asyncio.create_task(
            self._send_release(ticket), name="release a time slice"
        )

    async def _send_release(self, ticket: int) -> None:
        """Send a release until the scheduler accepts it; a restarted scheduler has lost the time
        slice.
        """
        back = ReleaseSlice(self._instance, self._mesh.incarnation, ticket)
        try:
            await self._call_scheduler(Worker.release_slice, back)
        except MeshError as error:  # the next request publishes its wait
            self._mesh.log.warning("a time slice cannot be released", error=str(error))

    async def _call_scheduler(self, method: Call[Any, T], request: Any) -> T:
        patience = RetryPolicy(self._mesh.clock)
        try:
            while True:
                try:
                    return await self._mesh.ref(self._scheduler).call(method, request)
                except MeshError as error:
                    # other instances may hold time slices: that wait is expected
                    if method is not Worker.acquire_slice or not isinstance(
                        error, DeadlineExceeded
                    ):
                        patience.record_failure(error)
                await self._mesh.clock.sleep(RETRY_S)
        finally:
            patience.close()

    @contextmanager
    def _run_unsliced(self, function: str, kinds: Sequence[str]) -> Iterator[None]:
        self.kinds_by_function[function] = kinds
        self._unsliced_count += 1
        self._all_sliced.clear()
        began = self._mesh.clock.monotonic()
        try:
            yield
            ended = self._mesh.clock.monotonic()
            self.add_piece(function, began, ended - began, ended)
        finally:
            self._unsliced_count -= 1
            if not self._unsliced_count:
                self._all_sliced.set()
