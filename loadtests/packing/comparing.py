"""Plans of a step beside other ways to plan it, and its passes beside padded ones."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from loadtests.measuring.entry import flat
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.kernels.bin_cost import BinCost
from meshrl.kernels.packing import Round, RoundPacker, compute_makespan, pack_rounds
from meshrl.services.trainer.bins.packing import Bin, TrainingSequence, make_bins
from meshrl.services.trainer.models.forward import fuse_pointwise, run_forward
from tests.attention import causal_attention

JOB = Path(__file__).parents[2] / "examples" / "calculator.toml"
SEQUENCES, BUDGET, MEDIAN, LONGEST = 4096, 32_768, 1000.0, 16_384
COST = BinCost(per_token=1.0, per_square=1 / 32_768, per_bin=0.01 * BUDGET)
RANKS = (1, 2, 4, 8)
GROUP = 16
SIGMA = 1.0  # of the logarithm of lengths of plans
TRAINED = 256  # sequences of a step of the example
TRAINED_MEDIAN, TRAINED_SIGMA, TRAINED_LONGEST, TRAINED_SHORTEST = 40.0, 0.8, 320, 8
BIN_TOKENS = 2560
PROMPT = 0.3  # share of a sequence that carries no loss
Lengths = list[int]
Peer = Callable[[Lengths, int, int, BinCost], list[Round]]


class Part(NamedTuple):
    """One bin of a partial partition: a single sequence, or two parts that were merged."""

    cost: float
    sequence: int  # -1 if merged
    halves: tuple[Part, Part] | None


def padding(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """Fill batches of equal count in order of arrival, sized for the longest sequence."""
    count = max(1, budget // max(lengths))
    batches = [list(range(i, min(i + count, len(lengths)))) for i in range(0, len(lengths), count)]
    return _rounds(batches, ranks)


def first_fit(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """Pack each sequence, in the order of arrival, into the first bin with enough capacity."""
    bins: list[list[int]] = []
    filled: list[int] = []
    for i, length in enumerate(lengths):
        for at, tokens in enumerate(filled):
            if tokens + length <= budget:
                bins[at].append(i)
                filled[at] += length
                break
        else:
            bins.append([i])
            filled.append(length)
    return _rounds(bins, ranks)


def sort_and_snake(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """Deal sequences, longest first, back and forth to the fewest bins that fit."""

    def dealt(count: int) -> list[list[int]]:
        bins: list[list[int]] = [[] for _ in range(count)]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for i, bin in zip(order, cycle([*bins, *reversed(bins)]), strict=False):
            bin.append(i)
        return bins

    return _rounds(_fewest(dealt, lengths, budget, ranks), ranks)


def karmarkar_karp(lengths: Lengths, budget: int, ranks: int, cost: BinCost) -> list[Round]:
    """Pack by the largest differencing method (Karmarkar, Karp 1982) on costs, into the fewest
    bins.

    Bins of similar cost share a round. verl balances its micro-batches so.
    """
    costs = [cost.estimate_sequence(length) for length in lengths]
    bins = _fewest(partial(_differenced, costs), lengths, budget, ranks)
    bins.sort(key=lambda bin: -sum(costs[i] for i in bin))
    return _rounds(bins, ranks)


PEERS: dict[str, Peer] = {
    "padding": padding,
    "first_fit": first_fit,
    "sort_and_snake": sort_and_snake,
    "karmarkar_karp": karmarkar_karp,
}


def _differenced(costs: list[float], count: int) -> list[list[int]]:
    """Merge the two least even partial partitions, heaviest with lightest, until one is left."""
    heap = [(-c, i, [Part(c, i, None)]) for i, c in enumerate(costs)]
    heapify(heap)
    while len(heap) > 1:
        _, number, parts = heappop(heap)
        _, _, others = heappop(heap)
        both = max(0, len(parts) + len(others) - count)  # those that meet
        alone, meeting = parts[: len(parts) - both], parts[len(parts) - both :]
        merged = alone + others[: len(others) - both]
        for a, b in zip(meeting, reversed(others[len(others) - both :]), strict=True):
            merged.append(Part(a.cost + b.cost, -1, (a, b)))
        merged.sort(key=lambda part: -part.cost)
        least = merged[-1].cost if len(merged) == count else 0.0
        heappush(heap, (least - merged[0].cost, number, merged))
    return [_leaves(part) for part in heap[0][2]] if heap else []


def _leaves(part: Part) -> list[int]:
    found, left = [], [part]
    while left:
        _, sequence, halves = left.pop()
        if halves is not None:
            left += halves
        elif sequence >= 0:
            found.append(sequence)
    return found


def _fewest(
    split: Callable[[int], list[list[int]]], lengths: Lengths, budget: int, ranks: int
) -> list[list[int]]:
    """Split into a multiple of `ranks` bins, the fewest (to one in a hundred) that all fit."""
    count = -(-sum(lengths) // budget)
    while True:
        count = -(-count // ranks) * ranks
        bins = split(count)
        if all(sum(lengths[i] for i in bin) <= budget or len(bin) == 1 for bin in bins):
            return bins
        count += max(ranks, count // 100)


def _rounds(bins: list[list[int]], ranks: int) -> list[Round]:
    bins = bins + [[] for _ in range(-len(bins) % ranks)]
    return [bins[i : i + ranks] for i in range(0, len(bins), ranks)]


def lognormal(
    count: int, middle: float, sigma: float, least: int, most: int, seed: int
) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(middle), sigma, count)
    return [int(n) for n in np.clip(drawn, least, most)]


# --- Plans ----------------------------------------------------------------------------------------


def plans(seed: int, sequences: int = SEQUENCES) -> dict[str, Any]:
    lengths = lognormal(sequences, MEDIAN, SIGMA, 16, LONGEST, seed)
    found: dict[str, Any] = {}
    ratios, streams, times = [], [], []
    for ranks in RANKS:
        plan = partial(pack_rounds, lengths, BUDGET, ranks, COST)
        ours = plan()
        takes = compute_makespan(ours, lengths, COST)
        others = {name: peer(lengths, BUDGET, ranks, COST) for name, peer in PEERS.items()}
        spans = {name: lockstep(name, rounds, lengths) for name, rounds in others.items()}
        ratios.append(takes / min(spans.values()))
        streams.append(compute_makespan(streamed(lengths, ranks), lengths, COST) / takes)
        times.append(1e3 * median(timed(plan) for _ in "abc"))
        level = sum(map(COST.estimate_sequence, lengths)) / ranks
        found[f"makespan_{ranks}"] = {
            name: round(span / level, 4) for name, span in {"ours": takes, **spans}.items()
        }
        found[f"fill_{ranks}"] = {
            name: round(fill(name, rounds, lengths), 3)
            for name, rounds in {"ours": ours, **others}.items()
        }
    return flat(found) | {
        "lockstep_ratio_best_peer": round(max(ratios), 5),
        "stream_ratio": round(max(streams), 4),
        f"plan_ms_{sequences}": round(max(times), 1),
    }


def streamed(lengths: list[int], ranks: int) -> list[Round]:
    packer = RoundPacker(BUDGET, ranks, COST)
    rounds = [
        one
        for i in range(0, len(lengths), GROUP)
        for one in packer.add_sequences(lengths[i : i + GROUP])
    ]
    return rounds + packer.flush()


def lockstep(name: str, rounds: list[Round], lengths: list[int]) -> float:
    """Compute the cost of padded batches, determined by their longest sequences."""
    if name != "padding":
        return compute_makespan(rounds, lengths, COST)
    longest = [max((lengths[i] for bin in one for i in bin), default=0) for one in rounds]
    most = [max(map(len, one)) for one in rounds]
    return sum(COST.estimate_bin([n] * count) for n, count in zip(longest, most, strict=True))


def fill(name: str, rounds: list[Round], lengths: list[int]) -> float:
    bins = [bin for one in rounds for bin in one]
    if name == "padding":
        return sum(lengths) / sum(len(bin) * max(lengths[i] for i in bin) for bin in bins if bin)
    return sum(lengths) / (BUDGET * len(bins))


def timed(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


# --- Passes ---------------------------------------------------------------------------------------


def passes(rounds: int, seed: int, trained: int = TRAINED) -> dict[str, Any]:
    sequences = trajectories(seed, trained)
    model = example_model()
    bins = make_bins(sequences, BIN_TOKENS)
    count = -(-len(sequences) // len(bins))
    batches = [Padded(sequences[i : i + count]) for i in range(0, len(sequences), count)]
    packed_step(model, bins), padded_step(model, batches)  # warm
    loss, gradient = packed_step(model, bins), gradient_of(model)
    expected, reference = padded_step(model, batches), gradient_of(model)
    times: dict[str, list[float]] = {"packed": [], "padded": []}
    for _ in range(rounds):
        times["packed"].append(timed(lambda: packed_step(model, bins)))
        times["padded"].append(timed(lambda: padded_step(model, batches)))
    speedup = median(b / a for a, b in zip(times["packed"], times["padded"], strict=True))
    real = sum(s.position_count for s in sequences)
    bound = sum(batch.tokens.numel() for batch in batches) / real
    return {
        "packed_speedup": round(speedup, 3),
        "padding_bound": round(bound, 3),
        "packed_share_of_bound": round(speedup / bound, 3),
        "loss_difference": abs(loss / expected - 1),
        "gradient_difference": float((gradient - reference).norm() / reference.norm()),
    }


def example_model() -> Decoder:
    config = tomllib.loads(JOB.read_text())["model"]["config"]
    model = Decoder(ModelConfig.from_hf(config))
    model.initialise(torch.Generator().manual_seed(0))
    fuse_pointwise(model)  # for padded passes too
    return model


def trajectories(seed: int, count: int) -> list[TrainingSequence]:
    random = np.random.default_rng(seed)
    made = []
    for length in lognormal(
        count, TRAINED_MEDIAN, TRAINED_SIGMA, TRAINED_SHORTEST, TRAINED_LONGEST, seed
    ):
        mask = np.arange(length) >= PROMPT * length
        made.append(
            TrainingSequence(
                tokens=random.integers(0, 64, length).astype(np.int32),
                logprobs=np.where(mask, random.normal(-4.1, 0.1, length), 0).astype(np.float32),
                loss_mask=mask,
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.array(random.normal(), np.float32),
            )
        )
    return made


class Padded:
    """A minibatch of rows, each a sequence and padding behind it."""

    def __init__(self, sequences: list[TrainingSequence]) -> None:
        width = max(s.position_count for s in sequences)
        shape = len(sequences), width
        arrays = {name: np.zeros(shape, np.float32) for name in ("behaviour", "advantage")}
        tokens, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask = np.zeros(shape, np.bool_)
        for row, s in enumerate(sequences):
            tokens[row, : s.position_count], targets[row, : s.position_count] = (
                s.tokens[:-1],
                s.tokens[1:],
            )
            mask[row, : s.position_count] = s.loss_mask[1:]
            arrays["behaviour"][row, : s.position_count] = s.logprobs[1:]
            arrays["advantage"][row, : s.position_count] = s.advantages
        self.tokens = torch.from_numpy(tokens)
        self.positions = torch.arange(width).expand(shape)
        self.places = torch.from_numpy(np.flatnonzero(mask))
        self.targets = torch.from_numpy(targets).view(-1)[self.places]
        self.behaviour, self.advantage = (
            torch.from_numpy(array).view(-1)[self.places] for array in arrays.values()
        )


def padded_step(model: Decoder, batches: list[Padded]) -> float:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        hidden = model(batch.tokens, batch.positions, causal_attention)
        logits = model.compute_logits(hidden.flatten(0, 1).index_select(0, batch.places))
        logprobs = -cross_entropy(logits, batch.targets, reduction="none")
        loss = objective(logprobs, batch.behaviour, batch.advantage)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def packed_step(model: Decoder, bins: list[Bin]) -> float:
    model.zero_grad()
    total = 0.0
    for bin in bins:
        out = run_forward(model, bin)
        behaviour = torch.from_numpy(bin.behaviour_logprobs)[out.loss_positions]
        advantage = torch.from_numpy(bin.advantages)[out.loss_positions]
        loss = objective(out.logprobs, behaviour, advantage)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def objective(logprobs: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprobs - behaviour).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()


def gradient_of(model: Decoder) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
