"""Runs a core's arithmetic piece by piece: in time slices, at a pace, and not asleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial, update_wrapper
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import Damaged, RankLost
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.pace import LATE, TrainingPace, declared_pace, training_profile
from meshrl.common.mesh.residents.tiers import Nap
from meshrl.common.mesh.residents.turns import Turns
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.services.trainer.bins.packing import Bin

T = TypeVar("T")


class Padding:
    """Work slowed down to the speed of an emulated accelerator; what took longer by over LATE of
    its time is counted.

    So two cores can emulate several accelerators, as long as they compute faster than those. What
    is padded is what the accelerator would be busy with: its time slice goes on being held.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps, self._late = 0, 0

    @property
    def late(self) -> dict[str, int]:
        return {"paced": self._steps, "late": self._late}

    async def take(self, seconds: float, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns, no sooner than after so long."""
        clock = self._clock
        began = clock.monotonic()
        found = await work()
        left_s = began + seconds - clock.monotonic()
        if left_s > 0:
            await clock.sleep(left_s)
        self._steps += 1
        self._late += clock.monotonic() - began > (1.0 + LATE) * seconds
        return found


P = ParamSpec("P")


class PieceKind(NamedTuple):
    slice: str = ""  # what its time slice is for; empty: it needs none
    step: bool = False  # it belongs to a step, and waits while steps are held
    # seconds on an emulated accelerator, from the arguments of the piece
    paced_s: Callable[..., float] | None = None


def longest(round: Sequence[Bin]) -> int:
    """Tokens of the longest bin: all ranks are equally fast."""
    return max(len(bin.tokens) for bin in round)


BEGIN = PieceKind(step=True)
TRAIN = PieceKind("train_step", True, lambda pace, index, round: pace.train_s(longest(round)))
UPDATE = PieceKind("train_step", True, lambda pace, *_: pace.update_s)
SCORE = PieceKind("score", True, lambda pace, bins, what: pace.score_s(longest(bins)))
CHANGE = PieceKind()
SYNC = PieceKind("sync")
SAVE = PieceKind("save")


class PieceRunner:
    """What does not compute takes no time slice; a piece waits for the core to be awake."""

    def __init__(
        self, mesh: Mesh, turns: Turns | None = None, pace: TrainingPace | None = None
    ) -> None:
        self.turns = turns or Turns(mesh, "", "", 0)
        self.nap = Nap(mesh.clock)
        self.keeping = asyncio.Lock()  # a gradient is added; of this, too, there is none asleep
        self._pace, self._padding = pace, Padding(mesh.clock)
        self._one = asyncio.Lock()
        self._computing = asyncio.Lock()  # held by a piece whose caller has gone, too
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._lost: RankLost | None = None  # why there is no state to compute with

    @classmethod
    def of(cls, mesh: Mesh, data: JobData, seat: Seat) -> PieceRunner:
        """Return the runner of a core in this seat."""
        turns = Turns(mesh, seat.keeper, seat.resident, seat.generation, enabled=seat.turns)
        text = data.config.training.pace
        paced = text and declared_pace(text) is None  # else each rank has a pace of its own
        return cls(mesh, turns, training_profile(text) if paced else None)

    @property
    def late(self) -> dict[str, int]:
        """See `Padding.late`; empty without a pace."""
        return self._padding.late if self._pace is not None else {}

    async def run(self, kind: PieceKind, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        async def compute() -> T:
            async with self._computing:
                return await work(*args)

        piece: Callable[[], Awaitable[T]] = compute
        if self._pace is not None and kind.paced_s is not None:
            piece = partial(self._padding.take, kind.paced_s(self._pace, *args), compute)
        async with self._turn_of(kind):
            if self._lost is not None:
                raise self._lost
            return await (self.turns.run(kind.slice, piece) if kind.slice else piece())

    @asynccontextmanager
    async def _turn_of(self, kind: PieceKind) -> AsyncIterator[None]:
        while True:
            if kind.step:
                await self._go_on.wait()
            async with self._one:
                if not kind.step or self._go_on.is_set():
                    yield
                    return

    @asynccontextmanager
    async def forming(self) -> AsyncIterator[None]:
        """Enter to make the state anew that pieces compute with."""
        async with self._one:
            yield
            self._lost = None

    async def hold(self) -> None:
        """Return when no piece of a step runs; none begins until `let_go`."""
        self._go_on.clear()
        async with self._one:
            return

    def let_go(self) -> None:
        self._go_on.set()

    @asynccontextmanager
    async def falling_asleep(self) -> AsyncIterator[None]:
        """Enter between two pieces, to save them; none runs until `waking`, if that works."""
        await self._one.acquire()
        try:
            await self.keeping.acquire()
            try:
                yield
            except BaseException:
                self.keeping.release()
                raise
        except BaseException:
            self._one.release()
            raise
        self.nap.began()

    @asynccontextmanager
    async def waking(self) -> AsyncIterator[None]:
        """Enter to take back what was saved; pieces go on after it. After Damaged they raise
        RankLost, until the state is formed anew; after another error it sleeps on.
        """
        try:
            yield
        except Damaged as error:
            self._lost = RankLost(
                f"what it kept while it slept is lost: {error}",
                fix="it goes on from the last committed step",
            )
            self._wake()
            raise
        self._wake()

    def _wake(self) -> None:
        self.nap.ended()
        self.keeping.release()
        self._one.release()


class _Computes(Protocol):
    runner: PieceRunner


S = TypeVar("S", bound=_Computes)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def piece(kind: PieceKind) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Have an object's `runner` run a method of it, as a piece of this kind."""

    def decorate(method: Method[S, P, T]) -> Method[S, P, T]:
        async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self.runner.run(kind, partial(method, self, **kwargs), *args)

        update_wrapper(run, method)
        return run

    return decorate
