"""Rank of a training gang: its rows of the parameters, pending gradients, and process group.

All methods block. All ranks call them from a thread, in the same order.
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
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout, _world

from meshrl.common.api.ranks import Rendezvous, compute_state_timeout_s
from meshrl.common.base.errors import RankLost, Refused
from meshrl.common.hardware.gpus.nccl_environment import set_nccl_environment
from meshrl.common.mesh.instances.kind_controller import TensorsOfKind
from meshrl.common.mesh.process.tcp_sockets import (
    SocketAddress,
    find_client_hosts,
    find_foreign_users,
    find_listen_addresses,
)
from meshrl.common.weights.transports.rendezvous import open_rendezvous_store
from meshrl.services.trainer.bins.division import EvenDivision, RoundDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.gradient_sum import GradientSum
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.learner.memory import make_learner_kinds
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.ranks import network_interface

if TYPE_CHECKING:  # emulated ranks import it anyway
    from meshrl.services.trainer.zebra.emulated_bins import EmulatedBins
    from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation


def join_group(
    rendezvous: Rendezvous,
    rank: int,
    ranks: int,
    device: str,
    interface: str = network_interface.LOOPBACK,
    listener: socket.socket | None = None,
) -> DeviceMesh:
    """Join the process group of a rendezvous over `interface`, after leaving any earlier group.

    Rank 0 serves the store of a rendezvous over several hosts at `listener`. An earlier group may
    exist: it can form after another rank has already seen its failure. NCCL connects within the
    rendezvous's deadline too. A collective that a rank does not join later fails after its own.

    Raises:
        ConfigError: A variable of NCCL would end this rank when another one is lost.
        RankLost: The ranks do not meet; it names the absent ones. Or a process of another user of
            this host, or of a host without a rank, has joined: gloo does not authenticate peers.
    """
    leave_group()
    network_interface.set_interface(interface)
    backend, device_id = "gloo", None
    if device == "cuda":  # the device that the worker exposes; a launcher may have set LOCAL_RANK
        set_nccl_environment()
        # With a device id NCCL connects here and not in the first collective.
        backend, device_id = "cpu:gloo,cuda:nccl", torch.device("cuda", 0)
        torch.cuda.set_device(device_id)
        torch.cuda.init()  # type: ignore[no-untyped-call]
    within = timedelta(seconds=rendezvous.form_timeout_s)
    before = _list_endpoints(listener)
    # Store keys begin with the number of groups that a process has started to create. Only some
    # ranks may have started a failed group, and would then wait for the others for ever.
    _world.group_count = 0
    store: Store | None = None
    try:
        store = open_rendezvous_store(rendezvous.rendezvous_url, ranks, within, listener)
        store.set(_name_arrival_key(rank), "")
        about = backend, None, within, ranks, rank, store
        dist.init_process_group(*about, device_id=device_id)
        _set_pg_timeout(timedelta(seconds=rendezvous.collective_timeout_s))
        group = init_device_mesh(device, (ranks,))
    except RuntimeError as error:
        absent = _list_absent_ranks(store, ranks)
        leave_group()
        why = f"rank {', '.join(map(str, absent))} has not come" if absent else str(error)
        raise RankLost(
            f"rank {rank} could not join the group of {ranks} ranks within "
            f"{rendezvous.form_timeout_s:g} s: {why}"
        ) from error
    try:
        reject_unauthenticated_peers(rendezvous, rank, find_listen_addresses() - before)
    except RankLost:
        leave_group()
        raise
    return group


def reject_unauthenticated_peers(
    rendezvous: Rendezvous, rank: int, endpoints: Set[SocketAddress]
) -> None:
    """Raise RankLost if the kernel reports a connected process of another user."""
    if strangers := find_foreign_users(endpoints):
        raise RankLost(
            f"a process of user {min(strangers)} has connected to rank {rank}",
            fix="Deny other users access to this host while several ranks train; "
            "see docs/operate/security.md",
        )
    hosts = find_client_hosts(endpoints) if rendezvous.addresses else set()
    if unknown := hosts - set(rendezvous.addresses):
        raise RankLost(
            f"a process at {min(unknown)}, where no rank is, has connected to rank {rank}",
            fix="Deny other hosts access to the network of the ranks; if it is a host's second "
            "address, set "
            "the interface: `meshrl join --interface`; see docs/operate/security.md",
        )


def _name_arrival_key(rank: int) -> str:
    return f"arrived-{rank}"


def _list_absent_ranks(store: Store | None, ranks: int) -> list[int]:
    """Return the ranks that have not opened the store; none if the store is not there."""
    if store is None:
        return []
    try:
        return [rank for rank in range(ranks) if not store.check([_name_arrival_key(rank)])]
    except RuntimeError:  # rank 0, which serves it, has left
        return []


def _list_endpoints(listener: socket.socket | None) -> Set[SocketAddress]:
    """Return the addresses where this process listens, except the rendezvous's listener."""
    if listener is None:
        return find_listen_addresses()
    host, port = listener.getsockname()[:2]
    return find_listen_addresses() - {SocketAddress(ip_address(host), port)}


def leave_group() -> None:
    """Leave the process group, even while a collective waits for a lost rank."""
    if dist.is_initialized():
        _abort_process_group()


