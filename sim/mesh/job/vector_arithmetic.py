"""Arithmetic of one vector: a learner and ranks with durations, and bit-identical results for any
assignment of bins.

All control around them, decisions, storage, messages and recovery, is the trainer's own code.
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

from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.errors import DeadlineExceeded, RankLost, Refused
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.mesh.instances.kind_controller import TensorsOfKind
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.layout.chunk_builder import TensorRows
from meshrl.services.trainer.bins.division import EvenDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.gradient_sum import GradientSum
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.learner.memory import make_learner_kinds
from meshrl.services.trainer.learner.stats import BinStats
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.role_process import LearnerFactory
from meshrl.services.trainer.rows.saved_rows import MASTER_PREFIX, SavedRows
from meshrl.sim.virtual_machine import VirtualMachine, get_current_process, virtual_duration

GRADIENT_S = 3.0  # of one bin
UPDATE_S = 1.0
TRANSFER_S = 0.2  # to load or save weights
LEARNING_RATE = 0.01
MOMENTUM_PREFIX = "momentum."  # prefix of momentum names in the state

MODEL_CONFIG = {
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
def get_shapes() -> dict[str, torch.Size]:
    """Return the shapes of MODEL's parameters, so that checkpoints look like those of a real
    model.
    """
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(MODEL_CONFIG))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def split_tensors(flat: Tensor) -> dict[str, Tensor]:
    ends = accumulate(shape.numel() for shape in get_shapes().values())
    cuts = pairwise([0, *ends])
    return {
        name: flat[start:end].view(shape)
        for (name, shape), (start, end) in zip(get_shapes().items(), cuts, strict=True)
    }


def flatten(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name in get_shapes()])


def get_rank_rows(shape: torch.Size, rank: int, ranks: int) -> slice:
    """Return the rows of a tensor that a rank owns."""
    each = -(-shape[0] // ranks)
    return slice(min(rank * each, shape[0]), min((rank + 1) * each, shape[0]))


def slice_rank(flat: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's rows of a flat vector, tensor after tensor."""
    parts = split_tensors(flat).items()
    return torch.cat(
        [part[get_rank_rows(get_shapes()[n], rank, ranks)].reshape(-1) for n, part in parts]
    )


