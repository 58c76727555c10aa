"""Arithmetic of one vector: a learner and ranks that take their time, and give the same bits
whoever computes.

What decides, keeps, sends and recovers around them is the trainer's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import DeadlineExceeded, RankLost, Refused
from common.job.config import AlgorithmConfig, OptimizerConfig
from common.job.job_data import JobData
from common.model.config import ModelConfig
from common.model.decoder import Decoder
from services.trainer.arithmetic.learner import Learner
from services.trainer.arithmetic.packing import Bin
from services.trainer.arithmetic.stats import BinStats
from services.trainer.core.saved_state import load_state
from services.trainer.helpers.gradient_sum import GradientSum
from services.trainer.ranks.rank import Rank
from services.trainer.running import Arithmetic
from sim.machine import Machine, owner, takes

GRADIENT_S = 3.0  # of one bin
UPDATE_S = 1.0
MOVE_S = 0.2  # to load or save weights
RATE = 0.01

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@cache
def shapes() -> dict[str, torch.Size]:
    """Those of MODEL's parameters, so that checkpoints are what they are of a real one."""
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(MODEL))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def views(flat: Tensor) -> dict[str, Tensor]:
    """The parts of a flat vector, by name."""
    ends = accumulate(shape.numel() for shape in shapes().values())
    cuts = pairwise([0, *ends])
    return {
        name: flat[start:end].view(shape)
        for (name, shape), (start, end) in zip(shapes().items(), cuts, strict=True)
    }


def flat_of(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in shapes()])


def initial(seed: int) -> Tensor:
    size = sum(shape.numel() for shape in shapes().values())
    return torch.arange(size, dtype=torch.float32).mul_(0.001).add_(seed % 97)


def gradient_of(weights: Tensor, bin: Bin) -> tuple[Tensor, BinStats]:
    """Depends on every trained token of the bin, and on the weights."""
    kept = bin.mask
    told = bin.targets[kept].astype(np.float64) * bin.advantage[kept] * bin.weight[kept]
    slope = float(told.sum()) + 1e-3 * float(bin.targets[kept].sum())
    gradient = weights * 1e-3 + slope
    tokens = int(kept.sum())
    sampled = {"sampled": tokens, "fresh_tokens": int(bin.fresh[kept].sum())}
    ratios = {"ratio_min": 1.0, "ratio_max": 1.0}
    ratios |= dict.fromkeys(("ratio_sum", "ratio_square_sum"), float(tokens))
    return gradient, BinStats(tokens=tokens, loss_sum=slope, **sampled, **ratios)  # type: ignore[arg-type]


def stepped(weights: Tensor, momentum: Tensor, gradient: Tensor, factor: float) -> float:
    """An optimizer step in place; the gradient's norm."""
    norm = float(gradient.norm())
    momentum.mul_(0.9).add_(gradient / max(norm, 1.0))
    weights.sub_(momentum, alpha=RATE * factor)
    return norm


