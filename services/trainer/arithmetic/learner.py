"""The learner: computes gradients of bins and steps of the optimizer, and nothing else.

A gradient is that of the sum of weighted token losses; the division by what a step's sequences
count happens once, in `apply`. So it does not matter who computes which bin, only in which order
the sums are added.
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
from meshrl.common.weights.layout.images import load_tensor
from meshrl.common.weights.layout.laying import Part
from meshrl.services.trainer.algorithms import algorithm
from meshrl.services.trainer.arithmetic import cut_rows
from meshrl.services.trainer.arithmetic.objective import objective
from meshrl.services.trainer.arithmetic.optimizers import Optimizer
from meshrl.services.trainer.arithmetic.stats import BinStats, describe, describe_values
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.losses.terms import LossTerms
from meshrl.services.trainer.models import critic, lora
from meshrl.services.trainer.models.forward import Outputs, forward, fuse
from meshrl.services.trainer.models.precision import WorkingCopy
from meshrl.services.trainer.rows.saved import MASTER, SavedRows


@dataclass(frozen=True)
class LearnerSettings:
    """How a learner trains: passes in `dtype`, on trajectories sampled at `temperature`."""

    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32


class Learner:
    """A float32 model, its optimizer and an algorithm."""

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerConfig,
        algorithm_config: AlgorithmConfig,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.steps = 0  # steps that the optimizer has taken
        self._config = algorithm_config
        hooks = algorithm(algorithm_config.name)
        self._critic, self._sampled = hooks.critic, hooks.sampled
        if self._critic:
            critic.attach(model)
        fuse(model)
        self._temperature = temperature
        self._dtype = dtype
        self._rates = optimizer
        self._begin()

    def _begin(self) -> None:
        """The optimizer, and where gradients go, of the parameters that learn."""
        self._optimizer = Optimizer(self.model, self._rates, {critic.BIAS})
        self._parameters = list(lora.trained(self.model).values())
        self.size = sum(parameter.numel() for parameter in self._parameters)
        narrow = self._dtype != torch.float32
        self._copy = WorkingCopy(self.model, self._dtype) if narrow else None

    def adapt(self, config: LoraConfig, seed: int) -> None:
        """Makes adapters learn from now on, and freezes the model's own weights."""
        lora.adapt(self.model, config, seed)
        if self._critic:
            critic.critic_of(self.model).requires_grad_(True)
        self._begin()

    def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Compute with these from now on; the algorithm's name, and what Muon trains, stay."""
        self._config, self._rates = algorithm, optimizer
        self._optimizer.adopt(optimizer)

    def gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        """Flat float32 gradient of the sum of weighted token losses, in the parameters' order."""
        gradient, out = self._fresh_gradient(), self._forward(bin)
        roots, slopes, stats = self._losses(bin, out)
        if out.aux_loss is not None:
            roots.append(out.aux_loss * balance_share(bin))
            slopes.append(None)
        torch.autograd.backward(roots, slopes)
        return gradient, stats

    def _losses(self, bin: Bin, out: Outputs) -> tuple[list[Tensor], list[Tensor | None], BinStats]:
        """Return a bin's roots and their gradients (None: a scalar's), and its statistics."""
        terms = self._terms(bin, out)
        weight = pick(bin.weight, out.places)
        found = objective(terms, weight, self._config)
        fresh = pick(bin.fresh, out.places) if self._sampled else None
        stats = describe(terms, found, out.entropy, fresh)
        roots: list[Tensor] = [out.logprobs]
        slopes: list[Tensor | None] = [found.slope]
        if self._critic:
            values = critic.values(self._passing, bin)
            losses = critic.value_losses(values, terms, weight, self._config)
            roots.append((losses * weight).sum() * self._config.value_coefficient)
            slopes.append(None)
            describe_values(stats, terms, losses)
        return roots, slopes, stats

    def round_gradient(self, bins: Iterable[Bin]) -> tuple[Tensor, BinStats]:
        return add(self.gradient(bin) for bin in bins)

    def bins_gradient(self, bins: Many[Bin]) -> tuple[Tensor, list[BinStats]]:
        """Return the rows here of a round's flat gradient, and statistics of the bins here."""
        (bin,) = bins
        gradient, stats = self.gradient(bin)
        return gradient, [stats]

    @torch.no_grad()  # what inference mode makes, FSDP could not train with later
    def score(self, bin: Bin, what: str = "logprobs") -> NDArray[np.float32]:
        """`logprobs` of the trained targets [n], or a critic's `values`; 0 elsewhere."""
        found = np.zeros(len(bin.tokens), np.float32)
        if what == "values":
            scores = critic.values(self._passing, bin)
        else:
            scores = self._forward(bin).logprobs
        found[bin.mask] = scores.cpu().numpy()
        return found

    def apply(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        """One step from the summed gradient / `denominator`; returns its norm before clipping. It
        uses the gradient up.

        ConfigError, and no step, if the gradient is not finite.
        """
        gradient = gradient_sum.div_(denominator)
        norm = self._norm(gradient)
        if not np.isfinite(norm):
            raise ConfigError(
                f"the gradient of step {self.steps + 1} is not finite",
                where="trainer",
                fix="lower optimizer.muon_lr and optimizer.adamw_lr, or look at the rewards",
            )
        scale = 1.0
        if norm > self._rates.clip_norm:
            scale = self._rates.clip_norm / (norm + 1e-6)
            gradient *= scale
        self._optimizer.step(gradient, lr_factor, self._config.value_coefficient * scale)
        self.refresh()
        self.steps += 1
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters by name, no critic's; views, which the next step changes."""
        return critic.published((name, p.detach()) for name, p in self.model.named_parameters())

    def rows(self, names: Iterable[str], part: int = 0, parts: int = 1) -> dict[str, Part]:
        """Part number `part` of `parts` of the rows of some weights that lie here; views."""
        own = self.weights()
        return {name: self._part(name, own[name]).slice(part, parts) for name in names}

    def saved(self, masters: bool) -> dict[str, Part]:
        """Return what a checkpoint keeps of the rows here: state, and float32 `masters`; views."""
        found = {name: self._part(name, tensor) for name, tensor in self.state().items()}
        if masters:
            found |= {MASTER + name: part for name, part in self.rows(self.weights()).items()}
        return found

    def _part(self, name: str, tensor: Tensor) -> Part:
        return Part(tuple(tensor.shape), 0, tensor)

    def own_part(self, whole: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
        """The part of a rank in a flat gradient over all that learns."""
        return whole

    def outline(self, optimizer: bool) -> Mapping[str, Tensor]:
        """Return the weights, or the state of the `optimizer`, for names, types and shapes."""
        return self.state() if optimizer else self.weights()

    @torch.no_grad()
    def take(self, names: Many[str], whole: Mapping[str, Tensor] | None) -> None:
        """Takes its rows of all weights, which rank 0 has `whole`; a critic begins with them."""
        assert whole is not None, "who has all rows is given all weights"
        self.load_weights(whole)

    def close(self) -> None:
        """Its rank leaves the group: what waits for other ranks outside of it does so no more."""

    def copied_weights(self) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.weights().items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """All that the next step depends on beside the weights; copies in the host's memory."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """What `optimizer_state` copies; all but the counts in place."""
        valued = critic.own((name, p.detach()) for name, p in self.model.named_parameters())
        return self._optimizer.state() | valued | {"steps": torch.tensor(self.steps)}

    @torch.no_grad()
    def restore(self, saved: SavedRows, fill: Callable[[str, Part], None]) -> None:
        """Go on from `saved`, and from weights that `fill` puts into their rows; Damaged."""
        for name, part in self.rows(self.weights()).items():
            fill(name, part)
        state = self.state()
        for name, tensor in state.items():
            saved.fill(name, self._part(name, tensor))
        self.go_on({"steps": int(state["steps"]), "updates": int(state["adamw.steps"])})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over weights only; what follows from them, passes and a critic, begins anew."""
        with torch.no_grad():
            for name, parameter in critic.published(self.model.named_parameters()).items():
                load_tensor(weights, name, parameter)
        if self._critic:
            critic.follow(self.model)
        self.refresh()

    # -- what it goes on from --------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on, by name: no copies, of a rank its rows."""
        named = {f"model.{name}": cut_rows.local(p) for name, p in self.model.named_parameters()}
        moments = self._optimizer.tensors()
        return named | {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def derived(self) -> dict[str, Tensor]:
        """Tensors that `refresh` makes of the others."""
        return {} if self._copy is None else dict(self._copy.model.named_parameters())

    def counts(self) -> dict[str, int]:
        """The numbers that the next step depends on beside the tensors."""
        return {"steps": self.steps, "updates": self._optimizer.updates}

    def go_on(self, counts: Mapping[str, int]) -> None:
        """Its tensors have been given other values, and `counts` belongs to them."""
        self.steps, self._optimizer.updates = counts["steps"], counts["updates"]
        self.refresh()

    def forget_gradients(self) -> None:
        """Lets go of the gradient that was computed last; the next one has memory of its own."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._copy is not None:
            self._copy.collect([None for _ in self.model.parameters()])

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors().values(), *self.derived().values()))

    def _norm(self, gradient: Tensor) -> float:
        return float(gradient.norm())

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def _passing(self) -> Decoder:
        return self.model if self._copy is None else self._copy.model

    def refresh(self) -> None:
        """Passes compute with the weights as they are now."""
        if self._copy is not None:
            self._copy.refresh()

    def _fresh_gradient(self) -> Tensor:
        gradient = torch.zeros(self.size, device=self._parameters[0].device)
        sizes = [parameter.numel() for parameter in self._parameters]
        pairs = zip(self._parameters, torch.split(gradient, sizes), strict=True)
        slices = {parameter: piece.view_as(parameter) for parameter, piece in pairs}
        if self._copy is not None:
            self._copy.collect([slices.get(parameter) for parameter in self.model.parameters()])
            return gradient
        for parameter, piece in slices.items():
            parameter.grad = piece
        return gradient

    def _forward(self, bin: Bin) -> Outputs:
        return forward(self._passing, bin, self._temperature)

    def _terms(self, bin: Bin, out: Outputs) -> LossTerms:
        behaviour = pick(bin.behaviour, out.places)
        extras = {name: pick(array, out.places) for name, array in bin.extras.items()}
        return LossTerms(
            logprobs=out.logprobs,
            behaviour=behaviour,
            proximal=extras.get("proximal", out.logprobs.detach()),
            advantage=pick(bin.advantage, out.places),
            sequence=out.sequence,
            sequences=len(bin.starts) - 1,
            extras=extras,
        )


def add(results: Iterable[tuple[Tensor, BinStats]]) -> tuple[Tensor, BinStats]:
    """The sum over bins, in the order given: float addition has one."""
    found = iter(results)
    total, stats = next(found)
    for gradient, more in found:
        total += gradient
        stats += more
        del gradient  # before there is the next one
    return total, stats


def balance_share(bin: Bin) -> float:
    """Return a mixture's balance loss's weight, which is that of a token's loss."""
    weight = bin.weight[bin.mask]
    return float(weight.sum(dtype=np.float64) / max(1, len(weight)))


def pick(array: NDArray[np.generic], places: Tensor) -> Tensor:
    return torch.from_numpy(array).to(places.device).index_select(0, places)
