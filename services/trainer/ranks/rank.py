"""One rank of a training gang: its rows of the parameters, its kept gradients, its place in the
process group.

Everything here blocks and is called from a thread, by all ranks in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _abort_process_group

from common.errors import RankLost, Refused
from common.job.config import AlgorithmConfig, LoraConfig, OptimizerConfig
from common.model.decoder import Decoder
from common.process.peers import foreign_clients, own_listeners
from services.trainer.algorithms import algorithm
from services.trainer.arithmetic import critic, lora
from services.trainer.arithmetic.cut_rows import group_of, local
from services.trainer.arithmetic.learner import Learner
from services.trainer.arithmetic.packing import Bin
from services.trainer.arithmetic.stats import BinStats
from services.trainer.helpers.gradient_sum import GradientSum
from services.trainer.ranks.sharding import cut, gather, reshard, scatter, shard


def join_group(meeting: Path, rank: int, ranks: int, device: str, deadline_s: float) -> DeviceMesh:
    """Meets the other ranks at a file that all of them can reach and none has used before.

    From then on a collective that one of them does not join fails after `deadline_s`. RankLost when
    they do not meet, or when a process of another user has joined: gloo asks nobody who it is.
    """
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # a gang lives on one host
    meeting.parent.mkdir(parents=True, exist_ok=True)
    within = timedelta(seconds=deadline_s)
    store = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]
    store.set_timeout(within)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    before = own_listeners()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=within)
        group = init_device_mesh(device, (ranks,))
    except RuntimeError as error:
        raise RankLost(f"rank {rank} did not meet the others: {error}") from error
    if strangers := foreign_clients(own_listeners() - before):
        leave_group()
        raise RankLost(
            f"a process of user {min(strangers)} has connected to rank {rank}",
            fix="keep other users from this host while several ranks train; see docs/security.md",
        )
    return group


def leave_group() -> None:
    """Ends this process's part in its group, also while a collective of it waits for the lost."""
    if dist.is_initialized():
        _abort_process_group()


def of_the_group(error: RuntimeError) -> bool:
    """Whether a collective raised it, because another rank is away or late, and not this rank's own
    arithmetic. What gloo raises has no type of its own, but names gloo's source file.
    """
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


