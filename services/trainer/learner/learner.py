"""Learner that computes gradients of bins and applies optimizer steps.

A gradient is that of the sum of weighted token losses. `apply_gradient` divides once by the
denominator of the step. So the result does not depend on which process computes a bin, only on the
order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import AlgorithmConfig, LoraConfig, OptimizerConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.weights.layout.chunk_builder import TensorRows
from meshrl.common.weights.layout.version_image import load_tensor
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner import sharded_tensors
from meshrl.services.trainer.learner.objective import compute_objective
from meshrl.services.trainer.learner.optimizers import Optimizer
from meshrl.services.trainer.learner.stats import BinStats, measure_bin, measure_values
from meshrl.services.trainer.losses.terms import LossTerms
from meshrl.services.trainer.models import critic, lora
from meshrl.services.trainer.models.forward import ForwardOutputs, fuse_pointwise, run_forward
from meshrl.services.trainer.models.precision import WorkingCopy
from meshrl.services.trainer.rows.saved_rows import MASTER_PREFIX, SavedRows


@dataclass(frozen=True)
class LearnerSettings:
    """Settings of a learner: passes in `dtype`, on trajectories sampled at `temperature`."""

    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32


class Learner:
    """Float32 model with its optimizer and algorithm."""

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerConfig,
        algorithm_config: AlgorithmConfig,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.steps = 0  # steps of the optimizer
        self._algorithm_config = algorithm_config
        hooks = get_algorithm(algorithm_config.name)
        self._has_critic, self._has_behaviour_policy = hooks.has_critic, hooks.has_behaviour_policy
        if self._has_critic:
            critic.attach_critic(model)
        fuse_pointwise(model)
        self._temperature = temperature
        self._dtype = dtype
        self._optimizer_config = optimizer
        self._has_moments = True
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Create the optimizer and the gradient buffers of the trainable parameters."""
        self._optimizer = Optimizer(self.model, self._optimizer_config, {critic.CRITIC_BIAS})
        self._meta_tensors: dict[bool, Mapping[str, Tensor]] = {}  # True: of the optimizer's state
        self._parameters = list(lora.get_trainable_parameters(self.model).values())
        self.parameter_count = sum(parameter.numel() for parameter in self._parameters)
        narrow = self._dtype != torch.float32
        self._working_copy = WorkingCopy(self.model, self._dtype) if narrow else None

    def add_adapters(self, config: LoraConfig, seed: int) -> None:
        """Attach trainable adapters and freeze the model's own weights."""
        lora.initialize_adapters(self.model, config, seed)
        if self._has_critic:
            critic.get_critic(self.model).requires_grad_(True)
        self._build_optimizer()

    def drop_moments(self) -> None:
        """Exclude the optimizer's moments from this learner's tensors, as it makes no updates."""
        self._has_moments = False

    def update_settings(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Replace the settings, except the algorithm's name and the choice of Muon's parameters."""
        self._algorithm_config, self._optimizer_config = algorithm, optimizer
        self._optimizer.update_settings(optimizer)

    def compute_gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        """Return the flat float32 gradient of the weighted token losses, and statistics."""
        gradient, out = self._allocate_gradient(), self._forward(bin)
        roots, slopes, stats = self._compute_losses(bin, out)
        if out.aux_loss is not None:
            roots.append(out.aux_loss * compute_balance_weight(bin))
            slopes.append(None)
        torch.autograd.backward(roots, slopes)
        return gradient, stats

    def _compute_losses(
        self, bin: Bin, outputs: ForwardOutputs
    ) -> tuple[list[Tensor], list[Tensor | None], BinStats]:
        """Return a bin's roots and their gradients (None: a scalar's), and its statistics."""
        terms = self._build_loss_terms(bin, outputs)
        weight = select_positions(bin.weight, outputs.loss_positions)
        found = compute_objective(terms, weight, self._algorithm_config)
        fresh = (
            select_positions(bin.fresh_mask, outputs.loss_positions)
            if self._has_behaviour_policy
            else None
        )
        roots: list[Tensor] = [outputs.logprobs]
        slopes: list[Tensor | None] = [found.logprob_gradient]
        if self._algorithm_config.entropy_coefficient:
            bonus = weight * self._algorithm_config.entropy_coefficient
            found.losses = found.losses - bonus * outputs.entropy.detach()
            roots.append(outputs.entropy)
            slopes.append(-bonus)
        stats = measure_bin(terms, found, outputs.entropy, fresh)
        if self._has_critic:
            values = critic.compute_values(self._compute_model, bin)
            losses = critic.compute_value_losses(values, terms, weight, self._algorithm_config)
            roots.append((losses * weight).sum() * self._algorithm_config.value_coefficient)
            slopes.append(None)
            measure_values(stats, terms, losses)
        return roots, slopes, stats

    def compute_round_gradient(self, bins: Iterable[Bin]) -> tuple[Tensor, BinStats]:
        return sum_gradients(self.compute_gradient(bin) for bin in bins)

    def compute_local_gradient(self, bins: Many[Bin]) -> tuple[Tensor, list[BinStats]]:
        """Return this rank's rows of a round's flat gradient, and statistics of its bins."""
        (bin,) = bins
        gradient, stats = self.compute_gradient(bin)
        return gradient, [stats]

    @torch.no_grad()  # FSDP could not train with tensors of inference mode later
    def score(self, bin: Bin, quantity: str = "logprobs") -> NDArray[np.float32]:
        """Return `logprobs` of the trained targets [n], or a critic's `values`; 0 elsewhere."""
        found = np.zeros(len(bin.tokens), np.float32)
        if quantity == "values":
            scores = critic.compute_values(self._compute_model, bin)
        else:
            scores = self._forward(bin).logprobs
        found[bin.loss_mask] = scores.cpu().numpy()
        return found

    def apply_gradient(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        """Apply one step from the summed gradient / `denominator`; return its norm before clipping.

        The gradient tensor is overwritten. Raise ConfigError, without a step, if it is not finite.
        """
        gradient = gradient_sum.div_(denominator)
        norm = self._compute_norm(gradient)
        if not np.isfinite(norm):
            raise ConfigError(
                f"the gradient of step {self.steps + 1} is not finite",
                where="trainer",
                fix="Lower optimizer.muon_lr and optimizer.adamw_lr, or check the rewards",
            )
        scale = 1.0
        if norm > self._optimizer_config.clip_norm:
            scale = self._optimizer_config.clip_norm / (norm + 1e-6)
            gradient *= scale
        self._optimizer.step(gradient, lr_factor, self._algorithm_config.value_coefficient * scale)
        self.refresh()
        self.steps += 1
        return norm

    def get_weights(self) -> dict[str, Tensor]:
        """Return views of the model's parameters by name, without the critic's."""
        return critic.exclude_critic(
            (name, p.detach()) for name, p in self.model.named_parameters()
        )

    def get_rows(
        self, names: Iterable[str], part_index: int = 0, part_count: int = 1
    ) -> dict[str, TensorRows]:
        """Return views of part `part_index` of `part_count` of this rank's rows of some weights."""
        own = self.get_weights()
        return {
            name: self._make_rows(name, own[name]).split(part_index, part_count) for name in names
        }

    def get_checkpoint_rows(self, include_masters: bool) -> dict[str, TensorRows]:
        """Return views of this rank's checkpoint rows: state, and float32 masters if requested."""
        found = {name: self._make_rows(name, tensor) for name, tensor in self.get_state().items()}
        if include_masters:
            found |= {
                MASTER_PREFIX + name: part
                for name, part in self.get_rows(self.get_weights()).items()
            }
        return found

    def _make_rows(self, name: str, tensor: Tensor) -> TensorRows:
        return TensorRows(tuple(tensor.shape), 0, tensor)

    def list_owned_ranges(self, rank: int) -> NDArray[np.int64]:
        """Return a rank's ranges [count, 2] of a flat gradient over all trainable parameters."""
        return np.array([[0, self.parameter_count]], np.int64)

    def get_meta_tensors(self, optimizer: bool) -> Mapping[str, Tensor]:
        """Return the weights, or the `optimizer` state, for their names, dtypes and shapes.

        The memory of the tensors may be freed by then.
        """
        if optimizer not in self._meta_tensors:
            tensors = self.get_state() if optimizer else self.get_weights()
            self._meta_tensors[optimizer] = {n: t.to("meta") for n, t in tensors.items()}
        return self._meta_tensors[optimizer]

    @torch.no_grad()
    def scatter_weights(self, names: Many[str], full_weights: Mapping[str, Tensor] | None) -> None:
        """Load this rank's rows of weights that rank 0 has in full; a critic starts from them."""
        assert full_weights is not None, "a learner with all rows needs all weights"
        self.load_weights(full_weights)

    def close(self) -> None:
        """End waits for other ranks outside the group, when this rank leaves it."""

    def copy_weights(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.get_weights().items()}

    def copy_optimizer_state(self) -> dict[str, Tensor]:
        """Return host copies of all state, beside the weights, that the next step depends on."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.get_state().items()}

    def get_state(self) -> dict[str, Tensor]:
        """Return the tensors that `copy_optimizer_state` copies; all but the counts are views."""
        valued = critic.select_critic(
            (name, p.detach()) for name, p in self.model.named_parameters()
        )
        return self._optimizer.get_state() | valued | {"steps": torch.tensor(self.steps)}

    @torch.no_grad()
    def restore(self, saved: SavedRows, fill_rows: Callable[[str, TensorRows], None]) -> None:
        """Restore the state from `saved` and the weights by `fill_rows`; CorruptData."""
        for name, part in self.get_rows(self.get_weights()).items():
            fill_rows(name, part)
        state = self.get_state()
        for name, tensor in state.items():
            saved.fill(name, self._make_rows(name, tensor))
        self.resume_from_counts(
            {"steps": int(state["steps"]), "updates": int(state["adamw.steps"])}
        )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights only; a working copy and a critic are initialized from them."""
        with torch.no_grad():
            for name, parameter in critic.exclude_critic(self.model.named_parameters()).items():
                load_tensor(weights, name, parameter)
        if self._has_critic:
            critic.copy_policy_weights(self.model)
        self.refresh()

    # -- saved state -----------------------------------------------------------------------------

    def get_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the next step depends on, by name; views of this rank's rows."""
        return self.get_parameters() | self.get_moments()

    def get_parameters(self) -> dict[str, Tensor]:
        """Return views of this rank's rows of all parameters, by name."""
        return {
            f"model.{name}": sharded_tensors.get_local_rows(p)
            for name, p in self.model.named_parameters()
        }

    def get_moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors of this rank, by name."""
        moments = self._optimizer.get_tensors() if self._has_moments else {}
        return {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def get_derived_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `refresh` computes from the others."""
        return (
            {} if self._working_copy is None else dict(self._working_copy.model.named_parameters())
        )

    def get_counts(self) -> dict[str, int]:
        """Return the integers that the next step depends on beside the tensors."""
        return {"steps": self.steps, "updates": self._optimizer.update_count}

    def resume_from_counts(self, counts: Mapping[str, int]) -> None:
        """Set the counts that belong to tensors loaded by the caller, and refresh."""
        self.steps, self._optimizer.update_count = counts["steps"], counts["updates"]
        self.refresh()

    def free_gradients(self) -> None:
        """Free the last gradient; the next gradient gets memory of its own."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._working_copy is not None:
            self._working_copy.set_gradient_sums([None for _ in self.model.parameters()])

    @property
    def size_bytes(self) -> int:
        return sum(
            t.nbytes for t in (*self.get_tensors().values(), *self.get_derived_tensors().values())
        )

    def _compute_norm(self, gradient: Tensor) -> float:
        return float(gradient.norm())

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def _compute_model(self) -> Decoder:
        return self.model if self._working_copy is None else self._working_copy.model

    def refresh(self) -> None:
        """Update the working copy from the current weights."""
        if self._working_copy is not None:
            self._working_copy.refresh()

    def _allocate_gradient(self) -> Tensor:
        self.free_gradients()  # parameters still reference the last one
        gradient = torch.zeros(self.parameter_count, device=self._parameters[0].device)
        sizes = [parameter.numel() for parameter in self._parameters]
        pairs = zip(self._parameters, torch.split(gradient, sizes), strict=True)
        slices = {parameter: piece.view_as(parameter) for parameter, piece in pairs}
        if self._working_copy is not None:
            self._working_copy.set_gradient_sums(
                [slices.get(parameter) for parameter in self.model.parameters()]
            )
            return gradient
        for parameter, piece in slices.items():
            parameter.grad = piece
        return gradient

    def _forward(self, bin: Bin) -> ForwardOutputs:
        return run_forward(self._compute_model, bin, self._temperature)

    def _build_loss_terms(self, bin: Bin, outputs: ForwardOutputs) -> LossTerms:
        behaviour = select_positions(bin.behaviour_logprobs, outputs.loss_positions)
        extras = {
            name: select_positions(array, outputs.loss_positions)
            for name, array in bin.extras.items()
        }
        return LossTerms(
            logprobs=outputs.logprobs,
            behaviour_logprobs=behaviour,
            proximal_logprobs=extras.get("proximal", outputs.logprobs.detach()),
            advantages=select_positions(bin.advantages, outputs.loss_positions),
            sequence_ids=outputs.sequence_ids,
            sequence_count=len(bin.cu_seqlens) - 1,
            extras=extras,
        )


def sum_gradients(results: Iterable[tuple[Tensor, BinStats]]) -> tuple[Tensor, BinStats]:
    """Return the sum over bins in the given order; float addition depends on it."""
    found = iter(results)
    total, stats = next(found)
    for gradient, more in found:
        total += gradient
        stats += more
        del gradient  # free it before the next one is computed
    return total, stats


def compute_balance_weight(bin: Bin) -> float:
    """Return the weight of an MoE balance loss: that of one token's loss."""
    weight = bin.weight[bin.loss_mask]
    return float(weight.sum(dtype=np.float64) / max(1, len(weight)))


def select_positions(array: NDArray[np.generic], positions: Tensor) -> Tensor:
    return torch.from_numpy(array).to(positions.device).index_select(0, positions)
