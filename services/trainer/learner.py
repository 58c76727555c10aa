"""Gradients of bins and steps of the optimizer: the arithmetic of training, and nothing else.

A gradient is that of the sum of token losses; the division by a step's tokens happens once, in
`apply`. So it does not matter who computes which bin, only in which order the sums are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.config import AlgorithmConfig, OptimizerConfig
from common.errors import ConfigError
from common.model.attention import packed_attention
from common.model.decoder import Decoder
from services.trainer.algorithms import algorithm
from services.trainer.batching import Bin
from services.trainer.optimizers import Optimizer

MODEL = "model."  # what names of parameters start with in a learner's state


@dataclass(slots=True)
class BinStats:
    """Sums over the trained tokens of a bin; `*_max` are maxima."""

    tokens: int = 0
    loss_sum: float = 0.0
    entropy_sum: float = 0.0
    clipped: int = 0  # tokens whose loss has no gradient
    kl_sum: float = 0.0  # of behaviour from the trained policy, Schulman's k3 estimate
    fresh_tokens: int = 0  # sampled, with their whole prefix, under the version being trained
    gap_sum: float = 0.0  # |log-probability here - at sampling| over fresh tokens
    gap_max: float = 0.0

    def __add__(self, other: BinStats) -> BinStats:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return BinStats(**sums | {"gap_max": max(self.gap_max, other.gap_max)})


class Learner:
    """A float32 model, its optimizer and an algorithm."""

    def __init__(
        self, model: Decoder, optimizer: OptimizerConfig, algorithm_config: AlgorithmConfig
    ) -> None:
        self.model = model
        self.steps = 0  # that the optimizer has taken
        self._algorithm = algorithm(algorithm_config.name)
        self._algorithm_config = algorithm_config
        self._clip_norm = optimizer.clip_norm
        self._optimizer = Optimizer(model, optimizer)
        self._parameters = list(model.parameters())
        self.size = sum(parameter.numel() for parameter in self._parameters)

    def gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        """Flat float32 gradient of the sum of token losses, in the order of the parameters."""
        gradient, places = self._fresh_gradient(), trained_places(bin)
        targets = pick(bin.targets, places, torch.int64)
        behaviour = pick(bin.behaviour, places)
        advantage = pick(bin.advantage, places)
        logits = self._logits(bin, places)
        logprobs = -cross_entropy(logits, targets, reduction="none")
        logprobs.retain_grad()
        losses = self._algorithm.token_loss(logprobs, behaviour, advantage, self._algorithm_config)
        loss = losses.sum()
        torch.autograd.backward(loss)
        stats = BinStats(tokens=len(targets), loss_sum=float(loss.detach()))
        slope = logprobs.grad
        assert slope is not None
        stats.clipped = int(((slope == 0) & (advantage != 0)).sum())
        _describe(stats, logits.detach(), logprobs.detach() - behaviour, bin, places)
        return gradient, stats

    def supervised_gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        """As `gradient`, of the cross-entropy of the bin's own tokens."""
        gradient, places = self._fresh_gradient(), trained_places(bin)
        targets = pick(bin.targets, places, torch.int64)
        loss = cross_entropy(self._logits(bin, places), targets, reduction="sum")
        torch.autograd.backward(loss)
        return gradient, BinStats(tokens=len(targets), loss_sum=float(loss.detach()))

    @torch.inference_mode()
    def score(self, bin: Bin) -> NDArray[np.float32]:
        """Log-probabilities [rows, width] of the trained targets; 0 elsewhere."""
        places = trained_places(bin)
        targets = pick(bin.targets, places, torch.int64)
        scores = torch.zeros(bin.tokens.size)
        scores[places] = -cross_entropy(self._logits(bin, places), targets, reduction="none")
        found: NDArray[np.float32] = scores.view(bin.shape).numpy()
        return found

    def apply(self, gradient_sum: Tensor, tokens: int, lr_factor: float) -> float:
        """One step from the summed gradient of `tokens` tokens; returns its norm before clipping.

        ConfigError, and no step, if the gradient is not finite.
        """
        gradient = gradient_sum / tokens
        norm = float(gradient.norm())
        if not np.isfinite(norm):
            raise ConfigError(
                f"the gradient of step {self.steps + 1} is not finite",
                where="trainer",
                fix="lower optimizer.muon_lr and optimizer.adamw_lr, or look at the rewards",
            )
        if norm > self._clip_norm:
            gradient *= self._clip_norm / (norm + 1e-6)
        self._optimizer.step(gradient, lr_factor)
        self.steps += 1
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The model's parameters by name; views, which the next step changes."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on: model, optimizer, steps taken; copies."""
        model = {MODEL + name: tensor.clone() for name, tensor in self.weights().items()}
        return model | self._optimizer.state() | {"steps": torch.tensor(self.steps)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave; KeyError if it is of another model or optimizer."""
        self.load_weights(
            {k.removeprefix(MODEL): v for k, v in state.items() if k.startswith(MODEL)}
        )
        self._optimizer.load(state)
        self.steps = int(state["steps"])

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over weights only."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def _fresh_gradient(self) -> Tensor:
        """A zero gradient whose slices the parameters accumulate into."""
        gradient = torch.zeros(self.size)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, piece in zip(self._parameters, torch.split(gradient, sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        return gradient

    def _logits(self, bin: Bin, places: Tensor) -> Tensor:
        """[places, vocabulary]: only where a loss is taken."""
        tokens, positions = torch.from_numpy(bin.tokens), torch.from_numpy(bin.positions)
        attention = packed_attention(torch.from_numpy(bin.segments))
        hidden = self.model(tokens, positions, attention)
        return self.model.logits(hidden.flatten(0, 1).index_select(0, places))


def add(results: Iterable[tuple[Tensor, BinStats]]) -> tuple[Tensor, BinStats]:
    """The sum over bins, in the order given: float addition has one."""
    (total, stats), *rest = results
    for gradient, more in rest:
        total += gradient
        stats += more
    return total, stats


def trained_places(bin: Bin) -> Tensor:
    """Indices into the flattened bin of the places that carry loss."""
    return torch.from_numpy(np.flatnonzero(bin.mask))


def pick(array: NDArray[np.generic], places: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a bin's array at `places`."""
    values = torch.from_numpy(array).view(-1).index_select(0, places)
    return values if dtype is None else values.to(dtype)


@torch.no_grad()
def _describe(stats: BinStats, logits: Tensor, log_ratio: Tensor, bin: Bin, places: Tensor) -> None:
    """Adds what is known of the sampled tokens without a gradient."""
    logits = logits.log_softmax(-1)
    stats.entropy_sum = float(-(logits.exp() * logits).sum())
    stats.kl_sum = float((log_ratio.exp() - 1 - log_ratio).sum())
    gaps = log_ratio.abs()[pick(bin.fresh, places)]
    stats.fresh_tokens = len(gaps)
    if len(gaps):
        stats.gap_sum, stats.gap_max = float(gaps.sum()), float(gaps.max())
