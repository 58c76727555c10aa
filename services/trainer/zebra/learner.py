"""The learner of a rank of a zebra gang (arXiv 2504.03871): attention, gates and embeddings are on
the first ranks, cut over them by rows; the experts of each layer are on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshrl.common.base.errors import ConfigError, RankLost
from meshrl.common.job.config import AlgorithmConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import is_expert
from meshrl.services.trainer.algorithms import algorithm
from meshrl.services.trainer.arithmetic.cut_rows import local
from meshrl.services.trainer.arithmetic.learner import LearnerSettings, balance_share
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.division import ZebraDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.models.forward import Outputs, Placed, fuse, outputs, placed
from meshrl.services.trainer.models.precision import weakly
from meshrl.services.trainer.sharding.learners import GangPlace, RowsLearner
from meshrl.services.trainer.sharding.owners import evenly
from meshrl.services.trainer.sharding.rows import begin, gathered, summed
from meshrl.services.trainer.zebra.lanes import Lane
from meshrl.services.trainer.zebra.owners import ZebraOwners
from meshrl.services.trainer.zebra.pace import ZebraPace
from meshrl.services.trainer.zebra.pieces import PieceInputs, Pieces, zero_where_none
from meshrl.services.trainer.zebra.round import Passed, Round


class Passing:
    """A copy of the rows of `masters` in the type of passes. Gradients are summed over bins in
    float32, and over attention ranks when a round has ended.
    """

    def __init__(
        self,
        masters: Decoder,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        attention: dist.ProcessGroup | None,
    ) -> None:
        """`attention`: the group of the attention ranks; None on an expert rank."""
        self._attention = attention
        self._masters = dict(masters.named_parameters())
        self._shapes = shapes
        with torch.device("meta"):
            self.model = Decoder(masters.config, dtype, len(masters.rope))
        for name, parameter in list(self.model.named_parameters()):
            own: Tensor = parameter.detach()
            if is_expert(name):
                own = own.new_empty(local(self._masters[name].detach()).shape)
            elif attention is None:
                own = own.new_empty(0)
            put(self.model, name, nn.Parameter(own))
        self.model.to_empty(device=device)
        self.model.settle()
        self._parameters = dict(self.model.named_parameters())
        self._sums: dict[Tensor, Tensor] = {}
        add = weakly(self._add)
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self.stale = True  # the masters have changed

    @torch.no_grad()
    def follow(self) -> None:
        """Takes over the masters if they have changed; all attention ranks do so together."""
        if not self.stale:
            return
        for name, parameter in self._parameters.items():
            rows = local(self._masters[name].detach())
            if is_expert(name):
                parameter.copy_(rows)
            elif self._attention is not None:
                ranks, total = self._attention.size(), self._shapes[name][0]
                if ranks > 1:
                    about = total, -(-total // ranks), parameter.dtype
                    rows = gathered(rows, *about, self._attention)
                parameter.copy_(rows)
        self.stale = False

    def collect(self) -> None:
        self._sums = {
            p: torch.zeros_like(p, dtype=torch.float32) for p in self._parameters.values()
        }

    @torch.no_grad()
    def _add(self, parameter: Tensor) -> None:
        if (total := self._sums.get(parameter)) is not None and parameter.grad is not None:
            total += parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return the flat float32 gradient of this rank's rows, summed over attention ranks."""
        sums, self._sums = self._sums, {}
        parts = []
        for name, parameter in self._parameters.items():
            total = sums.pop(parameter)
            if is_expert(name):
                parts.append(total.reshape(-1))
            elif self._attention is not None:
                ranks, rank = self._attention.size(), self._attention.rank()
                if ranks > 1:  # this rank's rows of the sum over attention ranks
                    rows, each = evenly(len(total), rank, ranks), -(-len(total) // ranks)
                    own = summed(total, each, total.dtype, self._attention)
                    total = own[: rows.stop - rows.start]
                parts.append(total.reshape(-1))
        return torch.cat(parts)

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}


