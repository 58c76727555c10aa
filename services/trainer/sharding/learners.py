"""Learners with a rank's rows of the model; gradients are sums over all ranks' bins."""

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
from meshrl.common.model.files.initial_parameters import ParameterSource
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.weights.layout.chunk_builder import TensorRows
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.learner import Learner, LearnerSettings
from meshrl.services.trainer.learner.sharded_tensors import get_local_rows, is_sharded
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.models import critic, lora
from meshrl.services.trainer.sharding.expert_parallel import split_experts
from meshrl.services.trainer.sharding.fsdp import reshard_model, shard_model
from meshrl.services.trainer.sharding.row_operations import (
    initialize_rows,
    list_owned_ranges,
    scatter_rows,
)
from meshrl.services.trainer.sharding.row_ownership import EvenOwnership, RowOwnership

NORM_CHUNK_NUMBERS = 1 << 20  # numbers of a gradient that are squared at a time


@dataclass(frozen=True)
class RankContext:
    """Context of a rank: its device mesh, the rows' initial values, the exchanges' deadline."""

    device_mesh: DeviceMesh
    initial_parameters: ParameterSource
    deadline_s: float = 120.0


class RowShardedLearner(Learner, ABC):
    """Learner whose parameters are a rank's rows after `_reshard`."""

    def __init__(
        self,
        model: Decoder,
        settings: LearnerSettings,
        group: dist.ProcessGroup,
        ownership: RowOwnership,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        """Create the learner; `shapes` are those of the full parameters."""
        super().__init__(model, settings.optimizer, settings.algorithm, settings.temperature)
        self._group, self._ownership, self._shapes = group, ownership, shapes
        self._trainable_shapes = {
            name: shapes[name] for name in lora.get_trainable_parameters(model)
        }
        self.parameter_count = sum(shape.numel() for shape in self._trainable_shapes.values())
        self._meta_tensors = {
            False: self._make_meta_tensors(self.get_weights()),
            True: self._make_meta_tensors(self.get_state()),
        }

    def _reshard(self) -> None:
        """Make the parameters rows, which may be read and changed."""

    def apply_gradient(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        self._reshard()
        return super().apply_gradient(gradient_sum, denominator, lr_factor)

    def get_weights(self) -> dict[str, Tensor]:
        self._reshard()
        return super().get_weights()

    def get_state(self) -> dict[str, Tensor]:
        self._reshard()
        return super().get_state()

    def _make_rows(self, name: str, tensor: Tensor) -> TensorRows:
        """Return this rank's rows of a tensor; a tensor equal on all ranks is returned in full."""
        parameter = self._find_parameter(name)
        if parameter is None:
            return TensorRows(tuple(tensor.shape), 0, tensor)
        shape = self._shapes[parameter]
        own = self._ownership.get_rows(parameter, shape[0], self._group.rank())
        return TensorRows(tuple(shape), own.start, get_local_rows(tensor))

    def _compute_norm(self, gradient: Tensor) -> float:
        # In blocks: a float64 copy of all would be twice as large as the gradient.
        sums = [part.double().square().sum() for part in torch.split(gradient, NORM_CHUNK_NUMBERS)]
        squares = torch.stack(sums).sum()
        dist.all_reduce(squares, group=self._group)
        return float(squares.sqrt())

    @abstractmethod
    def compute_local_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """Return the gradient summed over all ranks' bins, and statistics of this rank's bins."""

    def list_owned_ranges(self, rank: int) -> NDArray[np.int64]:
        return list_owned_ranges(self._trainable_shapes, self._ownership, rank)

    # -- full weights, of which rank 0 has some at a time ------------------------------------------

    def get_meta_tensors(self, optimizer: bool) -> Mapping[str, Tensor]:
        return self._meta_tensors[optimizer]

    @torch.no_grad()
    def scatter_weights(
        self, names: Sequence[str], full_weights: Mapping[str, Tensor] | None
    ) -> None:
        own = self.get_weights()
        for name in names:
            given, total = (
                None if full_weights is None else full_weights[name],
                self._shapes[name][0],
            )
            rows = [
                self._ownership.get_rows(name, total, rank) for rank in range(self._group.size())
            ]
            scatter_rows(given, get_local_rows(own[name]), rows, self._group)
        if self._has_critic:
            critic.copy_policy_weights(self.model)

    def _make_meta_tensors(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, piece in rows.items():
            parameter = self._find_parameter(name)
            shape = piece.shape if parameter is None else self._shapes[parameter]
            found[name] = torch.empty(shape, dtype=piece.dtype, device="meta")
        return found

    def _find_parameter(self, name: str) -> str | None:
        """Return the parameter that a state tensor belongs to; None if it is equal on all ranks."""
        parts = name.split(".")
        names = (".".join(parts[i:]) for i in range(len(parts)))
        return next((name for name in names if name in self._shapes), None)


class FsdpLearner(RowShardedLearner):
    """Learner whose model is sharded over ranks by FSDP; with `adapters` only these are trained."""

    def __init__(
        self,
        model: Decoder,
        settings: LearnerSettings,
        context: RankContext,
        adapters: LoraConfig | None = None,
        seed: int = 0,
        expert_parallel: int = 1,
    ) -> None:
        """Shard `model`, on the `meta` device, so that only this rank's rows are ever allocated.

        The experts of a layer are split over `expert_parallel` ranks.
        """
        mesh = context.device_mesh
        with torch.device("meta"):
            if adapters is not None and adapters.rank:
                lora.attach_adapters(model, adapters)
            if get_algorithm(settings.algorithm.name).has_critic:
                critic.attach_critic(model)
        owners = EvenOwnership(mesh.size(), expert_parallel)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        apart: Set[nn.Parameter] = frozenset()
        if expert_parallel > 1:
            apart = split_experts(model, mesh, expert_parallel, owners, context.deadline_s)
        rank, beginning = mesh.get_local_rank(), context.initial_parameters
        first = partial(initialize_rows, model, rank, owners, shapes, beginning, seed)
        shard_model(model, mesh, settings.dtype, first, apart)
        super().__init__(model, settings, mesh.get_group(), owners, shapes)

    def _reshard(self) -> None:
        reshard_model(self.model)

    def compute_local_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """Return the gradient and statistics as `RowShardedLearner` does; each rank has one bin."""
        (bin,) = bins
        _, stats = self.compute_gradient(bin)
        sizes = [get_local_rows(parameter.detach()).numel() for parameter in self._parameters]
        gradient = torch.empty(sum(sizes), device=self.device)
        for parameter, piece in zip(self._parameters, torch.split(gradient, sizes), strict=True):
            if parameter.grad is not None:
                piece.copy_(get_local_rows(parameter.grad).reshape(-1))
            elif is_sharded(parameter):
                raise RuntimeError(
                    "a parameter has no gradient: ranks would disagree about its rows"
                )
            else:
                piece.zero_()  # no token was routed to any of these experts
            parameter.grad = None  # one by one, so that memory stays close to one gradient
        return gradient, [stats]

    def free_gradients(self) -> None:
        """Free gradients and gathered parameters: only rows remain."""
        super().free_gradients()
        reshard_model(self.model)

    def _allocate_gradient(self) -> Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        return torch.empty(0)
