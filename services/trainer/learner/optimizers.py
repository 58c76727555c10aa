"""Optimizer: Muon on matrices, AdamW on all else but a critic's bias, over one flat gradient.

Muon (Jordan 2024, kellerjordan.github.io/posts/muon) differs from `torch.optim.Muon` in two ways.
The Newton-Schulz iteration runs in the parameter's own precision instead of bfloat16. Several
matrices of one shape are batched.

Each rank updates its own rows of parameters that FSDP shards. The gradient is then that of its
rows, parameter after parameter. AdamW is elementwise. Muon gathers full matrices for the iteration,
a share of them on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.config import OptimizerConfig
from meshrl.common.model.network.lora import is_adapter_tensor
from meshrl.services.trainer.learner.sharded_tensors import (
    apply_to_full_matrices,
    get_local_rows,
    get_shard_group,
)

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # quintic, steepest at zero
BETAS = 0.9, 0.95
EPSILON = 1e-8
MIN_NEWTON_RATE = 0.2  # of a Newton step after the first five, so that noise averages out
MAX_BATCH_NUMBERS = 1 << 24  # numbers updated at a time, which bounds working memory
# Lookup tables, and rows that act independently.
MUON_EXCLUDED = ("embedding", "unembedding", "router", "shared_gate")


def compute_lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the share of the learning rate at `step` (from 0): warm-up times decay.

    It depends on nothing else, so a resumed run continues as it would have. After a change of
    `steps`, it continues on the schedule of the new length.
    """
    done = step / steps
    remaining = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    decay = config.final_lr + (1 - config.final_lr) * remaining[config.schedule]
    return min(1.0, (step + 1) / max(config.warmup_steps, 1)) * decay


class Optimizer:
    """Updater of a model's parameters from their flat gradient, in parameter order."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, parabolic_names: Collection[str] = ()
    ) -> None:
        """Create the optimizer; the loss is a parabola in each parameter of `parabolic_names`."""
        matrices: list[ParameterSpan] = []
        self._parabolic: list[ParameterSpan] = []
        rest: list[ParameterSpan] = []
        offset = 0
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            part = ParameterSpan(name, parameter, offset)
            offset += part.numel
            if name in parabolic_names:
                self._parabolic.append(part)
                continue
            muon = config.muon_lr > 0 and parameter.dim() >= 2
            chosen = (
                muon
                and not is_adapter_tensor(name)
                and name.rpartition(".")[2] not in MUON_EXCLUDED
            )
            (matrices if chosen else rest).append(part)
        self._adamw = AdamW(rest, config.adamw_lr, config.weight_decay)
        by_shape: dict[torch.Size, list[ParameterSpan]] = {}
        for part in matrices:
            by_shape.setdefault(part.parameter.shape, []).append(part)
        about = config.muon_lr, config.weight_decay
        self._muons = [Muon(same_shape, *about) for same_shape in by_shape.values()]

    def update_settings(self, config: OptimizerConfig) -> None:
        """Replace the rates; raise ConfigError if that would change Muon's parameters."""
        if bool(self._muons) and not config.muon_lr:
            raise ConfigError(
                "the run trains its matrices with Muon, so the rate must be above 0",
                where="optimizer.muon_lr",
            )
        self._adamw.lr, self._adamw.weight_decay = config.adamw_lr, config.weight_decay
        for muon in self._muons:
            muon.lr, muon.weight_decay = config.muon_lr, config.weight_decay

    @torch.no_grad()
    def step(self, gradient: Tensor, lr_factor: float, curvature: float = 1.0) -> None:
        """Apply one update from a flat gradient.

        `curvature`: the second derivative of the loss in parabolic parameters, times the scale of
        the gradient. These parameters take Newton steps, which need no learning rate.
        """
        self._adamw.step(gradient, lr_factor)
        for muon in self._muons:
            muon.step(gradient, lr_factor)
        rate = max(1 / self.update_count, MIN_NEWTON_RATE) / curvature if curvature else 0.0
        for part in self._parabolic:
            part.values.sub_(gradient[part.gradient_slice].view(part.shape), alpha=rate)

    def get_state(self) -> dict[str, Tensor]:
        """Return views of the state by parameter name, independent of the grouping."""
        state = self._adamw.get_state()
        for muon in self._muons:
            state |= muon.get_state()
        return state

    def get_tensors(self) -> dict[str, Tensor]:
        moments = {f"muon.{i}": muon.momentum for i, muon in enumerate(self._muons)}
        return {"adamw.mean": self._adamw.mean, "adamw.square": self._adamw.square, **moments}

    @property
    def update_count(self) -> int:
        """Number of updates, which AdamW's bias corrections depend on."""
        return self._adamw.steps

    @update_count.setter
    def update_count(self, count: int) -> None:
        self._adamw.steps = count


class ParameterSpan:
    """Parameter, or this rank's rows of it, with its slice of the flat gradient."""

    def __init__(self, name: str, parameter: nn.Parameter, offset: int) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = get_local_rows(parameter.detach()).shape
        self.numel = self.shape.numel()
        self.gradient_slice = slice(offset, offset + self.numel)

    @property
    def values(self) -> Tensor:
        """Values to update; FSDP may move them between two steps."""
        return get_local_rows(self.parameter.detach())


