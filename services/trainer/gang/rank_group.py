"""Group of a core's ranks: formation, orders and loss. This process is rank 0.

An order runs on all ranks at once. If a rank is lost the group is aborted and every pending order
raises RankLost. `form` then creates a group of a new generation once all ranks are ready. Their
models must be loaded after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from meshrl.common.api.calls.interface import Call
from meshrl.common.api.ranks import (
    FORM_MARGIN_S,
    FORM_TIMEOUT_S,
    CreateModel,
    RankOrder,
    Ranks,
    Rendezvous,
    StandbyAnswer,
    rank_name,
)
from meshrl.common.base.errors import ConfigError, MeshError, RankLost, RemoteFailure
from meshrl.common.base.host.interfaces import find_address
from meshrl.common.mesh.runtime.actor_ref import ActorRef
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.weights.transports.rendezvous import (
    NoRendezvousPort,
    format_rendezvous_url,
    open_listener,
    parse_port_range,
)
from meshrl.services.trainer.ranks import network_interface
from meshrl.services.trainer.ranks.network_interface import LOOPBACK
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.ranks.rank_thread import RankThread

# until all ranks are ready: below a worker's limit for the start of a role process
GROUP_COMPLETE_TIMEOUT_S = 280.0
MAX_GENERATIONS = 1_000_000  # per incarnation of the core; later incarnations' are higher
PERMANENT_ERRORS = ConfigError, RemoteFailure, NoRendezvousPort  # another attempt would not help

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class RankGroup:
    """Group of ranks; orders are pieces (`PieceRunner`), which all ranks take in one sequence."""

    def __init__(
        self,
        mesh: Mesh,
        job: str,
        rank: Rank,
        rendezvous_dir: Path,
        collective_timeout_s: float,
        on_loss: Callable[[], None],
        form_timeout_s: float = FORM_TIMEOUT_S,
    ) -> None:
        """Create a group of no ranks yet; `on_loss` is called when the group is lost.

        `form_timeout_s` limits the rendezvous of ranks that are ready.
        """
        # 0: in no group. A single rank is in a group of its own from the beginning.
        self.generation = 0 if rank.ranks > 1 else 1
        self.rank_thread = RankThread(mesh, collective_timeout_s)
        self.other_ranks = [mesh.ref(rank_name(job, other)) for other in range(1, rank.ranks)]
        self._mesh, self._job, self._rank = mesh, job, rank
        self._rendezvous_dir, self._collective_timeout_s = rendezvous_dir, collective_timeout_s
        self._on_loss, self._form_timeout_s = on_loss, form_timeout_s
        self._form_count = 0
        self._loss: Exception | None = None  # reason that the group is lost

    async def form(self) -> None:
        """Form a group of all ranks, and create its model.

        RankLost if that fails once GROUP_COMPLETE_TIMEOUT_S have passed; permanent errors at once.
        The model may take longer: its deadline depends on its size.
        """
        if not self.other_ranks:
            return
        clock = self._mesh.clock
        until = clock.monotonic() + GROUP_COMPLETE_TIMEOUT_S
        while True:
            try:
                await self._try_form(until - clock.monotonic())
                await self._create_model()
                return
            except MeshError as error:
                await self._disband()
                if clock.monotonic() > until or isinstance(error, PERMANENT_ERRORS):
                    raise
                self._mesh.telemetry.log.warning("forming the gang again", error=str(error))
                await clock.sleep(0.2)

    async def _try_form(self, timeout_s: float) -> None:
        await self._disband()
        await self.rank_thread.wait_idle()
        self._form_count += 1
        self._loss = None
        generation = self._mesh.token * MAX_GENERATIONS + self._form_count
        with self._mesh.wait("the ranks of the gang", on=rank_name(self._job, 1)):
            standing = await retry(
                self._mesh.clock,
                lambda: self.call_all(
                    Ranks.stand_by, [RankOrder(generation)] * len(self.other_ranks)
                ),
                limit_s=max(1.0, timeout_s),
            )
        own_host = self._mesh.settings.host
        has_remote_ranks = any(other.host != own_host for other in standing)
        with ExitStack() as open_:
            where, door = str(self._rendezvous_dir / f"{self._job}-{generation}"), None
            interface = LOOPBACK
            addresses: list[str] = []
            if has_remote_ranks:
                interface, address = self._find_interface(standing)
                addresses = [address, *(other.address for other in standing)]
                door = open_.enter_context(
                    open_listener(address, parse_port_range(self._mesh.settings.bind))
                )
                where = format_rendezvous_url(door, self._mesh.random.hex_token(16))
            meeting = Rendezvous(
                generation, where, self._collective_timeout_s, addresses, self._form_timeout_s
            )
            self.generation = generation
            meetings, own = [meeting] * len(self.other_ranks), (meeting, interface, door)
            within_s = self._form_timeout_s + FORM_MARGIN_S
            await self.run_on_all(within_s, Ranks.form_group, meetings, self._rank.join, *own)

    async def _create_model(self) -> None:
        """Have all ranks create their rows, which they may read from slow files."""
        timeout_s = self._rank.state_timeout_s
        orders = self.repeat_order(CreateModel(self.generation, timeout_s))
        create = Ranks.create_model
        await self.run_on_all(timeout_s, create, orders, self._rank.create_model)

    def _find_interface(self, ready_ranks: Sequence[StandbyAnswer]) -> tuple[str, str]:
        """Return this host's interface and address for other hosts' ranks; ConfigError without."""
        settings = self._mesh.settings
        interface = network_interface.find_rank_interface(settings)
        address = find_address(interface)
        for one in (StandbyAnswer(settings.host, address), *ready_ranks):
            if not one.address:
                raise ConfigError(
                    f"the gang spans hosts, and {one.host} has no interface that other hosts "
                    "can reach",
                    where=one.host,
                    fix="Set `interface` in its settings, or GLOO_SOCKET_IFNAME, to one that has "
                    'an address; or set pool.gang_scope to "host"',
                )
        return interface, address

    async def _disband(self) -> None:
        """Leave the group, which also ends the waits of the other ranks."""
        self.generation = 0
        self._on_loss()
        await self.rank_thread.leave(self._rank.leave)

    async def call_all(self, method: Call[Q, R], requests: Sequence[Q]) -> list[R]:
        asking = [
            _call_until_done(other, method, request)
            for other, request in zip(self.other_ranks, requests, strict=True)
        ]
        return list(await asyncio.gather(*asking))

    async def run_on_all(
        self,
        deadline_s: float,
        method: Call[Q, R],
        requests: Sequence[Q],
        work: Callable[..., T],
        *args: Any,
    ) -> tuple[T, list[R]]:
        """Run an order here and on the other ranks; return all results, or raise the first
        error.
        """
        began = self.generation
        here = asyncio.create_task(self.rank_thread.run(work, *args, deadline_s=deadline_s))
        there = [
            asyncio.create_task(_call_until_done(other, method, request, deadline_s))
            for other, request in zip(self.other_ranks, requests, strict=True)
        ]
        try:
            await asyncio.wait([here, *there], return_when=asyncio.FIRST_EXCEPTION)
            errors = [
                error
                for task in (here, *there)
                if task.done() and isinstance(error := task.exception(), Exception)
            ]
            if errors:
                raise await self.handle_loss(max(errors, key=_is_permanent), began)
            return here.result(), [task.result() for task in there]
        except asyncio.CancelledError:
            if self.generation == began and self.other_ranks:
                self.generation = 0  # some ranks may have executed it, others not
            raise
        finally:
            for task in (here, *there):
                task.cancel()
            await asyncio.gather(here, *there, return_exceptions=True)

    async def run_guarded(self, call: Awaitable[T]) -> T:
        began = self.generation
        try:
            return await call
        except Exception as error:
            raise await self.handle_loss(error, began) from error

    async def handle_loss(self, error: Exception, generation: int | None = None) -> Exception:
        """Return the error to raise for a rank's failure, and disband the group.

        A ConfigError of the job occurs on all ranks and leaves the group intact. `generation`: that
        of the failed order, if known; an earlier group's error does not affect the current group.
        """
        if isinstance(error, ConfigError) or not self.other_ranks:
            return error
        another = self.generation or self._loss is None  # formed, or being formed
        if generation is not None and generation != self.generation and another:
            return self.build_loss_error(error)
        if self.generation or self._loss is None:  # later errors follow from the group's loss
            self._loss = error if _is_permanent(error) else self.build_loss_error(error)
            self._mesh.telemetry.log.warning("rank lost", error=str(error))
        await self._disband()
        return self._loss

    def build_loss_error(self, error: Exception) -> RankLost:
        return RankLost(
            f"the gang of {self._rank.ranks} ranks has lost a rank ({error})",
            where=self._mesh.name,
            fix="Wait: training continues from the last committed step when all ranks run again",
        )

    def require_generation(self) -> int:
        if not self.generation:
            raise self._loss or RankLost(
                f"the gang of {self._rank.ranks} ranks is not formed", where=self._mesh.name
            )
        return self.generation

    def check_generation(self, generation: int) -> None:
        """Raise RankLost unless the group still has this generation."""
        if self.require_generation() != generation:
            raise self.build_loss_error(RankLost("the group has been formed again"))

    def repeat_order(self, order: Q) -> list[Q]:
        return [order] * len(self.other_ranks)


async def _call_until_done(
    other: ActorRef, method: Call[Q, R], request: Q, deadline_s: float | None = None
) -> R:
    """Call until the answer is not `in_progress`; the deadline is that of each call."""
    while True:
        answer = await other.call(method, request, deadline_s=deadline_s)
        if not getattr(answer, "in_progress", False):
            return answer


def _is_permanent(error: Exception) -> bool:
    """Return True for a rank's own error, which would recur; a lost rank is none."""
    return isinstance(error, RemoteFailure) or not isinstance(error, MeshError)
