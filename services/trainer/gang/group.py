"""The group of a core's ranks, of which this process is the first: formed, ordered about, and lost.

An order runs on all ranks at once. When one of them is lost the group is aborted, whatever is
awaited raises RankLost, and `form` makes a new group, of a new generation, when all ranks are
there again; their models are then still to be given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.ranks import FORM_S, Meeting, RankOrder, Ranks, StandsBy, rank_name
from meshrl.common.base.errors import ConfigError, MeshError, RankLost, RemoteFailure
from meshrl.common.base.host.interfaces import address_of
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.patience import patiently
from meshrl.common.mesh.runtime.ref import Ref
from meshrl.common.weights.ways.meeting import NoPort, listen, place_of, ports_of
from meshrl.services.trainer.ranks import interfaces
from meshrl.services.trainer.ranks.interfaces import LOOPBACK
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.thread import RankThread

WHOLE_S = 280.0  # until all ranks are there: below what a worker gives a role process to get ready
GENERATIONS = 1_000_000  # most in one incarnation of the core; the next one's are higher
FOR_GOOD = ConfigError, RemoteFailure, NoPort  # no second try mends it

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class RankGroup:
    """Orders are pieces (`PieceRunner`): all ranks take them one by one, in one sequence."""

    def __init__(
        self,
        mesh: Mesh,
        job: str,
        rank: Rank,
        meetings: Path,
        group_s: float,
        prepare: Callable[[Set[int]], Awaitable[None]],
        ended: Callable[[], None],
    ) -> None:
        """`prepare` is told which ranks are on other hosts, `ended` that the group is none."""
        # 0: in no group; a rank alone is in one of its own from the beginning.
        self.generation = 0 if rank.ranks > 1 else 1
        self.thread = RankThread(mesh, group_s)
        self.others = [mesh.ref(rank_name(job, other)) for other in range(1, rank.ranks)]
        self._mesh, self._job, self._rank = mesh, job, rank
        self._meetings, self._group_s = meetings, group_s
        self._prepare, self._ended = prepare, ended
        self._formed = 0
        self._broken: Exception | None = None  # why the group is none any more

    async def form(self) -> None:
        """Make a group of all ranks; RankLost if they do not come; what is FOR_GOOD at once."""
        if not self.others:
            return
        clock = self._mesh.clock
        until = clock.monotonic() + WHOLE_S
        while True:
            try:
                await self._try_to_form(until - clock.monotonic())
                return
            except MeshError as error:
                await self._disband()
                if clock.monotonic() > until or isinstance(error, FOR_GOOD):
                    raise
                self._mesh.telemetry.log.warning("forming the gang again", error=str(error))
                await clock.sleep(0.2)

    async def _try_to_form(self, within_s: float) -> None:
        await self._disband()
        await self.thread.ended()
        self._formed += 1
        self._broken = None
        generation = self._mesh.token * GENERATIONS + self._formed
        with self._mesh.wait("the ranks of the gang", on=rank_name(self._job, 1)):
            standing = await patiently(
                self._mesh.clock,
                lambda: self.ask_all(Ranks.stand_by, [RankOrder(generation)] * len(self.others)),
                for_s=max(1.0, within_s),
            )
        here = self._mesh.settings.host
        far = {rank for rank, other in enumerate(standing, 1) if other.host != here}
        await self._prepare(far)
        with ExitStack() as open_:
            where, door = str(self._meetings / f"{self._job}-{generation}"), None
            interface = LOOPBACK
            addresses: list[str] = []
            if far:
                interface, address = self._reachable(standing)
                addresses = [address, *(other.address for other in standing)]
                door = open_.enter_context(listen(address, ports_of(self._mesh.settings.bind)))
                where = place_of(door, self._mesh.random.token(16))
            meeting = Meeting(generation, where, self._group_s, addresses)
            self.generation = generation
            meetings, own = [meeting] * len(self.others), (meeting, interface, door)
            await self.together(FORM_S, Ranks.form, meetings, self._rank.form, *own)

    def _reachable(self, standing: Sequence[StandsBy]) -> tuple[str, str]:
        """Return this host's interface and address for ranks on others; ConfigError without."""
        settings = self._mesh.settings
        interface = interfaces.wide(settings)
        address = address_of(interface)
        for one in (StandsBy(settings.host, address), *standing):
            if not one.address:
                raise ConfigError(
                    f"a gang over hosts, and {one.host} has no interface that others reach",
                    where=one.host,
                    fix="Set `interface` in its settings, or GLOO_SOCKET_IFNAME, to one that has "
                    'an address; or set pool.gangs to "host"',
                )
        return interface, address

    async def _disband(self) -> None:
        """Ends this rank's part in the group, and with it whatever the others wait for."""
        self.generation = 0
        self._ended()
        await self.thread.leave(self._rank.leave)

    async def ask_all(self, method: Call[Q, R], requests: Sequence[Q]) -> list[R]:
        asking = [
            _done(other, method, request)
            for other, request in zip(self.others, requests, strict=True)
        ]
        return list(await asyncio.gather(*asking))

    async def together(
        self,
        deadline_s: float,
        method: Call[Q, R],
        requests: Sequence[Q],
        own: Callable[..., T],
        *args: Any,
    ) -> tuple[T, list[R]]:
        """What this rank and the others return. The first that fails ends it for all."""
        began = self.generation
        here = asyncio.create_task(self.thread.run(own, *args, deadline_s=deadline_s))
        there = [
            asyncio.create_task(_done(other, method, request, deadline_s))
            for other, request in zip(self.others, requests, strict=True)
        ]
        try:
            await asyncio.wait([here, *there], return_when=asyncio.FIRST_EXCEPTION)
            errors = [
                error
                for task in (here, *there)
                if task.done() and isinstance(error := task.exception(), Exception)
            ]
            if errors:
                raise await self.lost(max(errors, key=_is_wrong), began)
            return here.result(), [task.result() for task in there]
        except asyncio.CancelledError:
            if self.generation == began and self.others:
                self.generation = 0  # some rank may have done it, another not
            raise
        finally:
            for task in (here, *there):
                task.cancel()
            await asyncio.gather(here, *there, return_exceptions=True)

    async def or_lost(self, asked: Awaitable[T]) -> T:
        began = self.generation
        try:
            return await asked
        except Exception as error:
            raise await self.lost(error, began) from error

    async def lost(self, error: Exception, began: int | None = None) -> Exception:
        """What to raise for an error of one rank: the group is of no use any more, but after one in
        the job that all ranks have. `began`: the generation that the error is of, if it is known;
        one of an earlier group leaves that of now as it is.
        """
        if isinstance(error, ConfigError) or not self.others:
            return error
        another = self.generation or self._broken is None  # formed, or being formed
        if began is not None and began != self.generation and another:
            return self.loss(error)
        if self.generation or self._broken is None:  # others come of the group's end
            self._broken = error if _is_wrong(error) else self.loss(error)
            self._mesh.telemetry.log.warning("rank lost", error=str(error))
        await self._disband()
        return self._broken

    def loss(self, error: Exception) -> RankLost:
        return RankLost(
            f"the gang of {self._rank.ranks} ranks has lost one ({error})",
            where=self._mesh.name,
            fix="it goes on from the last committed step when all ranks are there again",
        )

    def current(self) -> int:
        if not self.generation:
            raise self._broken or RankLost(
                f"the gang of {self._rank.ranks} ranks is not formed", where=self._mesh.name
            )
        return self.generation

    def check(self, generation: int) -> None:
        """RankLost unless the group is that of this generation still."""
        if self.current() != generation:
            raise self.loss(RankLost("the group has been formed anew"))

    def to_all(self, order: Q) -> list[Q]:
        return [order] * len(self.others)


async def _done(other: Ref, method: Call[Q, R], request: Q, deadline_s: float | None = None) -> R:
    """What it answers once that does not go on any more; each call has the deadline."""
    while True:
        answer = await other.call(method, request, deadline_s=deadline_s)
        if not getattr(answer, "goes_on", False):
            return answer


def _is_wrong(error: Exception) -> bool:
    """Whether it is a mistake of a rank's own, which would come again; a lost rank is not."""
    return isinstance(error, RemoteFailure) or not isinstance(error, MeshError)
