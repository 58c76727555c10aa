"""Learners of which each rank of a gang has rows; gradients are sums over all ranks' bins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshrl.common.job.config import LoraConfig
from meshrl.common.model.files.rows import Beginning
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.weights.layout.laying import Part
from meshrl.services.trainer.algorithms import algorithm
from meshrl.services.trainer.arithmetic.cut_rows import is_cut, local
from meshrl.services.trainer.arithmetic.learner import Learner, LearnerSettings
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.models import critic, lora
from meshrl.services.trainer.sharding.expert_parallel import split_experts
from meshrl.services.trainer.sharding.fsdp import reshard, shard
from meshrl.services.trainer.sharding.owners import EvenOwners, Owners
from meshrl.services.trainer.sharding.rows import begin, cut, scatter

NORM_NUMBERS = 1 << 20  # of a gradient that are squared at a time


@dataclass(frozen=True)
class GangPlace:
    """A rank's place in its gang: the mesh, its rows' beginning, exchanges' deadline."""

    mesh: DeviceMesh
    beginning: Beginning
    deadline_s: float = 120.0


class RowsLearner(Learner, ABC):
    """A learner whose parameters are a rank's rows, when `_as_rows` has been called."""

    def __init__(
        self,
        model: Decoder,
        settings: LearnerSettings,
        group: dist.ProcessGroup,
        owners: Owners,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        """`shapes`: of the parameters of `model` when they are whole."""
        super().__init__(model, settings.optimizer, settings.algorithm, settings.temperature)
        self._group, self._owners, self._shapes = group, owners, shapes
        self._trained = {name: shapes[name] for name in lora.trained(model)}
        self.size = sum(shape.numel() for shape in self._trained.values())
        self._outlines = {False: self._outline(self.weights()), True: self._outline(self.state())}

    def _as_rows(self) -> None:
        """From now on its parameters are rows, which may be read and changed."""

    def apply(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        self._as_rows()
        return super().apply(gradient_sum, denominator, lr_factor)

    def weights(self) -> dict[str, Tensor]:
        self._as_rows()
        return super().weights()

    def state(self) -> dict[str, Tensor]:
        self._as_rows()
        return super().state()

    def _part(self, name: str, tensor: Tensor) -> Part:
        """This rank's rows of it; what is the same on all ranks is whole."""
        parameter = self._parameter_of(name)
        if parameter is None:
            return Part(tuple(tensor.shape), 0, tensor)
        shape = self._shapes[parameter]
        own = self._owners.rows(parameter, shape[0], self._group.rank())
        return Part(tuple(shape), own.start, local(tensor))

    def _norm(self, gradient: Tensor) -> float:
        # Some at a time: in float64 all of it would be twice as large again.
        sums = [part.double().square().sum() for part in torch.split(gradient, NORM_NUMBERS)]
        squares = torch.stack(sums).sum()
        dist.all_reduce(squares, group=self._group)
        return float(squares.sqrt())

    @abstractmethod
    def bins_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """Summed over the bins of all ranks."""

    def own_part(self, whole: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
        return cut(whole, self._trained, self._owners, rank)

    # -- whole weights, of which rank 0 has some at a time ----------------------------------------

    def outline(self, optimizer: bool) -> Mapping[str, Tensor]:
        return self._outlines[optimizer]

    @torch.no_grad()
    def take(self, names: Sequence[str], whole: Mapping[str, Tensor] | None) -> None:
        own = self.weights()
        for name in names:
            given, total = None if whole is None else whole[name], self._shapes[name][0]
            rows = [self._owners.rows(name, total, rank) for rank in range(self._group.size())]
            scatter(given, local(own[name]), rows, self._group)
        if self._critic:
            critic.follow(self.model)

    def _outline(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, piece in rows.items():
            parameter = self._parameter_of(name)
            shape = piece.shape if parameter is None else self._shapes[parameter]
            found[name] = torch.empty(shape, dtype=piece.dtype, device="meta")
        return found

    def _parameter_of(self, name: str) -> str | None:
        """The parameter that a tensor of the state belongs to; None: it is the same on all."""
        parts = name.split(".")
        names = (".".join(parts[i:]) for i in range(len(parts)))
        return next((name for name in names if name in self._shapes), None)


class ShardedLearner(RowsLearner):
    """A learner whose model lies in rows over ranks; `adapters` learn in its place."""

    def __init__(
        self,
        model: Decoder,
        settings: LearnerSettings,
        place: GangPlace,
        adapters: LoraConfig | None = None,
        seed: int = 0,
        expert_parallel: int = 1,
    ) -> None:
        """`model` lies on the `meta` device: it takes its rows, and no others, from the beginning.
        The experts of a layer are split over `expert_parallel` ranks.
        """
        mesh = place.mesh
        with torch.device("meta"):
            if adapters is not None and adapters.rank:
                lora.attach(model, adapters)
            if algorithm(settings.algorithm.name).critic:
                critic.attach(model)
        owners = EvenOwners(mesh.size(), expert_parallel)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        apart: Set[nn.Parameter] = frozenset()
        if expert_parallel > 1:
            apart = split_experts(model, mesh, expert_parallel, owners, place.deadline_s)
        rank, beginning = mesh.get_local_rank(), place.beginning
        first = partial(begin, model, rank, owners, shapes, beginning, seed)
        shard(model, mesh, settings.dtype, first, apart)
        super().__init__(model, settings, mesh.get_group(), owners, shapes)

    def _as_rows(self) -> None:
        reshard(self.model)

    def bins_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """See `RowsLearner`; each rank has one bin."""
        (bin,) = bins
        _, stats = self.gradient(bin)
        sizes = [local(parameter.detach()).numel() for parameter in self._parameters]
        gradient = torch.empty(sum(sizes), device=self.device)
        for parameter, piece in zip(self._parameters, torch.split(gradient, sizes), strict=True):
            if parameter.grad is not None:
                piece.copy_(local(parameter.grad).reshape(-1))
            elif is_cut(parameter):
                raise RuntimeError("a parameter got no gradient: ranks would not agree on its rows")
            else:
                piece.zero_()  # no token came to any of these experts
            parameter.grad = None  # one by one, so that there is little more than one gradient
        return gradient, [stats]

    def forget_gradients(self) -> None:
        """Also what of the model is whole: from then on there are rows alone."""
        super().forget_gradients()
        reshard(self.model)

    def _fresh_gradient(self) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return torch.empty(0)