class TinyLearner(Learner):
    """Behind a Learner's methods a vector and its momentum."""

    def __init__(self, seed: int) -> None:  # a Learner's own makes a model
        self.steps = 0
        self._flat = initial(seed)
        self._momentum = torch.zeros_like(self._flat)
        self.size = self._flat.numel()

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @takes(GRADIENT_S)
    def gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        return gradient_of(self._flat, bin)

    @takes(GRADIENT_S)
    def round_gradient(self, bins: Any) -> tuple[Tensor, BinStats]:
        return super().round_gradient(bins)

    def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """What changes a step of the vector is `lr_factor` alone."""

    @takes(UPDATE_S)
    def apply(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        self.steps += 1
        return stepped(self._flat, self._momentum, gradient_sum / denominator, lr_factor)

    def weights(self) -> dict[str, Tensor]:
        return views(self._flat)

    @takes(MOVE_S)
    def copied_weights(self) -> dict[str, Tensor]:
        return views(self._flat.clone())

    @takes(MOVE_S)
    def optimizer_state(self) -> dict[str, Tensor]:
        return {"momentum": self._momentum.clone(), "steps": torch.tensor(self.steps)}

    @takes(MOVE_S)
    def restore(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        state = {"momentum": torch.zeros_like(self._flat), "steps": torch.tensor(0)}
        load_state(path, state)
        self._flat = flat_of(weights).clone()
        self._momentum, self.steps = state["momentum"], int(state["steps"])

    @takes(MOVE_S)
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._flat = flat_of(weights).clone()


class Group:
    """A process group: what one rank brings all of them get, once all have come."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.broken = False
        self._here: dict[int, int] = {}  # rank -> exchanges so far
        self._brought: dict[int, dict[int, Any]] = {}
        self._changed = asyncio.Event()

    def leave(self) -> None:
        """One has gone: nobody's wait for it ends otherwise."""
        self.broken = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def exchange(
        self, machine: Machine, rank: int, value: Any, deadline_s: float
    ) -> list[Any]:
        """What each rank brought, in their order; RankLost when one has gone or is late."""
        number = self._here[rank] = self._here.get(rank, -1) + 1
        brought = self._brought.setdefault(number, {})
        brought[rank] = value
        self._tell()
        try:
            async with machine.clock.timeout(deadline_s, "a collective"):
                while len(brought) < self.ranks and not self.broken:
                    await self._changed.wait()
        except DeadlineExceeded as error:
            self.leave()
            raise RankLost(f"a collective failed: {error}", where=f"rank {rank}") from error
        if len(brought) < self.ranks:
            raise RankLost("a collective failed: a rank has left", where=f"rank {rank}")
        return [brought[one] for one in range(self.ranks)]


class TinyRank(Rank):
    """Holds its share of the vector; the rest of it is the other ranks'. What blocks in a product's
    rank is awaited here, by the virtual host.
    """

    def __init__(self, data: JobData, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._seed = rank, ranks, data.config.seed
        self._machine = owner().machine
        self._group: Group | None = None
        self._within_s = data.config.training.rank_deadline_s
        self._gradients = GradientSum()
        self._reset()
        owner().at_end.append(self.leave)

    def _reset(self) -> None:
        whole = initial(self._seed)
        self.size = whole.numel()
        self._flat = self._own(whole).clone()
        self._momentum, self._steps = torch.zeros_like(self._flat), 0

    def _own(self, whole: Tensor) -> Tensor:
        return whole.tensor_split(self.ranks)[self.rank]

    @property
    def learner(self) -> Any:
        """What a gang asks of it beside the orders: its size, and room for the whole state."""
        self._formed()
        return self

    def empty_state(self) -> dict[str, Tensor]:
        return {"momentum": torch.zeros(self.size), "steps": torch.tensor(0)}

    def _formed(self) -> Group:
        if self._group is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        return self._group

    async def _all(self, value: Any) -> list[Any]:
        return await self._formed().exchange(self._machine, self.rank, value, self._within_s)

    async def _whole(self, part: Tensor) -> Tensor:
        return torch.cat(await self._all(part.clone()))

    async def form(self, meeting: Path, deadline_s: float) -> None:  # type: ignore[override]
        groups: dict[str, Group] = self._machine.meetings
        self._group = groups.setdefault(meeting.name, Group(self.ranks))
        await self._group.exchange(self._machine, self.rank, None, deadline_s)
        self._reset()
        self.begin()

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def begin(self) -> None:
        self._gradients = GradientSum()

    @takes(GRADIENT_S)
    async def compute(self, index: int, bin: Bin) -> BinStats:  # type: ignore[override]
        """The sum of all ranks' gradients, of which it keeps its part; its own bin's statistics."""
        gradients, whole = self._gradients, await self._whole(self._flat)
        gradient, stats = gradient_of(whole, bin)
        summed = sum(await self._all(gradient))
        assert isinstance(summed, Tensor)
        gradients.keep(index, self._own(summed).clone())
        return stats

    def keeping(self) -> Callable[[int, NDArray[np.float32]], None]:
        gradients = self._gradients

        def keep(index: int, whole: NDArray[np.float32]) -> None:
            gradients.keep(index, self._own(torch.from_numpy(np.array(whole))).clone())

        return keep

    def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """What changes a step of the vector is `lr_factor` alone."""

    @takes(UPDATE_S)
    async def apply(  # type: ignore[override]
        self, rounds: int, denominator: float, lr_factor: float
    ) -> float:
        total = await self._whole(self._gradients.total(rounds))
        gradient = total / denominator
        norm = float(gradient.norm())
        self._momentum.mul_(0.9).add_(self._own(gradient) / max(norm, 1.0))
        self._flat.sub_(self._momentum, alpha=RATE * lr_factor)
        self._steps += 1
        self.begin()
        return norm

    @takes(MOVE_S)
    async def gather(self, optimizer: bool) -> dict[str, Tensor]:  # type: ignore[override]
        whole = await self._whole(self._momentum if optimizer else self._flat)
        if self.rank:
            return {}
        if optimizer:
            return {"momentum": whole, "steps": torch.tensor(self._steps)}
        return views(whole)

    @takes(MOVE_S)
    async def take(  # type: ignore[override]
        self, weights: Mapping[str, Tensor] | None, state: Mapping[str, Tensor] | None, all: bool
    ) -> None:
        given = (await self._all((weights, state)))[0]
        self._flat = self._own(flat_of(given[0])).clone()
        if all:
            self._momentum = self._own(given[1]["momentum"]).clone()
            self._steps = int(given[1]["steps"])

    def score(self, bin: Bin, what: str) -> NDArray[np.float32]:
        return np.zeros(len(bin.tokens), np.float32)


class TinyArithmetic(Arithmetic):
    """What virtual training processes compute with."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def learner(self, data: JobData) -> Learner:
        return TinyLearner(data.config.seed)

    def rank(self, data: JobData, rank: int, size: int) -> Rank:
        return TinyRank(data, rank, size)
