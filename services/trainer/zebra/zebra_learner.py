"""Learner of a rank of a zebra gang (arXiv 2504.03871).

Attention, gates and embeddings are on the first ranks, sharded over them by rows. The experts of
each layer are on the other ranks.
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
from meshrl.common.model.network.moe import is_expert_matrix
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.division import ZebraDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.learner import LearnerSettings, compute_balance_weight
from meshrl.services.trainer.learner.sharded_tensors import get_local_rows
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.models.forward import (
    DeviceBin,
    ForwardOutputs,
    compute_outputs,
    fuse_pointwise,
    move_bin_to_device,
)
from meshrl.services.trainer.models.precision import make_weak_hook
from meshrl.services.trainer.sharding.learners import RankContext, RowShardedLearner
from meshrl.services.trainer.sharding.row_operations import (
    gather_rows,
    initialize_rows,
    reduce_scatter_rows,
)
from meshrl.services.trainer.sharding.row_ownership import split_evenly
from meshrl.services.trainer.zebra.decoder_pieces import DecoderPieces, PieceInputs, take_gradient
from meshrl.services.trainer.zebra.exchange_lanes import ExchangeLane
from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation
from meshrl.services.trainer.zebra.zebra_ownership import ZebraOwnership
from meshrl.services.trainer.zebra.zebra_round import MicroBatch, ZebraRound


class ShardedWorkingCopy:
    """Copy of the masters' rows in the dtype of passes.

    Gradients are summed over bins in float32, and over attention ranks at the end of a round.
    """

    def __init__(
        self,
        masters: Decoder,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
        attention_group: dist.ProcessGroup | None,
    ) -> None:
        """Create the copy; `attention_group` has the attention ranks, None on an expert rank."""
        self._attention_group = attention_group
        self._masters = dict(masters.named_parameters())
        self._shapes = shapes
        with torch.device("meta"):
            self.model = Decoder(masters.config, dtype, len(masters.rope))
        for name, parameter in list(self.model.named_parameters()):
            own: Tensor = parameter.detach()
            if is_expert_matrix(name):
                own = own.new_empty(get_local_rows(self._masters[name].detach()).shape)
            elif attention_group is None:
                own = own.new_empty(0)
            replace_parameter(self.model, name, nn.Parameter(own))
        self.model.to_empty(device=device)
        self.model.reset_buffers()
        self._parameters = dict(self.model.named_parameters())
        self._sums: dict[Tensor, Tensor] = {}
        add = make_weak_hook(self._accumulate)
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        self.is_stale = True  # the masters have changed

    @torch.no_grad()
    def update_from_masters(self) -> None:
        """Update the copy if the masters have changed; all attention ranks call it together."""
        if not self.is_stale:
            return
        for name, parameter in self._parameters.items():
            rows = get_local_rows(self._masters[name].detach())
            if is_expert_matrix(name):
                parameter.copy_(rows)
            elif self._attention_group is not None:
                ranks, total = self._attention_group.size(), self._shapes[name][0]
                if ranks > 1:
                    about = total, -(-total // ranks), parameter.dtype
                    rows = gather_rows(rows, *about, self._attention_group)
                parameter.copy_(rows)
        self.is_stale = False

    def reset_gradients(self) -> None:
        self._sums = {
            p: torch.zeros_like(p, dtype=torch.float32) for p in self._parameters.values()
        }

    @torch.no_grad()
    def _accumulate(self, parameter: Tensor) -> None:
        if (total := self._sums.get(parameter)) is not None and parameter.grad is not None:
            total += parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def collect_gradient(self) -> Tensor:
        """Return the flat float32 gradient of this rank's rows, summed over attention ranks."""
        sums, self._sums = self._sums, {}
        parts = []
        for name, parameter in self._parameters.items():
            total = sums.pop(parameter)
            if is_expert_matrix(name):
                parts.append(total.reshape(-1))
            elif self._attention_group is not None:
                ranks, rank = self._attention_group.size(), self._attention_group.rank()
                if ranks > 1:  # this rank's rows of the sum over attention ranks
                    rows, each = split_evenly(len(total), rank, ranks), -(-len(total) // ranks)
                    own = reduce_scatter_rows(total, each, total.dtype, self._attention_group)
                    total = own[: rows.stop - rows.start]
                parts.append(total.reshape(-1))
        return torch.cat(parts)

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}