def make_filler_bin(like: Bin) -> Bin:
    """Return a bin without loss for a rank that has no bin in a round.

    With it the rank takes part in the collectives. Its statistics are not counted.
    """
    return Bin(
        tokens=np.zeros(1, np.int32),
        targets=np.zeros(1, np.int32),
        positions=np.zeros(1, np.int32),
        cu_seqlens=np.array([0, 1], np.int32),
        loss_mask=np.ones(1, np.bool_),
        fresh_mask=np.zeros(1, np.bool_),
        behaviour_logprobs=np.zeros(1, np.float32),
        advantages=np.zeros(1, np.float32),
        weight=np.zeros(1, np.float32),
        extras={name: np.zeros(1, np.float32) for name in like.extras},
    )


class Rank:
    """Rank that executes the core's orders, in a group that is formed again after a loss."""

    _emulation: ZebraEmulation | None = None  # pads tasks to a declared accelerator
    _state_bytes = 0

    def __init__(
        self,
        make_learner: Callable[[DeviceMesh], Learner],
        rank: int,
        ranks: int,
        device: str,
        division: RoundDivision | None = None,
        emulation: ZebraEmulation | None = None,
        emulated_bins: EmulatedBins | None = None,
        state_bytes: int = 0,
    ) -> None:
        """Create a rank in no group.

        `emulation` pads the learner's tasks to a declared accelerator's speed; `emulated_bins` pads
        passes over whole bins. `state_bytes`: of the whole model and its optimizer.
        """
        self._make_learner, self.rank, self.ranks, self._device = make_learner, rank, ranks, device
        self.division: RoundDivision = division or EvenDivision(ranks)
        self._emulation, self._emulated_bins = emulation, emulated_bins
        self._state_bytes = state_bytes
        self._formed: tuple[DeviceMesh, Rendezvous] | None = None
        self._learner: Learner | None = None
        self._gradients = GradientSum(device=device)

    @classmethod
    def for_single_rank(cls, learner: Learner) -> Rank:
        """Return the only rank of a core, which has all rows and joins no group."""
        rank = cls(lambda _: learner, 0, 1, learner.device.type)
        rank._learner = learner
        return rank

    @property
    def learner(self) -> Learner:
        """Learner of the rank; raises Refused while the rank is in no group."""
        if self._learner is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        return self._learner

    def join(
        self,
        rendezvous: Rendezvous,
        interface: str = network_interface.LOOPBACK,
        listener: socket.socket | None = None,
    ) -> None:
        """Join the group; `create_model` comes next, and its weights must then be loaded."""
        self.leave()  # a model that was still being created when its group was left
        about = self.rank, self.ranks, self._device, interface, listener
        self._formed = join_group(rendezvous, *about), rendezvous

    def create_model(self) -> None:
        """Create the model in the group with the initial values of this rank's rows."""
        if self._formed is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        mesh, rendezvous = self._formed
        before = find_listen_addresses()
        self._learner = self._make_learner(mesh)
        try:  # the learner may have created groups of its own
            reject_unauthenticated_peers(rendezvous, self.rank, find_listen_addresses() - before)
        except RankLost:
            self.leave()
            raise
        self.begin_step()

    def leave(self) -> None:
        learner, self._learner, self._formed = self._learner, None, None
        if learner is not None:
            learner.close()
        leave_group()

    def begin_step(self, block_rounds: int = 1, gradient_dtype: str = "float32") -> None:
        self._gradients = GradientSum(block_rounds, getattr(torch, gradient_dtype), self._device)

    def compute_round(self, index: int, bins: Sequence[Bin]) -> list[BinStats]:
        """Return the statistics of this rank's bins; retain its rows of the round's gradient."""
        with self._emulate(bins, with_backward=True):
            gradient, stats = self.learner.compute_local_gradient(bins)
        self._gradients.add(index, gradient)
        return stats

    def make_gradient_adder(self) -> Callable[[int, NDArray[np.float32]], None]:
        """Return a function that adds this rank's rows of a block's gradient to this step."""
        gradients = self._gradients

        def add(block: int, rows: NDArray[np.float32]) -> None:
            gradients.add_block(block, torch.from_numpy(rows))

        return add

    def apply_gradient(self, rounds: int, denominator: float, lr_factor: float) -> float:
        norm = self.learner.apply_gradient(
            self._gradients.get_total(rounds), denominator, lr_factor
        )
        self.begin_step()
        return norm

    def score(self, bin: Bin, quantity: str) -> NDArray[np.float32]:
        with self._emulate([bin], with_backward=False):
            return self.learner.score(bin, quantity)

    def _emulate(self, bins: Sequence[Bin], with_backward: bool) -> AbstractContextManager[None]:
        return (
            self._emulated_bins.emulate(bins, with_backward)
            if self._emulated_bins is not None
            else nullcontext()
        )

    @property
    def state_timeout_s(self) -> float:
        """Deadline to create or read the rows of a state."""
        return compute_state_timeout_s(self._state_bytes)

    @property
    def late_counts(self) -> Mapping[str, int]:
        """Counts of emulated and late tasks; empty without emulation."""
        return self._emulation.late_counts if self._emulation is not None else {}

    def make_kinds(self) -> dict[str, TensorsOfKind]:
        """Return the sources of the rank's rows by kind; without bytes while it is in no group."""
        return make_learner_kinds(lambda: self._learner, lambda: self._gradients.get_tensors())
