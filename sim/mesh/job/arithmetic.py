"""Arithmetic of one vector: a learner and ranks that take their time, and give the same bits
whoever computes.

What decides, keeps, sends and recovers around them is the trainer's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.api.ranks import Meeting
from meshrl.common.base.errors import DeadlineExceeded, RankLost, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.state.pool.workers.seat import Seat
from meshrl.common.weights.layout.laying import Part
from meshrl.services.trainer.arithmetic.gradient_sum import GradientSum
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.arithmetic.memory import LearnerMemory
from meshrl.services.trainer.arithmetic.stats import BinStats
from meshrl.services.trainer.bins.division import EvenDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.rows.saved import MASTER, SavedRows
from meshrl.services.trainer.running import Arithmetic
from meshrl.sim.machine import Machine, owner, takes

GRADIENT_S = 3.0  # of one bin
UPDATE_S = 1.0
MOVE_S = 0.2  # to load or save weights
RATE = 0.01
MOMENTUM = "momentum."  # what names of the state begin with

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
    ends = accumulate(shape.numel() for shape in shapes().values())
    cuts = pairwise([0, *ends])
    return {
        name: flat[start:end].view(shape)
        for (name, shape), (start, end) in zip(shapes().items(), cuts, strict=True)
    }


def flat_of(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in shapes()])


def own_rows(shape: torch.Size, rank: int, ranks: int) -> slice:
    """Those of a tensor that a rank has."""
    each = -(-shape[0] // ranks)
    return slice(min(rank * each, shape[0]), min((rank + 1) * each, shape[0]))


def cut(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's rows of a flat vector, tensor after tensor."""
    parts = views(whole).items()
    return torch.cat([part[own_rows(shapes()[n], rank, ranks)].reshape(-1) for n, part in parts])