def replace_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the parameter of this name in its module."""
    place, _, kind = name.rpartition(".")
    setattr(model.get_submodule(place), kind, parameter)


class ZebraLearner(RowShardedLearner):
    """Learner of one rank's part; all ranks do the same in one sequence."""

    def __init__(
        self,
        model: Decoder,
        settings: LearnerSettings,
        context: RankContext,
        division: ZebraDivision,
        recompute: bool = False,
        emulation: ZebraEmulation | None = None,
    ) -> None:
        """Allocate this rank's rows of `model`, which is on the `meta` device, and no others.

        `recompute`: compute a task's activations again in the backward pass, to save memory.
        `emulation`: pads tasks to a declared accelerator's speed.
        """
        mesh, dtype, deadline_s = context.device_mesh, settings.dtype, context.deadline_s
        config, rank = model.config, mesh.get_local_rank()
        check_zebra_config(config, settings.algorithm, division)
        self._division, self.emulation = division, emulation
        about = tuple(config.sparse_layers), config.num_experts, division.hosted_experts
        owners = ZebraOwnership(division.attention_ranks, division.expert_ranks, *about)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        within = timedelta(seconds=deadline_s)
        attention = dist.new_group(list(range(division.attention_ranks)), timeout=within)
        every = list(range(mesh.size()))
        groups = [dist.new_group(every, timeout=within) for _ in range(2)]
        attends = rank < division.attention_ranks
        among = DeviceMesh.from_group(attention, mesh.device_type) if attends else None
        device = torch.device(mesh.device_type)
        # All groups connect before rows are read: ranks may take minutes for that.
        dispatch, combine = groups
        lanes = (
            ExchangeLane("dispatch", dispatch, device, emulation),
            ExchangeLane("combine", combine, device, emulation),
        )
        keep_own_rows(model, rank, owners, among)
        model.to_empty(device=device)
        initialize_rows(model, rank, owners, shapes, context.initial_parameters, 0)
        super().__init__(model, settings, mesh.get_group(), owners, shapes)
        self._sharded_copy = ShardedWorkingCopy(
            model, shapes, dtype, device, attention if attends else None
        )
        fuse_pointwise(self._sharded_copy.model)
        self._pieces = DecoderPieces(self._sharded_copy.model)
        self.zebra_round = ZebraRound(
            owners, rank, self._pieces, lanes, deadline_s, recompute, emulation
        )

    @property
    def has_attention(self) -> bool:
        return self._group.rank() < self._division.attention_ranks

    def compute_local_gradient(self, bins: Sequence[Bin]) -> tuple[Tensor, list[BinStats]]:
        """Return this rank's rows of a round's flat gradient, and statistics of its own bins.

        An attention rank has `micro_batches` bins, an expert rank none.
        """
        self._sharded_copy.update_from_masters()
        self._sharded_copy.reset_gradients()
        given = [self._make_micro_batch(bin) for bin in bins]
        stats: dict[int, BinStats] = {}

        def head(micro: int, given: DeviceBin, coming: PieceInputs) -> PieceInputs:
            leaves = PieceInputs(*(tensor.detach().requires_grad_(True) for tensor in coming))
            with torch.enable_grad():
                out = self._compute_outputs(given, leaves)
                roots, slopes, stats[micro] = self._compute_losses(bins[micro], out)
            torch.autograd.backward(roots, slopes)
            return PieceInputs(*map(take_gradient, leaves))

        self.zebra_round.run_tasks(given, self._division.micro_batches, head, forward_only=False)
        return self._sharded_copy.collect_gradient(), [stats[micro] for micro in range(len(bins))]

    def score(self, bin: Bin, quantity: str = "logprobs") -> NDArray[np.float32]:
        """Return `logprobs` of an attention rank's targets [n]; expert ranks pass any bin."""
        self._sharded_copy.update_from_masters()
        given = [self._make_micro_batch(bin)] if self.has_attention else []
        found = np.zeros(len(bin.tokens), np.float32)

        def head(_: int, given: DeviceBin, coming: PieceInputs) -> None:
            with torch.no_grad():
                logprobs = self._compute_outputs(given, coming).logprobs
            found[bin.loss_mask] = logprobs.cpu().numpy()

        self.zebra_round.run_tasks(given, 1, head, forward_only=True)
        return found

    def refresh(self) -> None:
        """Mark the copy as stale: the next pass computes with the current weights."""
        self._sharded_copy.is_stale = True

    def scatter_weights(
        self, names: Sequence[str], full_weights: Mapping[str, Tensor] | None
    ) -> None:
        super().scatter_weights(names, full_weights)
        self.refresh()

    def get_derived_tensors(self) -> dict[str, Tensor]:
        return self._sharded_copy.get_tensors()

    def close(self) -> None:
        self.zebra_round.fail(RankLost("this rank has left its group"))

    def _make_micro_batch(self, bin: Bin) -> MicroBatch:
        config = self.model.config
        weight = (
            config.router_aux_loss_coef / len(config.sparse_layers) * compute_balance_weight(bin)
        )
        balance = torch.tensor(weight, device=self.device)
        return MicroBatch(move_bin_to_device(bin, self.device), bin.lengths.tolist(), balance)

    def _compute_outputs(self, device_bin: DeviceBin, inputs: PieceInputs) -> ForwardOutputs:
        hidden = self._pieces.run_last(device_bin, inputs)
        return compute_outputs(
            self._sharded_copy.model, device_bin, hidden, self._temperature, None
        )


