"""One rank's part in a round of a zebra gang: its tasks in their order, and what goes between them.

Every attention rank has `micros` bins. What its tokens are sent to is sorted by expert, so that the
rows of each rank that has experts lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshrl.common.base.clock import SystemClock
from meshrl.common.hardware.zebra.schedule import Task, TaskKind, attention_order, expert_order
from meshrl.common.model.network.moe import inverse
from meshrl.services.trainer.models.forward import Placed
from meshrl.services.trainer.zebra import experts as of_experts
from meshrl.services.trainer.zebra.experts import Made
from meshrl.services.trainer.zebra.lanes import Exchange, ExchangeKey, Lane, Shared
from meshrl.services.trainer.zebra.owners import ZebraOwners
from meshrl.services.trainer.zebra.pace import ZebraPace
from meshrl.services.trainer.zebra.pieces import Cut, PieceInputs, PieceOutputs, Pieces

# Of micro-batch, ..; the gradients of what came.
Head = Callable[[int, Placed, PieceInputs], PieceInputs | None]


@dataclass(frozen=True)
class Sorted:
    """How the rows of a micro-batch that go to the experts of a layer are ordered."""

    order: Tensor  # int64 [n * k]: choices, by expert
    back: Tensor  # int64 [n * k]: its inverse
    counts: dict[int, Tensor]  # int64 [experts there], by rank
    sizes: dict[int, int]  # rows, by rank


@dataclass
class ComputedSpan:
    """When a task was computed, on the monotonic clock."""

    task: Task
    began_s: float
    ended_s: float


@dataclass
class Passed:
    """What a rank remembers of one micro-batch between its tasks."""

    given: Placed
    lengths: Sequence[int]  # of its sequences
    balance: Tensor  # scalar: weight of a layer's balance loss
    cuts: dict[int, Cut] = field(default_factory=dict)  # by piece
    sent: dict[int, Sorted] = field(default_factory=dict)  # by mixture layer
    slope: PieceInputs | None = None  # the gradients that the next piece has given


class Round:
    """It blocks: lanes are threads, and whoever needs something waits for it."""

    def __init__(
        self,
        owners: ZebraOwners,
        rank: int,
        pieces: Pieces,
        lanes: tuple[Lane, Lane],
        deadline_s: float,
        again: bool,
        pace: ZebraPace | None = None,
    ) -> None:
        """`lanes`: dispatch and combine. `deadline_s`: for what another rank has to give. `again`:
        what a task computed is computed again on the way back.
        """
        self._owners, self._rank, self._pieces = owners, rank, pieces
        self._dispatch, self._combine = lanes
        self._clock, self._deadline_s = SystemClock(), deadline_s
        self._shared = Shared(self._clock, deadline_s)
        self._again, self._pace = again, pace
        self._width, self._dtype = pieces.width, pieces.dtype
        self._attends = rank < owners.attention
        self._layers = len(owners.mixture_layers)
        self._micros: list[Passed] = []
        self._made: dict[tuple[int, int], Made] = {}  # by mixture layer and micro-batch
        # Rows that stay here, and counts.
        self._own: dict[ExchangeKey, tuple[Tensor, Tensor | None]] = {}
        self._own_made: dict[ExchangeKey, Tensor] = {}
        self._keeps = True
        self.spans: list[ComputedSpan] = []

    def run(self, given: Sequence[Passed], micros: int, head: Head, forward_only: bool) -> None:
        """All tasks of this rank. `given`: its micro-batches, of an expert rank none."""
        self._micros, self._keeps = list(given), not forward_only
        self._made, self._own, self._own_made = {}, {}, {}
        self.spans = []
        self._shared = shared = Shared(self._clock, self._deadline_s)
        keys = [
            ExchangeKey(t.backward, t.layer, t.micro) for t in expert_order(self._layers, micros)
        ]
        keys = [key for key in keys if not (forward_only and key.backward)]
        dispatched = [one for key in keys if (one := self._dispatched(key))]
        combined = [one for key in keys if (one := self._combined(key))]
        here = [own.stop > own.start for own in map(self._experts_here, range(self._layers))]
        if self._attends:
            order = attention_order(self._layers, micros, here)
        else:
            order = [task for task in expert_order(self._layers, micros) if here[task.layer]]
        with self._dispatch.round(dispatched, shared), self._combine.round(combined, shared):
            for task in order:
                if forward_only and task.backward:
                    continue
                if task.work is not TaskKind.ATTENTION:
                    self._experts(task)
                elif task.backward:
                    self._attention_backward(task)
                else:
                    self._attention(task, head)
        self._micros = []

    def fail(self, error: BaseException) -> None:
        """Ends a round that another thread computes."""
        self._shared.fail(error)

    @property
    def transfers(self) -> list[tuple[float, float]]:
        """When this rank gave something in the last round, on the monotonic clock."""
        return self._dispatch.transfers + self._combine.transfers

    @contextmanager
    def _timed(self, task: Task, sizes: Sequence[float]) -> Iterator[None]:
        """A task of sequences of these lengths, or of so many rows of each expert."""
        began_s, pace = self._shared.now(), self._pace
        yield
        if pace is not None:
            if task.work is TaskKind.ATTENTION and task.layer == self._layers:
                wanted_s = pace.head_s(sum(sizes), self._keeps)
            else:
                wanted_s = pace.task_s(task.work, task.backward, sizes)
            self._shared.rest(began_s + wanted_s)
            pace.took(wanted_s, self._shared.now() - began_s)
        self.spans.append(ComputedSpan(task, began_s, self._shared.now()))

    # -- attention -------------------------------------------------------------------------------

    def _attention(self, task: Task, head: Head) -> None:
        passed, number, j = self._micros[task.micro], task.layer, task.micro
        coming = self._coming(number, j) if number else None
        with self._timed(task, passed.lengths):
            if number == self._layers:
                assert coming is not None
                passed.slope = head(j, passed.given, coming)
            else:
                self._piece(passed, number, coming)
        if number < self._layers:
            cut = passed.cuts[number]
            chosen, x = cut.told, PieceOutputs(*cut.ends).x
            passed.sent[number] = found = self._sorted(number, chosen)
            rows = x.index_select(0, found.order // chosen.shape[1])
            self._give(ExchangeKey(False, number, j), found, rows)
        if not self._keeps:
            passed.cuts.pop(number - 1, None)

    def _piece(self, passed: Passed, number: int, coming: PieceInputs | None) -> None:
        given, pieces = passed.given, self._pieces

        def run(coming: PieceInputs | None) -> tuple[tuple[Tensor, ...], Tensor]:
            if coming is None:
                return pieces.first(given)
            return pieces.next(number, given, coming)

        with torch.set_grad_enabled(self._keeps):
            passed.cuts[number] = Cut(run, coming, self._again or not self._keeps)

    def _attention_backward(self, task: Task) -> None:
        passed, number, j = self._micros[task.micro], task.layer, task.micro
        if number == self._layers:  # its forward pass went back at once
            self._send_back(number - 1, j)
            return
        slope = passed.slope
        assert slope is not None
        returned = self._joined(True, number, j, passed.sent[number])
        with self._timed(task, passed.lengths):
            k = self._pieces.layer(number).experts.config.experts_per_token
            x = returned.view(-1, k, self._width).sum(1)
            gradients = PieceOutputs(slope.residual, slope.shares, x, passed.balance)
            passed.slope = passed.cuts.pop(number).backward(gradients)
        if number:
            self._send_back(number - 1, j)

    def _coming(self, number: int, j: int) -> PieceInputs:
        passed = self._micros[j]
        ends = PieceOutputs(*passed.cuts[number - 1].ends)
        apart = self._joined(False, number - 1, j, passed.sent[number - 1])
        k = self._pieces.layer(number - 1).experts.config.experts_per_token
        return PieceInputs(ends.residual, ends.shares, apart.view(-1, k, self._width))

    def _send_back(self, mixture: int, j: int) -> None:
        passed = self._micros[j]
        assert passed.slope is not None
        slope = passed.slope.apart.reshape(-1, self._width)
        found = passed.sent[mixture]
        self._give(ExchangeKey(True, mixture, j), found, slope.index_select(0, found.order))

    def _give(self, key: ExchangeKey, found: Sorted, rows: Tensor) -> None:
        parts = dict(zip(found.sizes, torch.split(rows, list(found.sizes.values())), strict=True))
        counts = {} if key.backward else dict(found.counts)
        if self._rank in parts:
            self._own[key] = parts.pop(self._rank), counts.pop(self._rank, None)
        if parts:
            self._dispatch.give(key, parts, counts)
            if not self._to_others(key.mixture):
                self._combine.ready(key)

    def _sorted(self, mixture: int, chosen: Tensor) -> Sorted:
        """How choices [n, k] lie by expert."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        owners = self._owners
        every = torch.bincount(flat, minlength=owners.experts_per_layer)
        own = {rank: owners.experts_of(mixture, rank) for rank in owners.owners(mixture)}
        known = every.tolist()  # once: a GPU is waited for
        counts = {rank: every[experts] for rank, experts in own.items()}
        sizes = {rank: sum(known[experts]) for rank, experts in own.items()}
        return Sorted(order, inverse(order), counts, sizes)

    def _joined(self, backward: bool, mixture: int, j: int, found: Sorted) -> Tensor:
        """[n * k, width]: what came back from all ranks, in the order of the choices."""
        key = ExchangeKey(backward, mixture, j)
        came = self._combine.take(key)[0] if set(found.sizes) - {self._rank} else {}
        if self._rank in found.sizes:
            came[self._rank] = self._own_made.pop(key)
        return torch.cat([came[rank] for rank in found.sizes]).index_select(0, found.back)

    # -- experts ---------------------------------------------------------------------------------

    def _experts(self, task: Task) -> None:
        key, place = ExchangeKey(task.backward, task.layer, task.micro), (task.layer, task.micro)
        rows, counts = self._came(key)
        sizes: list[float] = []  # rows that each expert here gets
        if self._pace is not None and counts:
            sizes = torch.stack(list(counts.values())).sum(0).tolist()
        elif self._pace is not None:
            ends = self._made[place].ends
            sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        with self._timed(task, sizes):
            if task.backward:
                found = of_experts.backward(self._made.pop(place), rows)
            else:
                found, made = of_experts.forward(
                    self._pieces.layer(task.layer).experts, counts, rows, self._keeps, self._again
                )
                if self._keeps:
                    self._made[place] = made
        if self._rank in found:
            self._own_made[key] = found.pop(self._rank)
        if self._to_others(task.layer):
            self._combine.give(key, found)

    def _came(self, key: ExchangeKey) -> tuple[dict[int, Tensor], Mapping[int, Tensor]]:
        """The rows of each attention rank, and how many of them are each expert's."""
        rows: dict[int, Tensor] = {}
        counts: dict[int, Tensor] = {}
        if self._from_others():
            rows, counts = self._dispatch.take(key)
        if self._attends:
            own, own_counts = self._own.pop(key)
            rows[self._rank] = own
            if own_counts is not None:
                counts[self._rank] = own_counts
        return rows, counts

    # -- exchanges -------------------------------------------------------------------------------

    def _experts_here(self, mixture: int) -> slice:
        return self._owners.experts_of(mixture, self._rank)

    def _from_others(self) -> list[int]:
        return [rank for rank in range(self._owners.attention) if rank != self._rank]

    def _to_others(self, mixture: int) -> bool:
        own = self._experts_here(mixture)
        return own.stop > own.start and bool(self._from_others())

    def _dispatched(self, key: ExchangeKey) -> Exchange | None:
        """What goes out to experts, as far as this rank has part in it."""
        mixture = key.mixture
        here = self._experts_here(mixture)
        length = here.stop - here.start
        sources = {rank: length for rank in self._from_others()} if length else {}
        others = set(self._owners.owners(mixture)) - {self._rank}
        if not sources and not (self._attends and others):
            return None

        def sizes() -> dict[int, int]:
            return self._dispatch.came(key._replace(backward=False))

        known = sizes if key.backward else dict
        about = sources, self._width, self._dtype, known
        return Exchange(key, self._attends, not key.backward, *about)

    def _combined(self, key: ExchangeKey) -> Exchange | None:
        _, mixture, j = key
        others = [rank for rank in self._owners.owners(mixture) if rank != self._rank]
        sources = dict.fromkeys(others, 0) if self._attends else {}
        sends = self._to_others(mixture)
        if not sources and not sends:
            return None

        def sizes() -> dict[int, int]:
            return {rank: self._micros[j].sent[mixture].sizes[rank] for rank in sources}

        about = sources, self._width, self._dtype, sizes
        return Exchange(key, True, False, *about)
