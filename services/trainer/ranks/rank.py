"""One rank of a training gang: its rows of the parameters, its kept gradients, its place in the
process group.

Everything here blocks and is called from a thread, by all ranks in the same order.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group, _world

from meshrl.common.api.ranks import Meeting
from meshrl.common.base.errors import RankLost, Refused
from meshrl.common.mesh.process.peers import SocketEnd, client_hosts, foreign_clients, listeners
from meshrl.common.weights.ways.meeting import store_at
from meshrl.services.trainer.arithmetic.gradient_sum import GradientSum
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.arithmetic.memory import LearnerMemory
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.division import EvenDivision, RoundDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.ranks import interfaces

if TYPE_CHECKING:  # ranks that keep a pace import it anyway
    from meshrl.services.trainer.zebra.alike import PacedBins
    from meshrl.services.trainer.zebra.pace import ZebraPace


def join_group(
    meeting: Meeting,
    rank: int,
    ranks: int,
    device: str,
    interface: str = interfaces.LOOPBACK,
    door: socket.socket | None = None,
) -> DeviceMesh:
    """Meets the other ranks where none has met before, and reaches them by `interface`; rank 0
    serves the store of a meeting over hosts at `door`. It leaves the group that it is in: one may
    have been formed after all when its failure had been seen elsewhere.

    From then on a collective that one of them does not join fails after the meeting's deadline.
    RankLost when they do not meet, or when a process of another user of this host has joined, or
    one on a host where no rank is: gloo asks nobody who it is.
    """
    leave_group()
    interfaces.use(interface)
    if device == "cuda":  # the one that its worker sees, whatever LOCAL_RANK a launcher has left
        torch.cuda.set_device(0)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    within = timedelta(seconds=meeting.deadline_s)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    before = _listening(door)
    # The keys of a store begin with the number of groups that a process has begun to make. One that
    # failed may have been begun by some ranks alone, which would wait for the others for ever.
    _world.group_count = 0
    try:
        store = store_at(meeting.where, ranks, within, door)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=within)
        group = init_device_mesh(device, (ranks,))
    except RuntimeError as error:
        raise RankLost(f"rank {rank} did not meet the others: {error}") from error
    try:
        refuse_strangers(meeting, rank, listeners() - before)
    except RankLost:
        leave_group()
        raise
    return group


def refuse_strangers(meeting: Meeting, rank: int, places: Set[SocketEnd]) -> None:
    """RankLost when somebody is connected who is no rank, as far as the kernel can tell."""
    if strangers := foreign_clients(places):
        raise RankLost(
            f"a process of user {min(strangers)} has connected to rank {rank}",
            fix="keep other users from this host while several ranks train; see docs/security.md",
        )
    hosts = client_hosts(places) if meeting.addresses else set()
    if unknown := hosts - set(meeting.addresses):
        raise RankLost(
            f"a process at {min(unknown)}, where no rank is, has connected to rank {rank}",
            fix="keep others from the network of the ranks; if it is a host's other address, name "
            "the interface: `meshrl join --interface`; see docs/security.md",
        )


def _listening(door: socket.socket | None) -> Set[SocketEnd]:
    """Where this process listens but for the door of a meeting."""
    if door is None:
        return listeners()
    host, port = door.getsockname()[:2]
    return listeners() - {SocketEnd(ip_address(host), port)}


def leave_group() -> None:
    """Ends this process's part in its group, also while a collective of it waits for the lost."""
    if dist.is_initialized():
        _abort_process_group()