def check_zebra_config(
    config: ModelConfig, algorithm_config: AlgorithmConfig, division: ZebraDivision
) -> None:
    """Raise ConfigError for settings that a zebra gang cannot train."""
    where, mixture, hosted = "training.zebra", config.sparse_layers, division.hosted_experts
    if not mixture:
        raise ConfigError("a zebra gang trains only mixtures of experts", where=where)
    if get_algorithm(algorithm_config.name).has_critic:
        raise ConfigError(
            "a zebra gang trains no critic",
            where=where,
            fix="Choose an algorithm without a critic, or remove training.zebra",
        )
    unhosted = [config.num_experts - division.attention_ranks * count for count in hosted]
    idle = max(unhosted) < division.expert_ranks if division.expert_ranks else max(unhosted) > 0
    if len(hosted) != len(mixture) or min(unhosted) < 0 or idle:
        raise ConfigError(
            f"{list(hosted)} hosted experts and {division.expert_ranks} ranks for the others "
            "do not fit "
            f"{len(mixture)} layers of {config.num_experts}",
            where=f"{where}.hosted",
            fix="Give one number for each mixture layer, or one for all",
        )


def keep_own_rows(
    model: Decoder, rank: int, ownership: ZebraOwnership, attention_mesh: DeviceMesh | None
) -> None:
    """Reduce a model on `meta` to a rank's rows, as DTensors over an `attention_mesh`."""
    for name, parameter in list(model.named_parameters()):
        own = parameter.detach()[ownership.get_rows(name, len(parameter), rank)]
        if attention_mesh is not None and not is_expert_matrix(name):
            shape, stride = parameter.shape, parameter.stride()
            own = DTensor.from_local(
                own, attention_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        replace_parameter(model, name, nn.Parameter(own))