def split_rank_tensors(own: Tensor, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return views of a rank's rows by tensor."""
    found, start = dict[str, Tensor](), 0
    for name, shape in get_shapes().items():
        rows = get_rank_rows(shape, rank, ranks)
        mine = torch.Size([rows.stop - rows.start, *shape[1:]])
        found[name] = own[start : start + mine.numel()].view(mine)
        start += mine.numel()
    return found


def join_ranks(owns: Sequence[Tensor]) -> Tensor:
    """Join the rows of all ranks to the flat vector."""
    by_rank = [split_rank_tensors(own, rank, len(owns)) for rank, own in enumerate(owns)]
    return torch.cat(
        [torch.cat([part[name] for part in by_rank]).reshape(-1) for name in get_shapes()]
    )


def make_initial_weights(seed: int) -> Tensor:
    size = sum(shape.numel() for shape in get_shapes().values())
    return torch.arange(size, dtype=torch.float32).mul_(0.001).add_(seed % 97)


def compute_gradient(weights: Tensor, bin: Bin) -> tuple[Tensor, BinStats]:
    """Compute a gradient that depends on every trained token of the bin, and on the weights."""
    mask = bin.loss_mask
    terms = bin.targets[mask].astype(np.float64) * bin.advantages[mask] * bin.weight[mask]
    slope = float(terms.sum()) + 1e-3 * float(bin.targets[mask].sum())
    gradient = weights * 1e-3 + slope
    tokens = int(mask.sum())
    sampled = {"sampled_tokens": tokens, "fresh_tokens": int(bin.fresh_mask[mask].sum())}
    ratios = {"ratio_min": 1.0, "ratio_max": 1.0}
    ratios |= dict.fromkeys(("ratio_sum", "ratio_square_sum"), float(tokens))
    return gradient, BinStats(tokens=tokens, loss_sum=slope, **sampled, **ratios)  # type: ignore[arg-type]


def apply_step(weights: Tensor, momentum: Tensor, gradient: Tensor, lr_factor: float) -> float:
    norm = float(gradient.norm())
    momentum.mul_(0.9).add_(gradient / max(norm, 1.0))
    weights.sub_(momentum, alpha=LEARNING_RATE * lr_factor)
    return norm


class _VectorState:
    """Vector with its momentum: the common state of a learner and a rank."""

    _flat_weights: Tensor
    _momentum: Tensor
    steps: int

    def get_parameters(self) -> dict[str, Tensor]:
        return {"flat": self._flat_weights}

    def get_moments(self) -> dict[str, Tensor]:
        return {"momentum": self._momentum}

    def get_derived_tensors(self) -> dict[str, Tensor]:
        return {}

    def get_counts(self) -> dict[str, int]:
        return {"steps": self.steps}

    def resume_from_counts(self, counts: Mapping[str, int]) -> None:
        self.steps = counts["steps"]

    def refresh(self) -> None:
        """Do nothing, as passes use the vector itself."""

    def free_gradients(self) -> None:
        """Free the gradients, which are not used again."""

    def update_settings(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig) -> None:
        """Update the settings; only `lr_factor` affects a step of the vector."""


class VectorLearner(_VectorState, Learner):
    """Learner of a vector and its momentum."""

    gradient_s, update_s = GRADIENT_S, UPDATE_S

    def __init__(self, seed: int) -> None:  # Learner's own constructor makes a model
        self.steps = 0
        self._flat_weights = make_initial_weights(seed)
        self._momentum = torch.zeros_like(self._flat_weights)
        self.parameter_count = self._flat_weights.numel()
        self._meta_tensors = {}

    @property
    def device(self) -> torch.device:
        return self._flat_weights.device

    @virtual_duration("gradient_s")
    def compute_gradient(self, bin: Bin) -> tuple[Tensor, BinStats]:
        return compute_gradient(self._flat_weights, bin)

    @virtual_duration("gradient_s")
    def compute_round_gradient(self, bins: Any) -> tuple[Tensor, BinStats]:
        return super().compute_round_gradient(bins)

    @virtual_duration("update_s")
    def apply_gradient(self, gradient_sum: Tensor, denominator: float, lr_factor: float) -> float:
        self.steps += 1
        return apply_step(self._flat_weights, self._momentum, gradient_sum / denominator, lr_factor)

    def get_weights(self) -> dict[str, Tensor]:
        return split_tensors(self._flat_weights)

    @virtual_duration(TRANSFER_S)
    def copy_weights(self) -> dict[str, Tensor]:
        return split_tensors(self._flat_weights.clone())

    def get_state(self) -> dict[str, Tensor]:
        momenta = {
            MOMENTUM_PREFIX + name: part for name, part in split_tensors(self._momentum).items()
        }
        return momenta | {"steps": torch.tensor(self.steps)}

    @virtual_duration(TRANSFER_S)
    def restore(self, saved: SavedRows, fill_rows: Callable[[str, TensorRows], None]) -> None:
        for name, part in self.get_rows(self.get_weights()).items():
            fill_rows(name, part)
        state = self.get_state()
        for name, tensor in state.items():
            saved.fill(name, self._make_rows(name, tensor))
        self.steps = int(state["steps"])

    @virtual_duration(TRANSFER_S)
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._flat_weights = flatten(weights).clone()


class VectorProcessGroup:
    """Process group: each rank receives the values of all ranks, once all have arrived."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.is_broken = False
        self._exchange_counts: dict[int, int] = {}  # rank -> exchanges so far
        self._values: dict[int, dict[int, Any]] = {}
        self._wakeup = asyncio.Event()

    def leave(self) -> None:
        """Leave the group: break it, and wake all waiting ranks."""
        self.is_broken = True
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._wakeup.set()
        self._wakeup = asyncio.Event()

    async def exchange(
        self, machine: VirtualMachine, rank: int, value: Any, deadline_s: float
    ) -> list[Any]:
        """Exchange values; return those of all ranks in rank order. Raise RankLost if a rank has
        left or is late.
        """
        number = self._exchange_counts[rank] = self._exchange_counts.get(rank, -1) + 1
        values = self._values.setdefault(number, {})
        values[rank] = value
        self._wake_waiters()
        try:
            async with machine.clock.timeout(deadline_s, "a collective"):
                while len(values) < self.ranks and not self.is_broken:
                    await self._wakeup.wait()
        except DeadlineExceeded as error:
            self.leave()
            raise RankLost(f"a collective failed: {error}", where=f"rank {rank}") from error
        if len(values) < self.ranks:
            raise RankLost("a collective failed: a rank has left", where=f"rank {rank}")
        return [values[one] for one in range(self.ranks)]


class VectorRank(_VectorState, Rank):
    """Rank that owns its shard of the vector. Calls that block in the product's rank are awaited
    here, on the virtual host.
    """

    def __init__(self, data: JobData, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self._seed = rank, ranks, data.config.seed
        self.division = EvenDivision(ranks)
        self._machine = get_current_process().machine
        self._group: VectorProcessGroup | None = None
        self._collective_timeout_s = data.config.training.rank_deadline_s
        self._gradients = GradientSum()
        self._reset()
        get_current_process().exit_callbacks.append(self.leave)

    def _reset(self) -> None:
        weights = make_initial_weights(self._seed)
        self.parameter_count = weights.numel()
        self._flat_weights = self._slice_own(weights).clone()
        self._momentum, self.steps = torch.zeros_like(self._flat_weights), 0

    def _slice_own(self, whole: Tensor) -> Tensor:
        return slice_rank(whole, self.rank, self.ranks)

    @property
    def learner(self) -> Any:
        """Learner interface for the gang: the size and the memory of the whole state."""
        self._require_group()
        return self

    def make_kinds(self) -> dict[str, TensorsOfKind]:
        def find_learner() -> Learner | None:
            return None if self._group is None else cast(Learner, self)

        return make_learner_kinds(find_learner, lambda: self._gradients.get_tensors())

    def get_meta_tensors(self, optimizer: bool) -> Mapping[str, Tensor]:
        if optimizer:
            momenta = split_tensors(torch.zeros(self.parameter_count)).items()
            return {MOMENTUM_PREFIX + name: t for name, t in momenta} | {"steps": torch.tensor(0)}
        return split_tensors(torch.zeros(self.parameter_count))

    def get_rows(
        self, names: Iterable[str], part: int = 0, parts: int = 1
    ) -> dict[str, TensorRows]:
        self._require_group()
        own = self._make_parts(self._flat_weights)
        return {name: own[name].split(part, parts) for name in names}

    def get_checkpoint_rows(self, masters: bool) -> dict[str, TensorRows]:
        self._require_group()
        found = {
            MOMENTUM_PREFIX + name: part for name, part in self._make_parts(self._momentum).items()
        }
        if masters:
            found |= {
                MASTER_PREFIX + name: part
                for name, part in self._make_parts(self._flat_weights).items()
            }
        return found | {"steps": TensorRows((), 0, torch.tensor(self.steps))}

    @virtual_duration(TRANSFER_S)
    def restore(self, saved: SavedRows, fill_rows: Callable[[str, TensorRows], None]) -> None:
        for name, part in self._make_parts(self._flat_weights).items():
            fill_rows(name, part)
        state = self.get_checkpoint_rows(masters=False)
        for name, part in state.items():
            saved.fill(name, part)
        self.steps = int(state["steps"].rows)

    def _make_parts(self, flat: Tensor) -> dict[str, TensorRows]:
        own = split_rank_tensors(flat, self.rank, self.ranks).items()
        first = {
            name: get_rank_rows(get_shapes()[name], self.rank, self.ranks).start for name, _ in own
        }
        return {
            name: TensorRows(tuple(get_shapes()[name]), first[name], rows) for name, rows in own
        }

    def _require_group(self) -> VectorProcessGroup:
        if self._group is None:
            raise Refused(f"rank {self.rank} is in no group", where="trainer")
        return self._group

    async def _all_gather(self, value: Any) -> list[Any]:
        return await self._require_group().exchange(
            self._machine, self.rank, value, self._collective_timeout_s
        )

    async def _gather_flat(self, own: Tensor) -> Tensor:
        return join_ranks(await self._all_gather(own.clone()))

    async def join(  # type: ignore[override]
        self, rendezvous: Rendezvous, interface: str = "", listener: Any = None
    ) -> None:
        groups: dict[str, VectorProcessGroup] = self._machine.process_groups
        self._group = groups.setdefault(rendezvous.rendezvous_url, VectorProcessGroup(self.ranks))
        await self._group.exchange(self._machine, self.rank, None, rendezvous.collective_timeout_s)
        self._reset()
        self.begin_step()

    def create_model(self) -> None:
        self._require_group()

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def begin_step(self, block_rounds: int = 1, gradient_dtype: str = "float32") -> None:
        self._gradients = GradientSum(block_rounds, getattr(torch, gradient_dtype))

    @virtual_duration(GRADIENT_S)
    async def compute_round(  # type: ignore[override]
        self, index: int, bins: Sequence[Bin]
    ) -> list[BinStats]:
        """Compute a round: keep this rank's shard of the summed gradients; return its own bin's
        statistics.
        """
        gradients, full_weights = self._gradients, await self._gather_flat(self._flat_weights)
        gradient, stats = compute_gradient(full_weights, bins[0])
        summed = sum(await self._all_gather(gradient))
        assert isinstance(summed, Tensor)
        gradients.add(index, self._slice_own(summed).clone())
        return [stats]

    def list_owned_ranges(self, rank: int) -> NDArray[np.int64]:
        own = slice_rank(torch.arange(self.parameter_count), rank, self.ranks).numpy()
        runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
        return np.array([(run[0], run[-1] + 1) for run in runs if len(run)]).reshape(-1, 2)

    def make_gradient_adder(self) -> Callable[[int, NDArray[np.float32]], None]:
        gradients = self._gradients
        return lambda block, rows: gradients.add_block(block, torch.from_numpy(rows))

    @virtual_duration(UPDATE_S)
    async def apply_gradient(  # type: ignore[override]
        self, rounds: int, denominator: float, lr_factor: float
    ) -> float:
        gradient = await self._gather_flat(self._gradients.get_total(rounds)) / denominator
        norm = float(gradient.norm())
        self._momentum.mul_(0.9).add_(self._slice_own(gradient) / max(norm, 1.0))
        self._flat_weights.sub_(self._momentum, alpha=LEARNING_RATE * lr_factor)
        self.steps += 1
        self.begin_step()
        return norm

    @virtual_duration(TRANSFER_S)
    async def scatter_weights(
        self, names: Sequence[str], whole: Mapping[str, Tensor] | None
    ) -> None:
        self._flat_weights = self._slice_own(flatten((await self._all_gather(whole))[0])).clone()

    def score(self, bin: Bin, quantity: str) -> NDArray[np.float32]:
        return np.zeros(len(bin.tokens), np.float32)


class VectorSoleRank(Rank):
    """Sole rank of a core, which owns the whole vector."""

    gradient_s, update_s = GRADIENT_S, UPDATE_S

    @virtual_duration("gradient_s")
    def compute_round(self, index: int, bins: Sequence[Bin]) -> list[BinStats]:
        return super().compute_round(index, bins)

    @virtual_duration("update_s")
    def apply_gradient(self, rounds: int, denominator: float, lr_factor: float) -> float:
        return super().apply_gradient(rounds, denominator, lr_factor)


class VectorArithmetic(LearnerFactory):
    """Arithmetic of virtual training processes."""

    def prepare(self) -> None:
        """Do nothing, as nothing is compiled."""

    def make_learner(self, data: JobData) -> Learner:
        return VectorLearner(data.config.seed)

    def make_rank(self, data: JobData, placement: Placement, accelerator: str) -> Rank:
        if placement.ranks == 1:
            return VectorSoleRank.for_single_rank(self.make_learner(data))
        return VectorRank(data, placement.rank, placement.ranks)
