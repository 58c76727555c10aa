"""The learner of a rank of a zebra gang (arXiv 2504.03871): attention, gates and embeddings are on
the first ranks, cut over them by rows; the experts of each layer are on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from common.clock import SystemClock
from common.errors import ConfigError
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.model.decoder import Decoder
from common.model.moe import is_expert
from common.model.rows import Beginning
from services.trainer.algorithms import algorithm
from services.trainer.arithmetic.forward import Outputs, Placed, fuse, outputs, placed
from services.trainer.arithmetic.learner import balance_share
from services.trainer.arithmetic.packing import Bin
from services.trainer.arithmetic.stats import BinStats
from services.trainer.sharding.learners import RowsLearner
from services.trainer.sharding.rows import begin
from services.trainer.zebra.lanes import Lane, Shared
from services.trainer.zebra.owners import ZebraOwners
from services.trainer.zebra.passing import Passing, put
from services.trainer.zebra.pieces import Coming, Pieces, zero_where_none
from services.trainer.zebra.round import Passed, Round


@dataclass(frozen=True)
class ZebraShape:
    """How a gang computes a mixture. `hosted`: by mixture layer, experts that each attention rank
    has; empty: none.
    """

    attention: int  # ranks with attention, gates, embeddings and head
    experts: int  # ranks with experts alone
    micros: int  # bins of each attention rank in a round
    hosted: tuple[int, ...] = ()


class ZebraLearner(RowsLearner):
    """A rank's part of it. All ranks do the same in one sequence."""

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerConfig,
        algorithm_config: AlgorithmConfig,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        *,
        mesh: DeviceMesh,
        beginning: Beginning,
        shape: ZebraShape,
        deadline_s: float,
        again: bool = False,
    ) -> None:
        """`model` lies on the `meta` device: it takes its rows, and no others, from `beginning`.
        `deadline_s`: for what another rank has to send. `again`: what a task computes is computed
        again on the way back, so that less is kept.
        """
        config, rank = model.config, mesh.get_local_rank()
        check(model, algorithm_config, shape, mesh.size())
        mixture = tuple(config.sparse_layers)
        self.shape = shape
        self._zebra = owners = ZebraOwners(
            shape.attention,
            shape.experts,
            mixture,
            config.experts,
            shape.hosted or (0,) * len(mixture),
        )
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        within = timedelta(seconds=deadline_s)
        attention = dist.new_group(list(range(shape.attention)), timeout=within)
        lanes = [dist.new_group(list(range(mesh.size())), timeout=within) for _ in range(2)]
        attends = rank < shape.attention
        among = DeviceMesh.from_group(attention, mesh.device_type) if attends else None
        cut(model, rank, owners, among)
        device = torch.device(mesh.device_type)
        model.to_empty(device=device)
        begin(model, rank, owners, shapes, beginning, 0)
        super().__init__(
            model, optimizer, algorithm_config, temperature, mesh.get_group(), owners, shapes
        )
        self._passes = Passing(model, shapes, dtype, device, attention if attends else None)
        fuse(self._passes.model)
        shared = Shared(SystemClock(), deadline_s)
        directions = tuple(
            Lane(name, group, device, shared)
            for name, group in zip(("dispatch", "combine"), lanes, strict=True)
        )
        dispatch, combine = directions
        self._pieces = Pieces(self._passes.model)
        self.round = Round(
            owners,
            rank,
            self._pieces,
            (dispatch, combine),
            shared,
            config.hidden_size,
            dtype,
            again,
        )

    @property
    def attends(self) -> bool:
        """Whether this rank has bins."""
        return self._group.rank() < self.shape.attention

    def bins_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """This rank's rows of the flat gradient, summed over all bins of a round; the statistics of
        its own ones, of which an attention rank has `shape.micros`.
        """
        self._passes.follow()
        self._passes.collect()
        given = [self._passed(bin) for bin in bins]
        stats: dict[int, BinStats] = {}

        def head(micro: int, given: Placed, coming: Coming) -> Coming:
            leaves = Coming(*(tensor.detach().requires_grad_(True) for tensor in coming))
            with torch.enable_grad():
                out = self._outputs(given, leaves)
                roots, slopes, stats[micro] = self._losses(bins[micro], out)
            torch.autograd.backward(roots, slopes)
            return Coming(*map(zero_where_none, leaves))

        self.round.run(given, self.shape.micros, head, forward_only=False)
        return self._passes.gradient(), [stats[micro] for micro in range(len(bins))]

    def score(self, bin: Bin, what: str = "logprobs") -> NDArray[np.float32]:
        """`logprobs` of the trained targets [n] of an attention rank's bin; 0 elsewhere. Expert
        ranks take part with any bin.
        """
        self._passes.follow()
        given = [self._passed(bin)] if self.attends else []
        found = np.zeros(len(bin.tokens), np.float32)

        def head(_: int, given: Placed, coming: Coming) -> None:
            with torch.no_grad():
                logprobs = self._outputs(given, coming).logprobs
            found[bin.mask] = logprobs.cpu().numpy()

        self.round.run(given, 1, head, forward_only=True)
        return found

    def refresh(self) -> None:
        """The next pass computes with the weights as they are now."""
        if hasattr(self, "_passes"):
            self._passes.stale = True

    def taken(self) -> None:
        super().taken()
        self.refresh()

    def derived(self) -> dict[str, Tensor]:
        return self._passes.tensors()

    def _passed(self, bin: Bin) -> Passed:
        config = self.model.config
        weight = config.balance_coefficient / len(config.sparse_layers) * balance_share(bin)
        return Passed(placed(bin, self.device), torch.tensor(weight, device=self.device))

    def _outputs(self, given: Placed, coming: Coming) -> Outputs:
        hidden = self._pieces.last(given, coming)
        return outputs(self._passes.model, given, hidden, self._temperature, None)


def check(model: Decoder, config: AlgorithmConfig, shape: ZebraShape, ranks: int) -> None:
    """ConfigError for what such a gang cannot train."""
    mixture, experts = model.config.sparse_layers, model.config.experts
    if not mixture:
        raise ConfigError("a zebra gang trains a mixture of experts", where="training.zebra")
    if algorithm(config.name).critic:
        raise ConfigError(
            "a zebra gang trains no critic",
            where="training.zebra",
            fix="choose an algorithm without one, or leave training.zebra out",
        )
    if shape.attention + shape.experts != ranks:
        raise ConfigError(
            f"a zebra gang of {shape.attention} and {shape.experts} ranks on {ranks}",
            where="training.zebra",
        )
    hosted = shape.hosted or (0,) * len(mixture)
    left = [experts - shape.attention * count for count in hosted]
    if len(hosted) != len(mixture) or min(left) < 0 or (not shape.experts and max(left)):
        raise ConfigError(
            f"{list(hosted)} hosted experts do not fit {len(mixture)} layers of {experts}",
            where="training.zebra",
        )


def cut(model: Decoder, rank: int, owners: ZebraOwners, among: DeviceMesh | None) -> None:
    """Leaves of a model on the `meta` device a rank's rows; those of attention ranks know that they
    are cut over `among`, as Muon makes matrices whole.
    """
    for name, parameter in list(model.named_parameters()):
        own = parameter.detach()[owners.rows(name, len(parameter), rank)]
        if among is not None and not is_expert(name):
            shape, stride = parameter.shape, parameter.stride()
            own = DTensor.from_local(
                own, among, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        put(model, name, nn.Parameter(own))
