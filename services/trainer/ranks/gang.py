"""Runs a core's arithmetic on a gang of ranks: this process is rank 0, and the others follow it.

Every order runs on all ranks at once. When one of them is lost the group is aborted, whatever is
awaited raises RankLost, and `form` makes a new group, of a new generation, when all ranks are
there again; their models are then still to be given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.api.ranks import (
    ADOPT_S,
    COMPUTE_S,
    FORM_S,
    MOVE_S,
    Adopt,
    LentGradient,
    Meeting,
    Order,
    Ranks,
    RoundPart,
    ScorePart,
    Taking,
    Update,
    rank_name,
)
from common.errors import ConfigError, MeshError, RankLost, RemoteFailure
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.process.serial_executor import looked_at
from common.runtime.interface import Call
from common.runtime.mesh import Mesh
from common.runtime.patience import patiently
from services.trainer.arithmetic.packing import Bin
from services.trainer.arithmetic.stats import BinStats
from services.trainer.core import saved_state
from services.trainer.helpers.gradient_transfer import Shelf
from services.trainer.ranks.compute import SAVE_S, Round
from services.trainer.ranks.rank import Rank, filler
from services.trainer.ranks.thread import RankThread

WHOLE_S = 280.0  # until all ranks are there: below what a worker gives a role process to get ready
GENERATIONS = 1_000_000  # most in one incarnation of the core; the next one's are higher

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class GangCompute:
    """The Compute of a core with more ranks than one; `form` it before anything else."""

    def __init__(self, mesh: Mesh, job: str, rank: Rank, meetings: Path, group_s: float) -> None:
        self.ranks = rank.ranks
        self.generation = 0  # 0: in no group
        self._mesh, self._job, self._rank = mesh, job, rank
        self._meetings, self._group_s = meetings, group_s
        self._shelf = Shelf(mesh, meetings / "lent" / job)
        self._formed = 0
        self._broken: Exception | None = None  # why the group is none any more
        self._thread = RankThread(mesh, group_s)
        self._others = [mesh.ref(rank_name(job, other)) for other in range(1, rank.ranks)]
        self._busy = asyncio.Lock()  # one order at a time: all ranks take them in the same order
        self._claimed: set[int] = set()  # rounds whose gradient is kept or on its way
        self._sending: set[asyncio.Task[Any]] = set()

    @property
    def size(self) -> int:
        return self._rank.learner.size

    # -- the group -------------------------------------------------------------------------------

    async def form(self) -> None:
        """Makes a group of all ranks as soon as they are there; RankLost if they do not come."""
        clock = self._mesh.clock
        until = clock.monotonic() + WHOLE_S
        while True:
            try:
                await self._try_to_form(until - clock.monotonic())
                return
            except MeshError as error:
                await self._disband()
                if clock.monotonic() > until or isinstance(error, ConfigError | RemoteFailure):
                    raise
                self._mesh.telemetry.log.warning("forming the gang again", error=str(error))
                await clock.sleep(0.2)

    async def _try_to_form(self, within_s: float) -> None:
        await self._disband()
        await self._thread.ended()
        await self._shelf.clear()
        self._formed += 1
        self._broken = None
        generation = self._mesh.token * GENERATIONS + self._formed
        with self._mesh.wait("the ranks of the gang", on=rank_name(self._job, 1)):
            await patiently(
                self._mesh.clock,
                lambda: self._ask_all(Ranks.stand_by, [Order(generation)] * len(self._others)),
                for_s=max(1.0, within_s),
            )
        meeting = self._meetings / f"{self._job}-{generation}"
        request = Meeting(generation, str(meeting), self._group_s)
        self.generation = generation
        await self._together(
            FORM_S,
            Ranks.form,
            [request] * len(self._others),
            self._rank.form,
            meeting,
            self._group_s,
        )
        self._claimed.clear()

    async def _disband(self) -> None:
        """Ends this rank's part in the group, and with it whatever the others wait for."""
        self.generation = 0
        for task in self._sending - {asyncio.current_task()}:  # one may be why
            task.cancel()
        self._sending.clear()
        await self._thread.leave(self._rank.leave)

    async def _ask_all(self, method: Call[Q, R], requests: Sequence[Q]) -> list[R]:
        asking = [
            other.call(method, request)
            for other, request in zip(self._others, requests, strict=True)
        ]
        return list(await asyncio.gather(*asking))

    # -- orders ----------------------------------------------------------------------------------

    async def begin(self) -> None:
        self._claimed.clear()
        async with self._busy:
            await self._all_sent()
            generation = self._current()
            self._rank.begin()
            await self._or_lost(self._ask_all(Ranks.begin, [Order(generation)] * len(self._others)))

    async def compute(self, index: int, round: Round) -> BinStats:
        if index in self._claimed:  # by a hybrid: all ranks must keep the same one first
            await self._all_sent()
        self._claimed.add(index)
        like = next(bin for bin in round if bin.trained)
        bins = [bin if bin.trained else filler(like) for bin in round]
        async with self._busy:
            generation = self._current()
            parts = [RoundPart(generation, index, bin.to_arrays()) for bin in bins[1:]]
            own, others = await self._together(
                COMPUTE_S, Ranks.compute, parts, self._rank.compute, index, bins[0]
            )
        found = [own, *(BinStats(**other.stats) for other in others)]
        counted = (stats for stats, bin in zip(found, round, strict=True) if bin.trained)
        return sum(counted, BinStats())

    async def keep(self, index: int, gradient: NDArray[np.float32]) -> None:
        """Keeps a hybrid's gradient of a round. It is dropped if the ranks compute that round
        themselves: theirs is the same, and all of them must keep the same one.
        """
        if index in self._claimed:
            return
        self._claimed.add(index)
        sending = self._send_to_all(self._current(), index, gradient)
        task = asyncio.create_task(self._or_lost(sending))
        task.add_done_callback(looked_at)
        self._sending.add(task)  # until `apply`; a hybrid does not wait for it

    async def _send_to_all(
        self, generation: int, index: int, gradient: NDArray[np.float32]
    ) -> None:
        """Gives a hybrid's gradient to all ranks."""
        keep = self._rank.keeping()
        path = await self._shelf.put(f"{generation}-{index}", gradient)
        try:
            await self._mesh.host.run_blocking(keep, index, gradient, deadline_s=MOVE_S)
            lent = LentGradient(generation, index, str(path), gradient.size)
            await self._ask_all(Ranks.keep, [lent] * len(self._others))
        finally:
            await self._shelf.remove(path)

    async def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        async with self._busy:
            order = Adopt(self._current(), asdict(algorithm), asdict(optimizer))
            orders = [order] * len(self._others)
            await self._together(
                ADOPT_S, Ranks.adopt, orders, self._rank.adopt, algorithm, optimizer
            )

    async def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        async with self._busy:
            await self._all_sent()
            update = Update(self._current(), rounds, denominator, lr_factor)
            norm, _ = await self._together(
                COMPUTE_S,
                Ranks.apply,
                [update] * len(self._others),
                self._rank.apply,
                rounds,
                denominator,
                lr_factor,
            )
        self._claimed.clear()
        return norm

    async def score(self, bins: Sequence[Bin], what: str) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = []
        for start in range(0, len(bins), self.ranks):
            some = list(bins[start : start + self.ranks])
            some += [filler(some[0])] * (self.ranks - len(some))
            async with self._busy:
                generation = self._current()
                parts = [ScorePart(generation, bin.to_arrays(), what) for bin in some[1:]]
                own, others = await self._together(
                    COMPUTE_S, Ranks.score, parts, self._rank.score, some[0], what
                )
            found += [own, *(other.scores for other in others)]
        return found[: len(bins)]

    async def weights(self) -> dict[str, Tensor]:
        return await self._gather(optimizer=False)

    async def snapshot(self) -> dict[str, Tensor]:
        return await self._gather(optimizer=True)

    async def write(self, snapshot: dict[str, Tensor], path: Path) -> None:
        await self._mesh.host.run_blocking(
            saved_state.save_state, path, snapshot, deadline_s=SAVE_S
        )

    async def restore(self, path: Path, weights: dict[str, Tensor]) -> None:
        """The state lies whole in `path`, whatever number of ranks it was gathered from."""
        run = self._mesh.host.run_blocking
        state = await run(self._rank.learner.empty_state, deadline_s=MOVE_S)
        await run(saved_state.load_state, path, state, deadline_s=MOVE_S)
        await self._take(weights, state)

    async def load_weights(self, weights: dict[str, Tensor]) -> None:
        """The weights alone, with the optimizer as it is at the beginning."""
        await self._take(weights, None)

    async def _gather(self, optimizer: bool) -> dict[str, Tensor]:
        async with self._busy:
            taking = Taking(self._current(), optimizer)
            whole, _ = await self._together(
                MOVE_S, Ranks.gather, [taking] * len(self._others), self._rank.gather, optimizer
            )
        return whole

    async def _take(self, weights: dict[str, Tensor], state: dict[str, Tensor] | None) -> None:
        async with self._busy:
            taking = Taking(self._current(), state is not None)
            await self._together(
                MOVE_S,
                Ranks.take,
                [taking] * len(self._others),
                self._rank.take,
                weights,
                state,
                state is not None,
            )

    # -- all ranks at once -----------------------------------------------------------------------

    async def _together(
        self,
        deadline_s: float,
        method: Call[Q, R],
        requests: Sequence[Q],
        own: Callable[..., T],
        *args: Any,
    ) -> tuple[T, list[R]]:
        """What this rank and the others return. The first that fails ends it for all."""
        here = asyncio.create_task(self._thread.run(own, *args, deadline_s=deadline_s))
        there = [
            asyncio.create_task(other.call(method, request, deadline_s=deadline_s))
            for other, request in zip(self._others, requests, strict=True)
        ]
        try:
            await asyncio.wait([here, *there], return_when=asyncio.FIRST_EXCEPTION)
            errors = [
                error
                for task in (here, *there)
                if task.done() and isinstance(error := task.exception(), Exception)
            ]
            if errors:
                raise await self._lost(max(errors, key=_is_wrong))
            return here.result(), [task.result() for task in there]
        except asyncio.CancelledError:
            self.generation = 0  # some rank may have done it, another not
            raise
        finally:
            for task in (here, *there):
                task.cancel()
            await asyncio.gather(here, *there, return_exceptions=True)

    async def _or_lost(self, asked: Awaitable[T]) -> T:
        try:
            return await asked
        except Exception as error:
            raise await self._lost(error) from error

    async def _all_sent(self) -> None:
        """Returns when the gradients of hybrids are where they belong."""
        sending = list(self._sending)
        if sending:
            await asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION)
        for task in sending:
            if task.done() and not task.cancelled():
                task.result()
        self._sending.difference_update(sending)

    async def _lost(self, error: Exception) -> Exception:
        """What to raise for an error of one rank: the group is of no use any more, but after one in
        the job that all ranks have.
        """
        if isinstance(error, ConfigError):
            return error
        if self.generation or self._broken is None:  # others come of the group's end
            self._broken = error if _is_wrong(error) else self._loss(error)
            self._mesh.telemetry.log.warning("rank lost", error=str(error))
        await self._disband()
        return self._broken

    def _loss(self, error: Exception) -> RankLost:
        return RankLost(
            f"the gang of {self.ranks} ranks has lost one ({error})",
            where=self._mesh.name,
            fix="it goes on from the last committed step when all ranks are there again",
        )

    def _current(self) -> int:
        if not self.generation:
            raise self._broken or RankLost(
                f"the gang of {self.ranks} ranks is not formed", where=self._mesh.name
            )
        return self.generation


def _is_wrong(error: Exception) -> bool:
    """Whether a rank raised it by a mistake of its own, which would come again; lost ranks are not
    that.
    """
    return isinstance(error, RemoteFailure) or not isinstance(error, MeshError)