def put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives a module another parameter of this name."""
    place, _, kind = name.rpartition(".")
    setattr(model.get_submodule(place), kind, parameter)


class ZebraLearner(RowsLearner):
    """A rank's part of it. All ranks do the same in one sequence."""

    def __init__(
        self,
        model: Decoder,
        settings: LearnerSettings,
        place: GangPlace,
        division: ZebraDivision,
        again: bool = False,
        pace: ZebraPace | None = None,
    ) -> None:
        """`model` lies on the `meta` device: it takes its rows, and no others, from the beginning.
        `again`: what a task computes is computed again on the way back, so that less is kept.
        `pace`: what it is slowed down to.
        """
        mesh, dtype, deadline_s = place.mesh, settings.dtype, place.deadline_s
        config, rank = model.config, mesh.get_local_rank()
        check(config, settings.algorithm, division)
        self._division, self.pace = division, pace
        about = tuple(config.sparse_layers), config.experts, division.hosted
        owners = ZebraOwners(division.attention, division.experts, *about)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        within = timedelta(seconds=deadline_s)
        attention = dist.new_group(list(range(division.attention)), timeout=within)
        every = list(range(mesh.size()))
        groups = [dist.new_group(every, timeout=within) for _ in range(2)]
        attends = rank < division.attention
        among = DeviceMesh.from_group(attention, mesh.device_type) if attends else None
        cut(model, rank, owners, among)
        device = torch.device(mesh.device_type)
        model.to_empty(device=device)
        begin(model, rank, owners, shapes, place.beginning, 0)
        super().__init__(model, settings, mesh.get_group(), owners, shapes)
        self._passes = Passing(model, shapes, dtype, device, attention if attends else None)
        fuse(self._passes.model)
        dispatch, combine = groups
        lanes = Lane("dispatch", dispatch, device, pace), Lane("combine", combine, device, pace)
        self._pieces = Pieces(self._passes.model)
        self.round = Round(owners, rank, self._pieces, lanes, deadline_s, again, pace)

    @property
    def attends(self) -> bool:
        return self._group.rank() < self._division.attention

    def bins_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """This rank's rows of the flat gradient, summed over all bins of a round; the statistics of
        its own ones, of which an attention rank has `micros`, and an expert rank none.
        """
        self._passes.follow()
        self._passes.collect()
        given = [self._passed(bin) for bin in bins]
        stats: dict[int, BinStats] = {}

        def head(micro: int, given: Placed, coming: PieceInputs) -> PieceInputs:
            leaves = PieceInputs(*(tensor.detach().requires_grad_(True) for tensor in coming))
            with torch.enable_grad():
                out = self._outputs(given, leaves)
                roots, slopes, stats[micro] = self._losses(bins[micro], out)
            torch.autograd.backward(roots, slopes)
            return PieceInputs(*map(zero_where_none, leaves))

        self.round.run(given, self._division.micros, head, forward_only=False)
        return self._passes.gradient(), [stats[micro] for micro in range(len(bins))]

    def score(self, bin: Bin, what: str = "logprobs") -> NDArray[np.float32]:
        """`logprobs` of an attention rank's bin's targets [n]; expert ranks take part with any."""
        self._passes.follow()
        given = [self._passed(bin)] if self.attends else []
        found = np.zeros(len(bin.tokens), np.float32)

        def head(_: int, given: Placed, coming: PieceInputs) -> None:
            with torch.no_grad():
                logprobs = self._outputs(given, coming).logprobs
            found[bin.mask] = logprobs.cpu().numpy()

        self.round.run(given, 1, head, forward_only=True)
        return found

    def refresh(self) -> None:
        """The next pass computes with the weights as they are now."""
        self._passes.stale = True

    def take(self, names: Sequence[str], whole: Mapping[str, Tensor] | None) -> None:
        super().take(names, whole)
        self.refresh()

    def derived(self) -> dict[str, Tensor]:
        return self._passes.tensors()

    def close(self) -> None:
        self.round.fail(RankLost("this rank has left its group"))

    def _passed(self, bin: Bin) -> Passed:
        config = self.model.config
        weight = config.balance_coefficient / len(config.sparse_layers) * balance_share(bin)
        balance = torch.tensor(weight, device=self.device)
        return Passed(placed(bin, self.device), bin.lengths.tolist(), balance)

    def _outputs(self, given: Placed, coming: PieceInputs) -> Outputs:
        hidden = self._pieces.last(given, coming)
        return outputs(self._passes.model, given, hidden, self._temperature, None)


def check(config: ModelConfig, algorithm_config: AlgorithmConfig, division: ZebraDivision) -> None:
    """ConfigError for what such a gang cannot train."""
    where, mixture, hosted = "training.zebra", config.sparse_layers, division.hosted
    if not mixture:
        raise ConfigError("a zebra gang trains a mixture of experts", where=where)
    if algorithm(algorithm_config.name).critic:
        raise ConfigError(
            "a zebra gang trains no critic",
            where=where,
            fix="choose an algorithm without one, or leave training.zebra out",
        )
    left = [config.experts - division.attention * count for count in hosted]
    idle = max(left) < division.experts if division.experts else max(left) > 0
    if len(hosted) != len(mixture) or min(left) < 0 or idle:
        raise ConfigError(
            f"{list(hosted)} hosted experts and {division.experts} ranks for the others do not fit "
            f"{len(mixture)} layers of {config.experts}",
            where=f"{where}.hosted",
            fix="Give one number for each mixture layer, or one for all",
        )


def cut(model: Decoder, rank: int, owners: ZebraOwners, among: DeviceMesh | None) -> None:
    """Leave a rank's rows of a model on `meta`; Muon knows those that are cut over `among`."""
    for name, parameter in list(model.named_parameters()):
        own = parameter.detach()[owners.rows(name, len(parameter), rank)]
        if among is not None and not is_expert(name):
            shape, stride = parameter.shape, parameter.stride()
            own = DTensor.from_local(
                own, among, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        put(model, name, nn.Parameter(own))