class SpanSlice:
    def __init__(self, part: ParameterSpan, begin: int, end: int) -> None:
        self._part, self._own = part, slice(begin, end)
        self.gradient_slice = slice(
            part.gradient_slice.start + begin, part.gradient_slice.start + end
        )
        self.numel = end - begin

    @property
    def values(self) -> Tensor:
        return self._part.values.view(-1)[self._own]


def split_into_batches(spans: Iterable[ParameterSpan]) -> Iterator[list[SpanSlice]]:
    """Yield the spans in order, with at most MAX_BATCH_NUMBERS numbers in each batch."""
    batch: list[SpanSlice] = []
    room = MAX_BATCH_NUMBERS
    for part in spans:
        begin = 0
        while begin < part.numel:
            end = min(part.numel, begin + room)
            batch.append(SpanSlice(part, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield batch
                batch, room = [], MAX_BATCH_NUMBERS
    if batch:
        yield batch


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on concatenated parameters."""

    def __init__(self, spans: list[ParameterSpan], lr: float, weight_decay: float) -> None:
        self._spans, self.lr, self.weight_decay = spans, lr, weight_decay
        self._sizes = [part.numel for part in spans]
        self._batches = list(split_into_batches(spans))
        self.steps = 0

    @cached_property
    def mean(self) -> Tensor:
        """First moments. Moments take memory at their first use: hybrids never use them."""
        device = self._spans[0].parameter.device if self._spans else None
        return _create_once(self, "mean", torch.zeros(sum(self._sizes), device=device))

    @cached_property
    def square(self) -> Tensor:
        """Second moments."""
        return _create_once(self, "square", torch.zeros_like(self.mean))

    def step(self, gradient: Tensor, lr_factor: float) -> None:
        if not self._spans:
            return
        self.steps += 1
        scale, begin = math.sqrt(1 - BETAS[1] ** self.steps), 0
        for pieces in self._batches:
            own = torch.cat([gradient[piece.gradient_slice] for piece in pieces])
            end = begin + len(own)
            mean, square = self.mean[begin:end], self.square[begin:end]
            mean.lerp_(own, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(own, own, value=1 - BETAS[1])
            move = mean / square.sqrt().div_(scale).add_(EPSILON)
            move *= -self.lr * lr_factor / (1 - BETAS[0] ** self.steps)
            begin = end
            moves = torch.split(move, [piece.numel for piece in pieces])
            for piece, delta in zip(pieces, moves, strict=True):
                values = piece.values.mul_(1 - self.lr * lr_factor * self.weight_decay)
                values.add_(delta)

    def get_state(self) -> dict[str, Tensor]:
        state = {"adamw.steps": torch.tensor(self.steps)}
        for kind, moment in (("mean", self.mean), ("square", self.square)):
            for part, piece in zip(self._spans, torch.split(moment, self._sizes), strict=True):
                state[f"adamw.{kind}.{part.name}"] = piece.view(part.shape)
        return state


class Muon:
    """Muon: orthogonalized Nesterov momentum on matrices of one shape (the last two dimensions)."""

    def __init__(self, spans: list[ParameterSpan], lr: float, weight_decay: float) -> None:
        self._spans, self.lr, self.weight_decay = spans, lr, weight_decay
        first = spans[0].parameter
        self._height = first.shape[-2]
        # Tall matrices take larger steps.
        self._lr_scale = max(1.0, first.shape[-2] / first.shape[-1]) ** 0.5
        # A stack is sharded between matrices, which stay complete.
        self._group = get_shard_group(first) if first.dim() == 2 else None
        ranks = 1 if self._group is None else self._group.size()
        # Each rank has a share of full matrices, and all ranks the same number of rows.
        self._batch_matrices = max(1, MAX_BATCH_NUMBERS // max(1, first.numel() * ranks)) * ranks

    @cached_property
    def momentum(self) -> Tensor:
        """Momentum of all matrices, which takes memory at its first use."""
        first = self._spans[0]
        zeros = torch.zeros(len(self._spans), *first.shape, device=first.parameter.device)
        return _create_once(self, "momentum", zeros)

    def step(self, gradient: Tensor, lr_factor: float) -> None:
        lr = self.lr * lr_factor
        for begin in range(0, len(self._spans), self._batch_matrices):
            some = slice(begin, begin + self._batch_matrices)
            parts = self._spans[some]
            own = torch.stack([gradient[part.gradient_slice].view(part.shape) for part in parts])
            momentum = self.momentum[some].lerp_(own, 1 - MOMENTUM)
            own.lerp_(momentum, MOMENTUM)
            if self._group is None:
                update = orthogonalize(own)
            else:
                update = apply_to_full_matrices(own, self._height, orthogonalize, self._group)
            for part, delta in zip(parts, update, strict=True):
                values = part.values.mul_(1 - lr * self.weight_decay)
                values.add_(delta, alpha=-lr * self._lr_scale)

    def get_state(self) -> dict[str, Tensor]:
        moments = zip(self._spans, self.momentum, strict=True)
        return {f"muon.momentum.{part.name}": momentum for part, momentum in moments}


def _create_once(owner: object, name: str, created: Tensor) -> Tensor:
    """Return the cached property `name` if another thread has created it, else `created`.

    The event loop may read sizes during the first step, and `cached_property` has no lock since
    Python 3.12.
    """
    found: Tensor = vars(owner).setdefault(name, created)
    return found


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately orthogonal matrices [.., rows, columns]: singular values near one."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT).mT
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