class ShardedLearner(Learner):
    """A learner whose model lies in rows over the ranks; gradients are sums over the ranks' bins,
    each rank holding its rows. With `adapters` these learn, from `seed`, in place of the model.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerConfig,
        algorithm_config: AlgorithmConfig,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        *,
        mesh: DeviceMesh,
        adapters: LoraConfig | None = None,
        seed: int = 0,
    ) -> None:
        if adapters is not None and adapters.rank:
            lora.adapt(model, adapters, seed)
        if algorithm(algorithm_config.name).critic:
            critic.attach(model)
        shard(model, mesh, dtype)
        super().__init__(model, optimizer, algorithm_config, temperature)
        group = group_of(self._parameters[0])
        assert group is not None
        self._group = group
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._trained = [parameter.shape for parameter in self._parameters]

    def gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        """This rank's rows of the flat gradient, summed over the ranks; statistics of `bin`."""
        _, stats = super().gradient(bin)
        found = [local(p.grad).reshape(-1) for p in self._parameters if p.grad is not None]
        if len(found) != len(self._parameters):
            raise RuntimeError("a parameter got no gradient: ranks would not agree on its rows")
        gradient = torch.cat(found)
        self._fresh_gradient()
        return gradient, stats

    def apply(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        reshard(self.model)
        return super().apply(gradient_sum, denominator, lr_factor)

    def weights(self) -> dict[str, Tensor]:
        reshard(self.model)
        return super().weights()

    def optimizer_state(self) -> dict[str, Tensor]:
        reshard(self.model)
        return super().optimizer_state()

    def _fresh_gradient(self) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return torch.empty(0)

    def _norm(self, gradient: Tensor) -> float:
        squares = gradient.double().square().sum()
        dist.all_reduce(squares, group=self._group)
        return float(squares.sqrt())

    def own_part(self, whole: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
        """The part of a rank in a flat gradient over all that learns."""
        return cut(whole, self._trained, rank, self._group.size())

    # -- the whole state, which rank 0 has -------------------------------------------------------

    def gathered_weights(self) -> dict[str, Tensor]:
        """Whole weights on rank 0, nothing elsewhere; all ranks call it."""
        return self._gathered(self.weights())

    def gathered_optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's whole state on rank 0, as one process has it; all ranks call it."""
        return self._gathered(self.optimizer_state())

    def empty_state(self) -> dict[str, Tensor]:
        """Room for the whole state of the optimizer."""
        return {
            name: torch.empty(self._shape_of(name) or piece.shape, dtype=piece.dtype)
            for name, piece in self.optimizer_state().items()
        }

    def take_over(self, state: Mapping[str, Tensor] | None) -> None:
        """Every rank takes its rows of the weights and the optimizer's state that rank 0 has."""
        own = self.optimizer_state()
        for name, piece in own.items():
            self._scattered(None if state is None else state[name], name, piece)
        self._optimizer.load(own)
        if self._critic:
            critic.load(self.model, own)
        self.steps = int(own["steps"])

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor] | None) -> None:
        """Every rank takes its rows of the weights that rank 0 has; a critic begins with them."""
        reshard(self.model)
        for name, parameter in critic.published(self.model.named_parameters()).items():
            whole = None if weights is None else weights[name]
            self._scattered(whole, name, parameter)
        if self._critic:
            critic.follow(self.model)

    def _gathered(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for name, piece in rows.items():
            shape, piece = self._shape_of(name), local(piece)
            found = piece.clone() if shape is None else gather(piece, shape, self._group)
            if found is not None and self._group.rank() == 0:
                whole[name] = found.cpu()
        return whole

    def _scattered(self, whole: Tensor | None, name: str, piece: Tensor) -> None:
        shape, piece = self._shape_of(name), local(piece)
        if shape is not None:
            scatter(whole, piece, shape, self._group)
            return
        if whole is not None:
            piece.copy_(whole)
        dist.broadcast(piece, group=self._group, group_src=0)

    def _shape_of(self, name: str) -> torch.Size | None:
        """The shape of the parameter that a tensor of the state belongs to; None: it is the same on
        all.
        """
        parts = name.split(".")
        names = (".".join(parts[i:]) for i in range(len(parts)))
        return next((self._shapes[name] for name in names if name in self._shapes), None)


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

    def __init__(
        self, make: Callable[[DeviceMesh], ShardedLearner], rank: int, ranks: int, device: str
    ) -> None:
        self._make, self.rank, self.ranks, self._device = make, rank, ranks, device
        self._learner: ShardedLearner | None = None
        self._gradients = GradientSum()

    @property
    def learner(self) -> ShardedLearner:
        """Refused while the rank is in no group."""
        if self._learner is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        return self._learner

    def form(self, meeting: Path, deadline_s: float) -> None:
        """Joins the group and makes the model anew: its weights are still to be given."""
        mesh = join_group(meeting, self.rank, self.ranks, self._device, deadline_s)
        self._learner = self._make(mesh)
        self.begin()

    def leave(self) -> None:
        self._learner = None
        leave_group()

    def begin(self) -> None:
        self._gradients = GradientSum()

    def compute(self, index: int, bin: Bin) -> BinStats:
        """The statistics of this rank's part of a round, whose rows of the gradient it keeps."""
        gradient, stats = self.learner.gradient(bin)
        self._gradients.keep(index, gradient)
        return stats

    def keeping(self) -> Callable[[int, NDArray[np.float32]], None]:
        """What keeps a hybrid's whole gradient of a round, this rank's part of it, in the step of
        now and in no later one.
        """
        learner, gradients = self.learner, self._gradients

        def keep(index: int, whole: NDArray[np.float32]) -> None:
            part = learner.own_part(whole, self.rank)
            gradients.keep(index, torch.from_numpy(part).to(self._device))

        return keep

    def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Holds until a group is formed anew."""
        self.learner.adopt(algorithm, optimizer)

    def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        norm = self.learner.apply(self._gradients.total(rounds), denominator, lr_factor)
        self.begin()
        return norm

    def gather(self, optimizer: bool) -> dict[str, Tensor]:
        """The whole weights, or the optimizer's state, on rank 0; nothing elsewhere."""
        learner = self.learner
        return learner.gathered_optimizer_state() if optimizer else learner.gathered_weights()

    def take(
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Tensor] | None, all: bool
    ) -> None:
        """Weights, and with `all` the optimizer's state, which rank 0 has whole."""
        self.learner.take_weights(weights)
        if all:
            self.learner.take_over(state)

    def score(self, bin: Bin, what: str) -> NDArray[np.float32]:
        return self.learner.score(bin, what)