def parts_of(own: Tensor, rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's rows, by tensor: views."""
    found, start = dict[str, Tensor](), 0
    for name, shape in shapes().items():
        rows = own_rows(shape, rank, ranks)
        mine = torch.Size([rows.stop - rows.start, *shape[1:]])
        found[name] = own[start : start + mine.numel()].view(mine)
        start += mine.numel()
    return found


def joined(owns: Sequence[Tensor]) -> Tensor:
    """The flat vector of all ranks' rows."""
    by_rank = [parts_of(own, rank, len(owns)) for rank, own in enumerate(owns)]
    return torch.cat([torch.cat([part[name] for part in by_rank]).reshape(-1) for name in shapes()])


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
    norm = float(gradient.norm())
    momentum.mul_(0.9).add_(gradient / max(norm, 1.0))
    weights.sub_(momentum, alpha=RATE * factor)
    return norm


class _Vector:
    """A vector and its momentum, as far as a learner and a rank have them alike."""

    _flat: Tensor
    _momentum: Tensor
    steps: int

    def tensors(self) -> dict[str, Tensor]:
        return {"flat": self._flat, "momentum": self._momentum}

    def derived(self) -> dict[str, Tensor]:
        return {}

    def counts(self) -> dict[str, int]:
        return {"steps": self.steps}

    def go_on(self, counts: Mapping[str, int]) -> None:
        self.steps = counts["steps"]

    def refresh(self) -> None:
        """Passes compute with the vector itself."""

    def forget_gradients(self) -> None:
        """They are nobody's once they are given."""

    def adopt(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """What changes a step of the vector is `lr_factor` alone."""


class TinyLearner(_Vector, Learner):
    """Behind a Learner's methods a vector and its momentum."""

    gradient_s, update_s = GRADIENT_S, UPDATE_S

    def __init__(self, seed: int) -> None:  # a Learner's own makes a model
        self.steps = 0
        self._flat = initial(seed)
        self._momentum = torch.zeros_like(self._flat)
        self.size = self._flat.numel()

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @takes("gradient_s")
    def gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        return gradient_of(self._flat, bin)

    @takes("gradient_s")
    def round_gradient(self, bins: Any) -> tuple[Tensor, BinStats]:
        return super().round_gradient(bins)

    @takes("update_s")
    def apply(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        self.steps += 1
        return stepped(self._flat, self._momentum, gradient_sum / denominator, lr_factor)

    def weights(self) -> dict[str, Tensor]:
        return views(self._flat)

    @takes(MOVE_S)
    def copied_weights(self) -> dict[str, Tensor]:
        return views(self._flat.clone())

    def state(self) -> dict[str, Tensor]:
        momenta = {MOMENTUM + name: part for name, part in views(self._momentum).items()}
        return momenta | {"steps": torch.tensor(self.steps)}

    @takes(MOVE_S)
    def restore(self, saved: SavedRows, fill: Callable[[str, Part], None]) -> None:
        for name, part in self.rows(self.weights()).items():
            fill(name, part)
        state = self.state()
        for name, tensor in state.items():
            saved.fill(name, self._part(name, tensor))
        self.steps = int(state["steps"])

    @takes(MOVE_S)
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._flat = flat_of(weights).clone()


class TinyGroup:
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


class TinyRank(_Vector, Rank):
    """Holds its share of the vector; the rest of it is the other ranks'. What blocks in a product's
    rank is awaited here, by the virtual host.
    """

    def __init__(self, data: JobData, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._seed = rank, ranks, data.config.seed
        self.division = EvenDivision(ranks)
        self._machine = owner().machine
        self._group: TinyGroup | None = None
        self._within_s = data.config.training.rank_deadline_s
        self._gradients = GradientSum()
        self._reset()
        owner().at_end.append(self.leave)

    def _reset(self) -> None:
        whole = initial(self._seed)
        self.size = whole.numel()
        self._flat = self._own(whole).clone()
        self._momentum, self.steps = torch.zeros_like(self._flat), 0

    def _own(self, whole: Tensor) -> Tensor:
        return cut(whole, self.rank, self.ranks)

    @property
    def learner(self) -> Any:
        """What a gang asks of it beside the orders: its size, and room for the whole state."""
        self._formed()
        return self

    @property
    def bytes(self) -> int:
        return self._flat.nbytes + self._momentum.nbytes

    def memory(self, gradients: bool) -> LearnerMemory:
        return LearnerMemory(cast(Learner, self), self._gradients.tensors() if gradients else {})

    def outline(self, optimizer: bool) -> Mapping[str, Tensor]:
        if optimizer:
            momenta = views(torch.zeros(self.size)).items()
            return {MOMENTUM + name: t for name, t in momenta} | {"steps": torch.tensor(0)}
        return views(torch.zeros(self.size))

    def rows(self, names: Iterable[str], part: int = 0, parts: int = 1) -> dict[str, Part]:
        self._formed()
        own = self._parts(self._flat)
        return {name: own[name].slice(part, parts) for name in names}

    def saved(self, masters: bool) -> dict[str, Part]:
        self._formed()
        found = {MOMENTUM + name: part for name, part in self._parts(self._momentum).items()}
        if masters:
            found |= {MASTER + name: part for name, part in self._parts(self._flat).items()}
        return found | {"steps": Part((), 0, torch.tensor(self.steps))}

    @takes(MOVE_S)
    def restore(self, saved: SavedRows, fill: Callable[[str, Part], None]) -> None:
        for name, part in self._parts(self._flat).items():
            fill(name, part)
        state = self.saved(masters=False)
        for name, part in state.items():
            saved.fill(name, part)
        self.steps = int(state["steps"].rows)

    def _parts(self, flat: Tensor) -> dict[str, Part]:
        own = parts_of(flat, self.rank, self.ranks).items()
        first = {name: own_rows(shapes()[name], self.rank, self.ranks).start for name, _ in own}
        return {name: Part(tuple(shapes()[name]), first[name], rows) for name, rows in own}

    def _formed(self) -> TinyGroup:
        if self._group is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        return self._group

    async def _all(self, value: Any) -> list[Any]:
        return await self._formed().exchange(self._machine, self.rank, value, self._within_s)

    async def _whole(self, part: Tensor) -> Tensor:
        return joined(await self._all(part.clone()))

    async def form(  # type: ignore[override]
        self, meeting: Meeting, interface: str = "", door: Any = None
    ) -> None:
        groups: dict[str, TinyGroup] = self._machine.meetings
        self._group = groups.setdefault(meeting.where, TinyGroup(self.ranks))
        await self._group.exchange(self._machine, self.rank, None, meeting.deadline_s)
        self._reset()
        self.begin()

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def begin(self) -> None:
        self._gradients = GradientSum()

    @takes(GRADIENT_S)
    async def compute(  # type: ignore[override]
        self, index: int, bins: Sequence[Bin]
    ) -> list[BinStats]:
        """The sum of all ranks' gradients, of which it keeps its part; its own bin's statistics."""
        gradients, whole = self._gradients, await self._whole(self._flat)
        gradient, stats = gradient_of(whole, bins[0])
        summed = sum(await self._all(gradient))
        assert isinstance(summed, Tensor)
        gradients.keep(index, self._own(summed).clone())
        return [stats]

    def keeping(self, cut: bool = False) -> Callable[[int, NDArray[np.float32]], None]:
        gradients = self._gradients

        def keep(index: int, whole: NDArray[np.float32]) -> None:
            gradients.keep(index, self._own(torch.from_numpy(np.array(whole))).clone())

        return keep

    @takes(UPDATE_S)
    async def apply(  # type: ignore[override]
        self, rounds: int, denominator: float, lr_factor: float
    ) -> float:
        gradient = await self._whole(self._gradients.total(rounds)) / denominator
        norm = float(gradient.norm())
        self._momentum.mul_(0.9).add_(self._own(gradient) / max(norm, 1.0))
        self._flat.sub_(self._momentum, alpha=RATE * lr_factor)
        self.steps += 1
        self.begin()
        return norm

    @takes(MOVE_S)
    async def take(self, names: Sequence[str], whole: Mapping[str, Tensor] | None) -> None:
        self._flat = self._own(flat_of((await self._all(whole))[0])).clone()

    def score(self, bin: Bin, what: str) -> NDArray[np.float32]:
        return np.zeros(len(bin.tokens), np.float32)


class TinyAlone(Rank):
    """The only rank of a core, which has the whole vector."""

    gradient_s, update_s = GRADIENT_S, UPDATE_S

    @takes("gradient_s")
    def compute(self, index: int, bins: Sequence[Bin]) -> list[BinStats]:
        return super().compute(index, bins)

    @takes("update_s")
    def apply(self, rounds: int, denominator: float, lr_factor: float) -> float:
        return super().apply(rounds, denominator, lr_factor)


class TinyArithmetic(Arithmetic):
    """What virtual training processes compute with."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def learner(self, data: JobData) -> Learner:
        return TinyLearner(data.config.seed)

    def rank(self, data: JobData, seat: Seat, accelerator: str) -> Rank:
        if seat.ranks == 1:
            return TinyAlone.alone(self.learner(data))
        return TinyRank(data, seat.rank, seat.ranks)
