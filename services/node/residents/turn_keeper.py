"""Keeps the turns of a gang at rank 0's worker: grants them, and has holders killed that do not
give theirs back.

A keeper that starts again knows nothing: residents ask again. What else of the gang was computing
then, on a worker that did not die, ends the piece it had in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from meshrl.common.api.node import EndResident, GangTurn, GiveBack, TakeTurn, Worker
from meshrl.common.api.stats import TurnStats
from meshrl.common.base.errors import DeadlineExceeded, MeshError, StateUnavailable
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import NotThere
from meshrl.common.mesh.runtime.tasks import all_of
from meshrl.common.state import registry
from meshrl.common.state.pool.workers.names import worker_process
from meshrl.common.state.pool.workers.rows import Gang
from meshrl.services.node.residents.turns import GrantedTurn, Leases, TurnOrder, TurnRequest

Kill = Callable[[str, int, str], Awaitable[None]]  # resident, generation, why; returns when dead
LOOK_S = 2.0  # how often it is seen to that the process of a holder is still the one that asked
LEAVE_S = 15.0  # for the piece in hand of a resident that is none any more, until it is killed


class TurnKeeper:
    """The turns of the gang that this worker is the first of; of no gang, while it is none's."""

    def __init__(self, mesh: Mesh, worker: str, kill: Kill, leases: Leases | None = None) -> None:
        """`kill` ends this worker's own process of a resident, if it has one."""
        self._mesh, self._worker, self._kill, self._leases = mesh, worker, kill, leases
        self._gang: Gang | None = None
        self._order = TurnOrder(leases)
        self._answers: dict[tuple[str, str, int], asyncio.Future[GrantedTurn]] = {}
        self._news = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self.granted = self.killed = 0

    def stats(self) -> TurnStats:
        held = [held.asked.resident for held in self._order.held]
        return TurnStats(self.granted, self.killed, held)

    def follow(self, gang: Gang | None) -> None:
        """The gang's record as it stands now; None, or one that another worker is the first of:
        there is nothing to keep here.
        """
        if gang is None or gang.workers[0] != self._worker:
            gang = None
        if gang is None or self._gang is None or gang.id != self._gang.id:
            self._order = TurnOrder(self._leases)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._not_kept())
        self._gang = gang
        if gang is not None:
            now = self._mesh.clock.monotonic()
            generations = {one.id: one.generation for one in gang.residents}
            self._order.keep(generations, now + LEAVE_S)
        self._go_on()

    def gone(self, resident: str) -> None:
        """This worker's process of a resident has ended: what it held is free at once."""
        self._order.gone(resident)
        self._go_on()

    async def take(self, request: TakeTurn) -> GangTurn:
        """Returns when the turn is granted. NotThere: the record does not have the resident at that
        generation (yet). Whoever stops waiting loses its place.
        """
        key = (request.resident, request.incarnation, request.ticket)
        self._order.ask(self._asked(request), self._mesh.clock.monotonic())
        before = self._answers.get(key)
        if before is not None and not before.done():
            before.set_exception(self._not_kept())  # who asks again listens no more
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._go_on()
        try:
            with contextlib.ExitStack() as said:
                if not answer.done():
                    processes = (held.asked.process for held in self._order.held)
                    holder = next(processes, request.process)
                    said.enter_context(self._mesh.wait("its turn", on=holder))
                held = await answer
        except asyncio.CancelledError:
            if self._answers.get(key) is answer:
                self._order.give_back(_ticket(request))
                self._go_on()
            raise
        finally:
            if self._answers.get(key) is answer:
                del self._answers[key]
        return GangTurn(request.ticket, held.until - self._mesh.clock.monotonic())

    def give_back(self, request: GiveBack) -> None:
        """Ends the turn and all earlier requests of that process."""
        for asked in (*self._order.waiting, *(held.asked for held in self._order.held)):
            mine = (asked.resident, asked.incarnation) == (request.resident, request.incarnation)
            if mine and asked.number <= request.ticket:
                self._order.give_back(asked.ticket)
        self._go_on()

    async def run(self) -> None:
        """Sees to deadlines, for ever."""
        clock = self._mesh.clock
        try:
            while True:
                now = clock.monotonic()
                for held in self._order.overdue(now):
                    task = asyncio.create_task(self._end(held), name=f"end {held.asked.resident}")
                    self._ending.add(task)
                    task.add_done_callback(self._ending.discard)
                await self._look()
                waits = clock.monotonic()
                pause_s = min(LOOK_S, max(0.01, self._order.due() - waits))
                self._news.clear()
                with contextlib.suppress(DeadlineExceeded):
                    async with clock.timeout(pause_s, "a turn"):
                        await self._news.wait()
                # A host that stood still, or a worker that got no turn of its processor: an answer
                # of a holder may lie there unread.
                lag_s = clock.monotonic() - waits - pause_s
                if lag_s > 0.0:
                    self._order.stood_still(waits, lag_s)
        finally:
            for task in self._ending:
                task.cancel()

    def _not_kept(self) -> NotThere:
        return NotThere("this request is not waited for here any more", where=self._mesh.name)

    # -- granting --------------------------------------------------------------------------------

    def _asked(self, request: TakeTurn) -> TurnRequest:
        residents = self._gang.residents if self._gang is not None else ()
        for one in residents:
            if (one.id, one.generation) == (request.resident, request.generation):
                return TurnRequest(
                    _ticket(request),
                    one.id,
                    one.generation,
                    request.incarnation,
                    request.ticket,
                    request.process,
                    request.function,
                    request.estimate_s,
                    frozenset(one.ranks),
                )
        raise NotThere(
            f"no resident {request.resident} of generation {request.generation} is on record",
            where=self._mesh.name,
            fix="it is soon, or the process that asks is to end",
        )

    def _go_on(self) -> None:
        now = self._mesh.clock.monotonic()
        granted = self._order.grant(now)
        self.granted += len(granted)
        if granted:
            self._news.set()  # there is another deadline
        for held in self._order.held:
            asked = held.asked
            answer = self._answers.get((asked.resident, asked.incarnation, asked.number))
            if answer is not None and not answer.done() and self._order.holds(asked.ticket):
                answer.set_result(held)

    # -- ending ----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Frees what a process held that is another one by now."""
        if not self._order.waiting:
            return
        now = self._mesh.clock.monotonic()
        for held in self._order.held:
            if now - held.since >= LOOK_S and await self._replaced(held):
                self._order.give_back(held.asked.ticket)
                self._go_on()

    async def _replaced(self, held: GrantedTurn) -> bool:
        """Whether another start of the holder's process is registered."""
        try:
            async with self._mesh.clock.timeout(LOOK_S, "a look for the holder of a turn"):
                entry = await registry.lookup(self._mesh.state, held.asked.process)
        except (StateUnavailable, DeadlineExceeded):
            return False
        return entry is not None and entry.alive and entry.incarnation != held.asked.incarnation

    async def _end(self, held: GrantedTurn) -> None:
        """Kills the processes of a resident on all its workers, then lets the next one in."""
        asked, gang = held.asked, self._gang
        if not await self._replaced(held):
            lasted = self._mesh.clock.monotonic() - held.since
            why = f"it did not give back its turn to {asked.function} after {lasted:.1f} s"
            self.killed += 1
            self._mesh.log.error("a turn is overdue", resident=asked.resident, why=why)
            workers = [gang.workers[rank] for rank in sorted(asked.ranks)] if gang else []
            request = EndResident(asked.resident, asked.generation, why)
            others = [self._tell(w, request) for w in workers if w != self._worker]
            await all_of([self.end(request), *others])
        self._order.dead(held)
        self._go_on()

    async def end(self, request: EndResident) -> None:
        """Kills this worker's own process of a resident, for the keeper of its gang."""
        await self._kill(request.resident, request.generation, request.why)

    async def _tell(self, worker: str, request: EndResident) -> None:
        """A worker that does not answer is lost, and its processes with it."""
        try:
            await self._mesh.ref(worker_process(worker)).call(Worker.end_resident, request)
        except MeshError as error:
            self._mesh.log.warning("ending a resident", worker=worker, error=str(error))


class KeepsTurns(Actor):
    """What a worker's actor answers for its keeper of turns."""

    turns: TurnKeeper

    @call(Worker.take_turn)
    async def take_turn(self, request: TakeTurn) -> GangTurn:
        return await self.turns.take(request)

    @call(Worker.give_back)
    def give_back(self, request: GiveBack) -> None:
        self.turns.give_back(request)

    @call(Worker.end_resident)
    async def end_resident(self, request: EndResident) -> None:
        await self.turns.end(request)


def _ticket(request: TakeTurn) -> str:
    return f"{request.resident}/{request.incarnation}/{request.ticket}"
