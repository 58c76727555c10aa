"""Runner of a core's arithmetic piece by piece: in time slices, emulated, and not asleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial, update_wrapper
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import CorruptData, RankLost
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.emulation import (
    LATE_SHARE,
    EmulatedTrainingSpeed,
    parse_emulation_scale,
    parse_training_speed,
)
from meshrl.common.mesh.instances.kind_controller import KindController
from meshrl.common.mesh.instances.tiers import SleepTimer
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.state.pool.workers.rows import TensorKind
from meshrl.services.trainer.bins.packing import Bin

T = TypeVar("T")


PARAMETERS, GRADIENTS, OPTIMIZER = (
    TensorKind.PARAMETERS,
    TensorKind.GRADIENTS,
    TensorKind.OPTIMIZER,
)
STATE_KINDS = (PARAMETERS, OPTIMIZER)  # all that a step begins with
LEARNER_KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER)


class EmulationTimer:
    """Timer that pads work to the speed of an emulated accelerator, and counts late work.

    Work is late if it takes longer than its emulated time by a share of over LATE. So two cores can
    emulate several accelerators, as long as they compute faster. The padding counts as accelerator
    time: the time slice is not released.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._emulated_steps, self._late_steps = 0, 0

    @property
    def late_counts(self) -> dict[str, int]:
        return {"emulated_count": self._emulated_steps, "late_count": self._late_steps}

    async def run_padded(self, min_s: float, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` and return its result no sooner than after `min_s` seconds."""
        clock = self._clock
        began = clock.monotonic()
        found = await work()
        left_s = began + min_s - clock.monotonic()
        if left_s > 0:
            await clock.sleep(left_s)
        self._emulated_steps += 1
        self._late_steps += clock.monotonic() - began > (1.0 + LATE_SHARE) * min_s
        return found


P = ParamSpec("P")


class PieceKind(NamedTuple):
    function: str = ""  # function of its time slice; empty: it needs none
    is_step_work: bool = False  # it belongs to a step, and waits while steps are paused
    # seconds on an emulated accelerator, from the piece's arguments
    predict_emulated_s: Callable[..., float] | None = None
    tensor_kinds: tuple[str, ...] = ()  # that it computes with
    changed_kinds: tuple[str, ...] = ()  # of these, that it changes


def count_longest_bin_tokens(round: Sequence[Bin]) -> int:
    """Return the tokens of the longest bin, which sets the time of equally fast ranks."""
    return max(len(bin.tokens) for bin in round)


BEGIN = PieceKind(is_step_work=True)
TRAIN = PieceKind(
    "forward_backward",
    True,
    lambda pace, index, round: pace.compute_gradient_s(count_longest_bin_tokens(round)),
    (PARAMETERS, GRADIENTS),
    (GRADIENTS,),
)
# adds a gradient that a hybrid has computed; no piece of the sequence
ADD = PieceKind("forward_backward", tensor_kinds=(GRADIENTS,), changed_kinds=(GRADIENTS,))
UPDATE = PieceKind("optim_step", True, lambda pace, *_: pace.update_s, LEARNER_KINDS, LEARNER_KINDS)
SCORE = PieceKind(
    "score",
    True,
    lambda pace, bins, what: pace.compute_score_s(count_longest_bin_tokens(bins)),
    (PARAMETERS,),
)
CHANGE = PieceKind()
SYNC = PieceKind("sync", tensor_kinds=(PARAMETERS,))
LOAD = PieceKind("load", tensor_kinds=STATE_KINDS, changed_kinds=STATE_KINDS)
WARM_START = PieceKind("warm_start", tensor_kinds=STATE_KINDS, changed_kinds=STATE_KINDS)
SAVE = PieceKind("save", tensor_kinds=STATE_KINDS)


class PieceRunner:
    """Runner of pieces, which wait while it sleeps; only arithmetic takes a time slice."""

    def __init__(
        self,
        mesh: Mesh,
        time_slices: SliceClient | None = None,
        emulation: EmulatedTrainingSpeed | None = None,
    ) -> None:
        self.time_slices = time_slices or SliceClient(mesh, "", "", 0)
        self.sleep_timer = SleepTimer(mesh.clock)
        self.gradient_lock = asyncio.Lock()  # a gradient is being added; not while asleep either
        self._emulation, self._emulation_timer = emulation, EmulationTimer(mesh.clock)
        self._piece_lock = asyncio.Lock()
        self._compute_lock = asyncio.Lock()  # a piece holds it even after its caller has gone
        self._steps_allowed = asyncio.Event()
        self._steps_allowed.set()
        self._loss: RankLost | None = None  # reason that there is no state to compute with
        self.tensor_kinds: KindController | None = None  # that pieces compute with; None: any

    @classmethod
    def from_placement(cls, mesh: Mesh, data: JobData, placement: Placement) -> PieceRunner:
        """Return the runner of a core with this placement."""
        turns = SliceClient(
            mesh,
            placement.slice_scheduler,
            placement.instance,
            placement.generation,
            enabled=placement.time_sliced,
        )
        text = data.config.training.emulate
        paced = text and parse_emulation_scale(text) is None  # else each rank is emulated
        return cls(mesh, turns, parse_training_speed(text) if paced else None)

    @property
    def late_counts(self) -> dict[str, int]:
        """See `EmulationTimer.late_counts`; empty without emulation."""
        return self._emulation_timer.late_counts if self._emulation is not None else {}

    async def run(self, kind: PieceKind, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        async def compute() -> T:
            async with self._compute_lock, self.use_kinds(kind):
                return await work(*args)

        piece: Callable[[], Awaitable[T]] = compute
        if self._emulation is not None and kind.predict_emulated_s is not None:
            piece = partial(
                self._emulation_timer.run_padded,
                kind.predict_emulated_s(self._emulation, *args),
                compute,
            )
        async with self._piece_slot(kind):
            if self._loss is not None:
                raise self._loss
            return await (
                self.time_slices.run_in_slice(kind.function, piece, kinds=kind.tensor_kinds)
                if kind.function
                else piece()
            )

    @asynccontextmanager
    async def use_kinds(self, kind: PieceKind) -> AsyncIterator[None]:
        """Enter to compute with the kinds of a piece; RankLost if their content is lost."""
        if self.tensor_kinds is None:
            yield
            return
        async with AsyncExitStack() as stack:
            try:
                use = self.tensor_kinds.use_kinds(kind.tensor_kinds, kind.changed_kinds)
                await stack.enter_async_context(use)
            except CorruptData as error:
                self._loss = _make_state_loss(error)
                raise self._loss from error
            yield

    @asynccontextmanager
    async def _piece_slot(self, kind: PieceKind) -> AsyncIterator[None]:
        while True:
            if kind.is_step_work:
                await self._steps_allowed.wait()
            async with self._piece_lock:
                if not kind.is_step_work or self._steps_allowed.is_set():
                    yield
                    return

    @asynccontextmanager
    async def rebuild_state(self) -> AsyncIterator[None]:
        """Enter to rebuild the state that pieces compute with."""
        async with self._piece_lock:
            yield
            self._loss = None
            if self.tensor_kinds is not None:
                self.tensor_kinds.clear_loss()

    async def pause_steps(self) -> None:
        """Wait for the current piece of a step; no other begins until `resume_steps`."""
        self._steps_allowed.clear()
        async with self._piece_lock:
            return

    def resume_steps(self) -> None:
        self._steps_allowed.set()

    @asynccontextmanager
    async def enter_sleep(self) -> AsyncIterator[None]:
        """Enter between two pieces to offload state; on success none runs until `exit_sleep`."""
        await self._piece_lock.acquire()
        try:
            await self.gradient_lock.acquire()
            try:
                yield
            except BaseException:
                self.gradient_lock.release()
                raise
        except BaseException:
            self._piece_lock.release()
            raise
        self.sleep_timer.start()

    @asynccontextmanager
    async def exit_sleep(self) -> AsyncIterator[None]:
        """Enter to restore offloaded state; pieces continue after it.

        After CorruptData pieces raise RankLost, until the state is rebuilt. After another error the
        core stays asleep.
        """
        try:
            yield
        except CorruptData as error:
            self._loss = _make_state_loss(error)
            self._wake()
            raise
        self._wake()

    def _wake(self) -> None:
        self.sleep_timer.stop()
        self.gradient_lock.release()
        self._piece_lock.release()


def _make_state_loss(error: CorruptData) -> RankLost:
    return RankLost(
        f"the offloaded state is lost: {error}",
        fix="Wait: training continues from the last committed step",
    )


class _HasRunner(Protocol):
    runner: PieceRunner


S = TypeVar("S", bound=_HasRunner)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def run_as_piece(kind: PieceKind) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Return a decorator that runs a method as a piece of this kind on the object's `runner`."""

    def decorate(method: Method[S, P, T]) -> Method[S, P, T]:
        async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return await self.runner.run(kind, partial(method, self, **kwargs), *args)

        update_wrapper(run, method)
        return run

    return decorate
