"""Takes turns with the other residents of a gang: around each piece of arithmetic, and around
nothing else.

    async with turns.turn("train_step"):
        await run_blocking(compute)

Nothing outside of the gang is awaited within the block: no store, no shard, no other job. Where the
resident takes no turns the block runs at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.node import GiveBack, TakeTurn, Worker
from meshrl.common.base.errors import DeadlineExceeded, MeshError, Refused
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import Patience
from meshrl.common.mesh.runtime.serial_executor import looked_at

T = TypeVar("T")

AGAIN_S = 0.1  # between two requests, while the keeper is away or does not know this resident yet
FORGET = 0.95  # a piece this share as long as the longest so far is what is expected next


class Turns:
    """The turns of one resident: one at a time, of any function."""

    def __init__(
        self, mesh: Mesh, keeper: str, resident: str, generation: int, *, enabled: bool = False
    ) -> None:
        """`keeper` is the process of the gang's first worker; it may be "" while not `enabled`."""
        self._mesh, self._keeper = mesh, keeper
        self._resident, self._generation = resident, generation
        self.enabled = enabled  # see `settle`
        self._asked = 0
        self._busy = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self._free = 0  # pieces that run without a turn
        self._none_free = asyncio.Event()
        self._none_free.set()
        self._longest_s: dict[str, float] = {}  # of the pieces so far, by function; it fades
        self._giving: asyncio.Task[None] | None = None
        self._left: set[asyncio.Task[Any]] = set()  # pieces that nobody waits for
        self.taken, self.waited_s, self.held_s = 0, 0.0, 0.0

    def stats(self) -> dict[str, Any]:
        """What there was so far."""
        return {
            "turns": self.taken,
            "turn_wait_s": round(self.waited_s, 3),
            "turn_held_s": round(self.held_s, 3),
        }

    def expected_s(self, function: str) -> float:
        """How long its next piece may take, by those before it; 0: there was none."""
        return self._longest_s.get(function, 0.0)

    async def settle(self, enabled: bool) -> None:
        """Whether turns are taken from now on. Returns when nothing runs without one any more that
        should have one; a turn that is held is given back as ever.
        """
        self.enabled = enabled
        if enabled:
            await self._none_free.wait()

    @asynccontextmanager
    async def turn(self, function: str, estimate_s: float = 0.0) -> AsyncIterator[None]:
        """The block runs in a turn. What else this process wants to compute waits for its end.

        `estimate_s` is of the block, where the caller knows better than what was measured. A keeper
        that is away is asked again, within a bound (`Patience`), whose last error is raised.
        Refused: a turn within a turn.
        """
        if not self.enabled:
            with self._without():
                yield
            return
        if self._holder is not None and self._holder is asyncio.current_task():
            raise Refused(f"{function} begins within a turn", where=self._mesh.name)
        async with self._busy:
            ticket = await self.take(function, estimate_s)
            self._holder = asyncio.current_task()
            began = self._mesh.clock.monotonic()
            try:
                yield
            finally:
                self._holder = None
                self.give_back(ticket, function, self._mesh.clock.monotonic() - began)

    async def run(
        self, function: str, work: Callable[[], Awaitable[T]], estimate_s: float = 0.0
    ) -> T:
        """What `work` returns, which runs in a turn. Work that has begun keeps its turn to its end
        when nobody waits for it any more: its thread goes on computing.
        """
        if not self.enabled:
            with self._without():
                return await work()
        begun = False

        async def piece() -> T:
            nonlocal begun
            async with self.turn(function, estimate_s):
                begun = True
                return await work()

        task = asyncio.create_task(piece(), name=function)
        task.add_done_callback(looked_at)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not begun:
                task.cancel()
            self._left.add(task)
            task.add_done_callback(self._left.discard)
            raise

    async def take(self, function: str, estimate_s: float = 0.0) -> int:
        """The ticket of a turn, for who cannot use a block: `give_back` must follow, whatever
        happens, and no other turn be asked for before.
        """
        clock = self._mesh.clock
        began = clock.monotonic()
        if self._giving is not None:
            await asyncio.wait([self._giving])  # the keeper takes requests in their order
        self._asked += 1
        request = TakeTurn(
            resident=self._resident,
            generation=self._generation,
            process=self._mesh.name,
            incarnation=self._mesh.incarnation,
            ticket=self._asked,
            function=function,
            estimate_s=max(estimate_s, self.expected_s(function)),
        )
        try:
            await self._ask(Worker.take_turn, request)
        except BaseException:
            self._returned(request.ticket)
            raise
        finally:
            self.waited_s += clock.monotonic() - began
        self.taken += 1
        return request.ticket

    def give_back(self, ticket: int, function: str, lasted_s: float) -> None:
        """Ends a turn that `take` returned, which lasted so long. The keeper is told beside what
        comes next.
        """
        self.held_s += lasted_s
        self._longest_s[function] = max(lasted_s, FORGET * self.expected_s(function))
        self._returned(ticket)

    def _returned(self, ticket: int) -> None:
        self._giving = asyncio.create_task(self._return(ticket), name="give a turn back")

    async def _return(self, ticket: int) -> None:
        """Tells the keeper until it knows; one that starts again has forgotten the turn."""
        back = GiveBack(self._resident, self._mesh.incarnation, ticket)
        try:
            await self._ask(Worker.give_back, back)
        except MeshError as error:  # the next request waits in vain, and says so
            self._mesh.log.warning("a turn is not given back", error=str(error))

    async def _ask(self, method: Call[Any, Any], request: Any) -> None:
        patience = Patience(self._mesh.clock)
        try:
            while True:
                try:
                    await self._mesh.ref(self._keeper).call(method, request)
                    return
                except MeshError as error:
                    # others may have their turns: that wait itself is in order
                    if method is not Worker.take_turn or not isinstance(error, DeadlineExceeded):
                        patience.failed(error)
                await self._mesh.clock.sleep(AGAIN_S)
        finally:
            patience.over()

    @contextmanager
    def _without(self) -> Iterator[None]:
        self._free += 1
        self._none_free.clear()
        try:
            yield
        finally:
            self._free -= 1
            if not self._free:
                self._none_free.set()
