"""Bin packing: which sequences share a bin, and which bins are computed at the same time.

Sequences are concatenated in bins of a token budget. A round is one bin for each rank. Ranks wait
for each other, so a round takes as long as its most expensive bin, and a good plan has a small sum
of these (`compute_makespan`). Cost grows with length squared while the budget counts tokens, so
equally full bins differ in cost.

Several plans are made and the best is taken: longest processing time first (Graham 1969) over all
bins, each within its budget; the same round after round, from the longest sequence on, so that
expensive sequences share a round; best-fit decreasing (Johnson 1974), which needs the fewest bins.
Bins of similar cost then share a round, within which sequences are exchanged until that has no
gain.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, sqrt

from meshrl.kernels.bin_cost import BinCost

Bin = list[int]  # indices of sequences
Round = list[Bin]  # a bin for each rank; some may be empty

# Rounds' worth of tokens to choose from before one is packed: a larger value gives fuller bins.
LOOKAHEAD_ROUNDS = 2.0
SIZES_PER_DOUBLING = 32  # bin sizes between two powers of two: at most a 32nd is padding
# Shares of a round's budget that the online packer tries.
FILL_RATIOS = (1.0, 0.97, 0.94, 0.9, 0.86, 0.82, 0.78)
SMALL_PROBLEM_SIZE = 20_000  # sequences times rounds up to which every plan is computed
MAX_EXTRA_ROUNDS = 4  # extra rounds to try: less full bins can be more even
ACCEPTED_GAP = 3e-4  # accepted excess of a plan's cost over the lower bound
EXCHANGES_PER_RANK = 8  # exchanges in a round, for each rank
BALANCE_TOLERANCE = 1e-5  # share of the cost by which even bins may differ


def pack_rounds(
    lengths: Sequence[int], budget_tokens: int, ranks: int = 1, cost: BinCost | None = None
) -> list[Round]:
    """Pack sequences into rounds of `ranks` bins of at most `budget_tokens`, each exactly once.

    The result depends on the arguments alone. A sequence longer than the budget gets a bin of its
    own. ValueError if a length is not positive.
    """
    if any(length < 1 for length in lengths):
        raise ValueError("a sequence to pack has no tokens")
    if not lengths:
        return []
    problem = _PackingProblem(lengths, budget_tokens, ranks, cost or BinCost())
    best: list[Round] = []
    least = inf
    for bins in problem.iter_candidates():
        rounds = problem.group_into_rounds(bins)
        if problem.is_small:
            rounds = [problem.balance_round(one) for one in rounds]
        if (takes := problem.compute_makespan(rounds)) < least:
            best, least = rounds, takes
        if least <= problem.compute_lower_bound(len(best)) * (1 + ACCEPTED_GAP):
            break
    return best if problem.is_small else [problem.balance_round(one) for one in best]


def compute_makespan(rounds: Iterable[Round], lengths: Sequence[int], cost: BinCost) -> float:
    """Return the cost of rounds if ranks wait for each other: the sum of each round's dearest
    bin.
    """
    return sum(max(cost.estimate_bin([lengths[i] for i in bin]) for bin in one) for one in rounds)


def get_padded_size(tokens: int) -> int:
    """Return a size for a bin of `tokens` tokens, from a small set.

    Compiled graphs and blocks of memory are cached by size. At most a 32nd is padding.
    """
    step = max(16, 1 << max(0, tokens.bit_length() - 1 - SIZES_PER_DOUBLING.bit_length() + 1))
    return -(-tokens // step) * step


class RoundPacker:
    """Online packer of sequences, nearly as good as with all sequences known in advance.

    A round is packed from twice the tokens that it holds, long and short ones as they come.
    """

    def __init__(self, budget_tokens: int, ranks: int = 1, cost: BinCost | None = None) -> None:
        self._budget, self._ranks, self._cost = budget_tokens, ranks, cost or BinCost()
        self._pending_lengths: dict[int, int] = {}  # length of each waiting sequence
        self._num_added = 0  # received sequences

    def add_sequences(self, lengths: Sequence[int]) -> list[Round]:
        """Add sequences, numbered in order of arrival, and return the rounds that are full now."""
        self._pending_lengths.update(enumerate(lengths, self._num_added))
        self._num_added += len(lengths)
        rounds = []
        while sum(self._pending_lengths.values()) >= LOOKAHEAD_ROUNDS * self._budget * self._ranks:
            items = list(self._pending_lengths)
            lengths_left = [self._pending_lengths[i] for i in items]
            problem = _PackingProblem(lengths_left, self._budget, self._ranks, self._cost)
            rounds.append(
                self._take_round(
                    items,
                    problem.balance_round(
                        max(map(problem.sample_round, FILL_RATIOS), key=problem.compute_utilization)
                    ),
                )
            )
        return rounds

    def flush(self) -> list[Round]:
        """Return the rounds of all remaining sequences."""
        items = list(self._pending_lengths)
        lengths = [self._pending_lengths[i] for i in items]
        rounds = pack_rounds(lengths, self._budget, self._ranks, self._cost)
        return [self._take_round(items, one) for one in rounds]

    def _take_round(self, items: list[int], one: Round) -> Round:
        bins = [[items[i] for i in bin] for bin in one]
        for bin in bins:
            for i in bin:
                del self._pending_lengths[i]
        return bins


@dataclass(slots=True)
class _OpenBin:
    items: Bin = field(default_factory=list)
    tokens: int = 0
    cost: float = 0.0  # sum over its sequences


class _PackingProblem:
    """Lengths of one packing with their costs; `order` is longest first."""

    def __init__(self, lengths: Sequence[int], budget: int, ranks: int, cost: BinCost) -> None:
        self.lengths, self.budget, self.ranks, self.cost = lengths, budget, ranks, cost
        self.costs = [cost.estimate_sequence(length) for length in lengths]
        self.order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        self.is_small = len(lengths) * sum(lengths) <= SMALL_PROBLEM_SIZE * budget * ranks

    def compute_makespan(self, rounds: list[Round]) -> float:
        return sum(
            max(sum(self.costs[i] for i in bin) + self.cost.per_bin * bool(bin) for bin in one)
            for one in rounds
        )

    def compute_lower_bound(self, rounds: int) -> float:
        """Return a lower bound of the cost of plans with `rounds` rounds."""
        return sum(self.costs) / self.ranks + rounds * self.cost.per_bin

    def iter_candidates(self) -> Iterator[list[Bin]]:
        """Yield plans with the fewest bins, and with one round more where that may pay."""
        if self.ranks == 1:
            yield self._pack_best_fit()
            return
        alone = [length for length in self.lengths if length > self.budget]
        fewest = len(alone) + -(-(sum(self.lengths) - sum(alone)) // self.budget)
        least = -(-fewest // self.ranks)
        for rounds in range(least, least + MAX_EXTRA_ROUNDS):
            bins = [_OpenBin() for _ in range(rounds * self.ranks)]
            if not self._assign_to_cheapest(bins, self.order, inf):  # every sequence is placed
                yield [bin.items for bin in bins]
        yield self._pack_best_fit()
        if self.is_small:
            yield self._pack_round_by_round(least)

    def _pack_best_fit(self) -> list[Bin]:
        bins: list[Bin] = []
        room: list[tuple[int, int]] = []  # (tokens free, bin)
        shortest = self.lengths[self.order[-1]]
        for i in self.order:
            length = self.lengths[i]
            fit = bisect_left(room, (length, -1))
            if fit < len(room):
                free, bin = room.pop(fit)
                bins[bin].append(i)
            else:
                free, bin = max(self.budget, length), len(bins)
                bins.append([i])
            if free - length >= shortest:
                insort(room, (free - length, bin))
        return bins

    def _pack_round_by_round(self, rounds: int) -> list[Bin]:
        """Pack each round by itself, up to the mean of the remaining cost or to its longest
        sequence.
        """
        remaining = self.order
        packed: list[Bin] = []
        while remaining:
            still = max(1, rounds - len(packed) // self.ranks)
            share = sum(self.costs[i] for i in remaining) / (still * self.ranks)
            bins = [_OpenBin() for _ in range(self.ranks)]
            remaining = self._assign_to_cheapest(
                bins, remaining, max(share, self.costs[remaining[0]])
            )
            packed += [bin.items for bin in bins]
        return packed

    def sample_round(self, fill_ratio: float) -> Round:
        """Fill a round with a regular sample of sequences, to about `fill_ratio` of its budget.

        Then add others that still fit and do not exceed the cost of the dearest bin.
        """
        share = fill_ratio * self.ranks * self.budget / sum(self.lengths)
        target_tokens, sampled_tokens, chosen, others = 0.0, 0, [], []
        for i in self.order:
            target_tokens += share * self.lengths[i]
            if sampled_tokens < target_tokens:
                chosen.append(i)
                sampled_tokens += self.lengths[i]
            else:
                others.append(i)
        bins = [_OpenBin() for _ in range(self.ranks)]
        self._assign_to_cheapest(bins, chosen, inf)
        self._assign_to_cheapest(bins, others, max(bin.cost for bin in bins))
        return [bin.items for bin in bins]

    def compute_utilization(self, one: Round) -> float:
        """Return the share of a round's time in which its ranks compute."""
        costs = [sum(self.costs[i] for i in bin) for bin in one]
        return sum(costs) / (len(costs) * (max(costs) + self.cost.per_bin))

    def _assign_to_cheapest(
        self, bins: list[_OpenBin], items: list[int], limit: float
    ) -> list[int]:
        """Put `items`, longest first, into the cheapest bin each that has room within `limit`.

        Return those without room. A bin without room waits until items are short enough, so that no
        bin is checked in vain.
        """
        open_bins = [(bin.cost, b) for b, bin in enumerate(bins)]
        heapify(open_bins)
        waiting: list[tuple[int, int]] = []  # (minus the length that has room, bin)
        limit, rest = limit * (1 + 1e-9), []
        for i in items:
            length = self.lengths[i]
            while waiting and -waiting[0][0] >= length:
                b = heappop(waiting)[1]
                heappush(open_bins, (bins[b].cost, b))
            while open_bins:
                bin = bins[open_bins[0][1]]
                room = self.budget - bin.tokens
                if room > 0 and limit < inf:
                    room = min(room, int(self._get_length_for_cost(limit - bin.cost)))
                if room >= length or not bin.items:
                    break
                heappush(waiting, (-room, heappop(open_bins)[1]))
            else:
                rest.append(i)
                continue
            _add_to_bin(bin, i, length, self.costs[i])
            heapreplace(open_bins, (bin.cost, open_bins[0][1]))
        return rest

    def _get_length_for_cost(self, cost: float) -> float:
        if cost <= 0:
            return 0.0
        token, square = self.cost.per_token, self.cost.per_square
        return 2 * cost / (token + sqrt(token * token + 4 * square * cost))

    def group_into_rounds(self, bins: list[Bin]) -> list[Round]:
        """Group bins of similar cost into rounds, dearest first."""
        bins = [bin for bin in bins if bin]
        bins.sort(key=lambda bin: (-sum(self.costs[i] for i in bin), bin[0]))
        bins += [[] for _ in range(-len(bins) % self.ranks)]
        return [bins[i : i + self.ranks] for i in range(0, len(bins), self.ranks)]

    def balance_round(self, one: Round) -> Round:
        """Move or swap sequences between the dearest and the cheapest bin while that has a gain."""
        bins = [
            _OpenBin(list(bin), sum(self.lengths[i] for i in bin), sum(self.costs[i] for i in bin))
            for bin in one
        ]
        for _ in range(EXCHANGES_PER_RANK * self.ranks if self.ranks > 1 else 0):
            high = max(range(len(bins)), key=lambda b: (bins[b].cost, b))
            low = min(range(len(bins)), key=lambda b: (bins[b].cost, b))
            level = bins[high].cost - bins[low].cost <= BALANCE_TOLERANCE * bins[high].cost
            if level or not self._exchange_sequences(bins[high], bins[low]):
                break
        return [bin.items for bin in bins]

    def _exchange_sequences(self, high: _OpenBin, low: _OpenBin) -> bool:
        """Make the exchange that levels two bins best; return False if there is none."""
        gap = high.cost - low.cost
        desired, room = gap / 2, self.budget - low.tokens
        best: tuple[float, int, int | None] = (desired * (1 - 1e-3), -1, None)
        offered = sorted(low.items, key=lambda i: (self.lengths[i], i))
        sizes = [self.lengths[i] for i in offered]
        tried: set[int] = set()
        for i in high.items:
            length = self.lengths[i]
            if length in tried or length > self.budget:
                continue
            tried.add(length)
            if length <= room:
                best = min(best, (abs(desired - self.costs[i]), i, None), key=lambda x: x[0])
            # Sequences of the cheaper bin that are cheaper than this one by about the desired
            # difference.
            at = bisect_left(sizes, self._get_length_for_cost(self.costs[i] - desired))
            for j in offered[max(0, at - 1) : at + 1]:
                fits = self.lengths[i] - self.lengths[j] <= room
                if fits and self.lengths[j] <= self.budget:
                    off = abs(desired - (self.costs[i] - self.costs[j]))
                    best = min(best, (off, i, j), key=lambda x: x[0])
        _, i, other = best
        if i < 0:
            return False
        self._move_sequence(i, high, low)
        if other is not None:
            self._move_sequence(other, low, high)
        return True

    def _move_sequence(self, i: int, source: _OpenBin, target: _OpenBin) -> None:
        source.items.remove(i)
        _add_to_bin(source, None, -self.lengths[i], -self.costs[i])
        _add_to_bin(target, i, self.lengths[i], self.costs[i])


def _add_to_bin(bin: _OpenBin, item: int | None, tokens: int, cost: float) -> None:
    if item is not None:
        bin.items.append(item)
    bin.tokens += tokens
    bin.cost += cost