def of_the_group(error: RuntimeError) -> bool:
    """Whether a collective raised it, for another rank; gloo's errors name its source file."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def filler(like: Bin) -> Bin:
    """What a rank computes in a round that has no bin for it: what the others compute, of nothing.

    So it takes part in their collectives; its statistics are not to be counted.
    """
    return Bin(
        tokens=np.zeros(1, np.int32),
        targets=np.zeros(1, np.int32),
        positions=np.zeros(1, np.int32),
        starts=np.array([0, 1], np.int32),
        mask=np.ones(1, np.bool_),
        fresh=np.zeros(1, np.bool_),
        behaviour=np.zeros(1, np.float32),
        advantage=np.zeros(1, np.float32),
        weight=np.zeros(1, np.float32),
        extras={name: np.zeros(1, np.float32) for name in like.extras},
    )


class Rank:
    """What the core orders a rank to do, in a group that is formed anew when a rank was lost."""

    _pace: ZebraPace | None = None  # what it is slowed down to

    def __init__(
        self,
        make: Callable[[DeviceMesh], Learner],
        rank: int,
        ranks: int,
        device: str,
        division: RoundDivision | None = None,
        pace: ZebraPace | None = None,
        bins: PacedBins | None = None,
    ) -> None:
        """`pace`: what it is slowed down to, by its learner's tasks, or by passes over `bins`."""
        self._make, self.rank, self.ranks, self._device = make, rank, ranks, device
        self.division: RoundDivision = division or EvenDivision(ranks)
        self._pace, self._bins = pace, bins
        self._learner: Learner | None = None
        self._gradients = GradientSum()

    @classmethod
    def alone(cls, learner: Learner) -> Rank:
        """Return the only rank of a core, which has all rows and meets no others."""
        rank = cls(lambda _: learner, 0, 1, learner.device.type)
        rank._learner = learner
        return rank

    @property
    def learner(self) -> Learner:
        """Refused while the rank is in no group."""
        if self._learner is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        return self._learner

    def form(
        self,
        meeting: Meeting,
        interface: str = interfaces.LOOPBACK,
        door: socket.socket | None = None,
    ) -> None:
        """Joins the group and makes the model anew: its weights are still to be given."""
        before = _listening(door)
        mesh = join_group(meeting, self.rank, self.ranks, self._device, interface, door)
        self._learner = self._make(mesh)
        try:  # it may have made groups of its own
            refuse_strangers(meeting, self.rank, listeners() - before)
        except RankLost:
            self.leave()
            raise
        self.begin()

    def leave(self) -> None:
        learner, self._learner = self._learner, None
        if learner is not None:
            learner.close()
        leave_group()

    def begin(self) -> None:
        self._gradients = GradientSum()

    def compute(self, index: int, bins: Sequence[Bin]) -> list[BinStats]:
        """The statistics of this rank's bins of a round, whose rows of the gradient it keeps."""
        with self._paced(bins, back=True):
            gradient, stats = self.learner.bins_gradient(bins)
        self._gradients.keep(index, gradient)
        return stats

    def keeping(self, cut: bool = False) -> Callable[[int, NDArray[np.float32]], None]:
        """Return what keeps a hybrid's gradient in this step: the whole, or with `cut` a part."""
        learner, gradients = self.learner, self._gradients

        def keep(index: int, numbers: NDArray[np.float32]) -> None:
            part = numbers if cut else learner.own_part(numbers, self.rank)
            gradients.keep(index, torch.from_numpy(part).to(self._device))

        return keep

    def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        norm = self.learner.apply(self._gradients.total(rounds), denominator, lr_factor)
        self.begin()
        return norm

    def score(self, bin: Bin, what: str) -> NDArray[np.float32]:
        with self._paced([bin], back=False):
            return self.learner.score(bin, what)

    def _paced(self, bins: Sequence[Bin], back: bool) -> AbstractContextManager[None]:
        return self._bins.of(bins, back) if self._bins is not None else nullcontext()

    @property
    def late(self) -> Mapping[str, int]:
        """What it has done at a pace so far, and of that what ended late; empty without one."""
        return self._pace.counts if self._pace is not None else {}

    @property
    def bytes(self) -> int:
        """That its rows take; 0 while it is in no group."""
        return 0 if self._learner is None else self._learner.bytes

    def memory(self, gradients: bool) -> LearnerMemory:
        """That of its rows, and with `gradients` of those of the rounds that are kept."""
        beside = self._gradients.tensors() if gradients else {}
        return LearnerMemory(self.learner, beside)
